"""Measurements of a run: metrics per request and the logs."""
