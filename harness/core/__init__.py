"""What launching, training and reading share. Standard library only."""
