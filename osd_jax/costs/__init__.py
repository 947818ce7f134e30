"""What serving and learning cost on this machine: one table, one measurement."""
