"""What a strategy does to the model and between processes."""
