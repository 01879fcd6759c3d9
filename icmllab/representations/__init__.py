"""Comparing and aligning what networks learn: one module per paper."""
