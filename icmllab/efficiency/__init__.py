"""Quantizing, compressing and serving models: one module per paper."""
