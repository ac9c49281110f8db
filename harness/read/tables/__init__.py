"""Tables of what was measured."""
