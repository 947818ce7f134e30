"""Models: implementations of `base.Model`, their weights and their conversion."""
