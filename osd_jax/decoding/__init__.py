"""The decode loop: prefill, propose, verify, accept; it imports no model."""
