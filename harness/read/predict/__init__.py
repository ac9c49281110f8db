"""What a training would take on nodes and links that were not measured: an explicit model."""
