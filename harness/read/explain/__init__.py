"""Where the time of a run went, and why."""
