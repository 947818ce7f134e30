"""`osd serve`: an OpenAI-compatible HTTP server whose draft learns from its traffic."""
