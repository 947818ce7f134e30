"""The loop of `osd online` and `osd serve`: serve, measure, gate, learn, log."""
