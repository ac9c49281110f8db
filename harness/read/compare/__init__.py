"""Comparisons: of two sets of runs, or of the batch sizes in one set."""
