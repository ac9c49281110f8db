"""A cluster that is given jobs."""
