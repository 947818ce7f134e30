"""Requests in flight, on the host: who decodes next, with which K, for how long."""
