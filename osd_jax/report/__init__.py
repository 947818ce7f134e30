"""Tables, plots and report.html, made from the rows of metrics.jsonl."""
