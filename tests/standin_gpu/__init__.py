"""A CUDA machine without a GPU, and the tests that run on it (README.md)."""
