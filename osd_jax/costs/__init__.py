"""Costs of serving and learning on this machine: their table and measurement."""
