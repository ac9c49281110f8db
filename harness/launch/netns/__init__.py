"""Emulated nodes: one machine stands in for several, in network namespaces."""
