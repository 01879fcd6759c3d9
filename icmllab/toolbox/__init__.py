"""Building blocks that several papers share and that belong to none."""
