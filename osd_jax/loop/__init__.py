"""The loop that serves requests, measures, learns, logs and checkpoints."""
