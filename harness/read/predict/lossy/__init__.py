"""Links that lose packets or have jitter, simulated."""
