"""Training: what runs inside each process that torchrun starts."""
