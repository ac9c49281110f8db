"""Writes what the pages, outputs/ and experiments/ state from the code and the records."""
