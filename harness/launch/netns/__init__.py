"""Emulated nodes: one machine stands in for several."""
