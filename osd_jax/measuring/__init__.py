"""Measurements of a run: metrics per request, the certificate and the logs."""
