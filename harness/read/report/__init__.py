"""Everything that was measured, on one page."""
