"""The last words of a run, its report, and runs side by side."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.console

from osd_jax import base, writers
from osd_jax.data import prompts
from osd_jax.measuring import pages, savings, tables


def conclude(
  directory: writers.RunDirectory, console: rich.console.Console, verdict: str = ""
) -> Path:
  """Prints the tables and the last words of a run and writes its report.

  Args:
    directory: a run of any kind; its metrics.jsonl is read.
    console: where to print.
    verdict: the certificate's sentence, "" where nothing was checked.

  Returns:
    The report.
  """
  rows = list(writers.read(directory.metrics_path))
  page = pages.page(rows)
  for title, table in page.tables.items():
    tables.print_table(table, console, title)
  for sentence in (*page.sentences, verdict):
    if sentence:
      console.print(sentence, highlight=False, markup=False)
  report = _write(directory, rows, page, verdict)
  console.print(f"report: {report}", highlight=False, soft_wrap=True)
  return report


def leave_alone(
  directory: writers.RunDirectory, console: rich.console.Console
) -> writers.RunResult:
  """Says that a run is finished and stays as it is; draws its report if it has none."""
  console.print(
    f"{directory.path} holds this run, finished {directory.finished}; nothing was done."
    " To remove it and begin anew, set overwrite = True.",
    highlight=False,
    soft_wrap=True,
  )
  if not directory.report_path.exists():  # it was killed between its end and that
    redraw(directory.path)
  return writers.RunResult(directory.path)


def note_data(
  corpus: prompts.Corpus, log: writers.MetricsLog, console: rich.console.Console
) -> None:
  """Says what of a corpus was skipped, cut or left out, and logs the counts."""
  for sentence in corpus.sentences:
    console.print(sentence, highlight=False, soft_wrap=True)
  log.write("data", {"tasks": corpus.report})


def redraw(path: str | Path) -> Path:
  """Draws plots and report of a run anew, of any kind, finished or not.

  Args:
    path: a run directory.

  Returns:
    The report.

  Raises:
    InputError: it is none, or has no metrics.jsonl.
  """
  directory = writers.RunDirectory(path)
  directory.provenance()  # or says that this is no run directory
  rows = _rows(directory)
  certificate = directory.path / "certificate.json"
  verdict = ""
  if certificate.exists():
    verdict = json.loads(certificate.read_text(encoding="utf-8")).get("sentence", "")
  return _write(directory, rows, pages.page(rows), verdict)


def compare(
  paths: Sequence[str | Path],
  output: str | Path = "comparison",
  console: rich.console.Console | None = None,
) -> Path:
  """Puts online runs side by side: a table, what learning was worth, and one plot.

  Args:
    paths: their run directories.
    output: folder of the page, made if absent.
    console: where to print the table too.

  Returns:
    The page.

  Raises:
    InputError: fewer than two runs, or one of them served nothing.
  """
  if len(paths) < 2:
    raise base.InputError(
      f"compare: received {len(paths)} runs, expected two or more; name their folders."
    )
  runs = {
    name: _rows(writers.RunDirectory(path))
    for name, path in zip(_names(paths), paths, strict=True)
  }
  for name, rows in runs.items():
    if not any(row["kind"] == "request" for row in rows):
      raise base.InputError(
        f"compare: received {name}, which served no requests, expected runs of"
        " `osd online`; leave it out."
      )
  folder = Path(output)
  folder.mkdir(parents=True, exist_ok=True)
  plots, note = [], ""
  try:
    plots = [writers.draw_comparison(runs, folder / "comparison.png")]
  except ImportError as error:
    note = f"Plots were left out: {error}"
  table = [comparison_row(name, rows) for name, rows in runs.items()]
  saved = [
    f"{name}: {said}"
    for name, rows in runs.items()
    if (said := savings.sentence_of(rows))
  ]
  if console is not None:
    tables.print_table(table, console)
    for sentence in saved:
      console.print(sentence, highlight=False, markup=False)
  return writers.write_page(
    folder / "report.html",
    [f"{len(runs)} runs side by side.", *saved],
    {"Runs": table},
    plots,
    title="Comparison of runs",
    note=note,
  )


def comparison_row(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """A run in one row: what was served, how well, how fast, at what price.

  Args:
    name: of the run.
    rows: of its metrics.jsonl.
  """
  requests = writers.request_rows(rows)
  account = writers.Ledger.of(rows)
  spent = sum(row["decode_ms"] for row in requests)
  tokens = sum(row["output_tokens"] for row in requests)
  calls = sum(row["target_calls"] for row in requests)
  edges = pages.agreement_table([("", requests)])[0]
  speeds = pages.speed_table([("", requests)])[0]
  return {
    "run": name,
    "requests": len(requests),
    "overlap": _mean(requests, "overlap"),
    "frozen overlap": _mean(requests, "floor_overlap"),
    f"overlap last {pages.EDGE}": edges[f"overlap last {pages.EDGE}"],
    f"frozen last {pages.EDGE}": edges[f"frozen last {pages.EDGE}"],
    "tokens per target call": round(tokens / calls, 2),
    "ms per token": round(spent / tokens, 2),
    "plain ms/token": speeds["plain ms/token"],
    "frozen ms/token": speeds["frozen ms/token"],
    "wall seconds": None if account is None else round(account.wall, 1),
    "learning seconds": None if account is None else round(account.learning, 1),
  }


def _mean(requests: Sequence[Mapping[str, Any]], name: str) -> float | None:
  """Of a field of all requests; None where one has none."""
  values = [row[name] for row in requests if row.get(name) is not None]
  return round(sum(values) / len(values), 3) if len(values) == len(requests) else None


def _rows(directory: writers.RunDirectory) -> list[dict[str, Any]]:
  try:
    return list(writers.read(directory.metrics_path))
  except OSError as error:
    raise base.InputError(
      f"report: received {directory.path}, expected the folder of a run with its"
      f" metrics.jsonl ({error.strerror})."
    ) from error


def _names(paths: Sequence[str | Path]) -> list[str]:
  """Names of the folders, or whole paths where two are alike."""
  names = [Path(path).resolve().name for path in paths]
  return [
    name if names.count(name) == 1 else str(path)
    for name, path in zip(names, paths, strict=True)
  ]


def _write(
  directory: writers.RunDirectory,
  rows: Sequence[Mapping[str, Any]],
  page: pages.Page,
  verdict: str,
) -> Path:
  plots, note = writers.draw_plots_if_available(rows, directory.plots_path)
  return writers.write_report(
    directory,
    [*page.sentences, *([verdict] if verdict else [])],
    page.tables,
    plots,
    title=page.title,
    note=note,
  )
