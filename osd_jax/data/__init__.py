"""Data: vocabularies, tokenizers, examples of tasks, query streams and corpora."""
