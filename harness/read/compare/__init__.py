"""Runs compared: two sets of them, or the batches of one."""
