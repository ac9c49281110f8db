"""Records read back: runs, groups of runs, sweeps."""
