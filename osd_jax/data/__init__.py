"""Data: vocabularies, preprocessors, tasks, query streams, generated topics."""
