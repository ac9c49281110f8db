"""Two sets of runs held against each other."""
