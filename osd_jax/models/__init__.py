"""Models: what stands behind the functions of `base.Model`."""
