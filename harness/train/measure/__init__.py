"""What is measured while a run trains."""
