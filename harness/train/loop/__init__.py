"""The Trainer, without the behaviour that falsifies comparisons."""
