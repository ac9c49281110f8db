"""Figures of measurements and predictions."""
