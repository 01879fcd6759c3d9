"""How networks are trained: one module per paper."""
