"""Starts the runs of a sweep: here, on emulated nodes, over ssh, on SLURM. Needs no torch."""
