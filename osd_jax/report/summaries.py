"""The last words of a run, its report, and runs side by side."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.console

from osd_jax import base, runs
from osd_jax.costs import account as account_lib
from osd_jax.data import batches
from osd_jax.measuring import certificate
from osd_jax.report import page as pages_html
from osd_jax.report import pages, plots, tables


def conclude(
  directory: runs.RunDirectory, console: rich.console.Console, verdict: str = ""
) -> Path:
  """Prints the tables and the last words of a run and writes its report.

  Args:
    directory: a run of any kind; its metrics.jsonl is read.
    console: where to print.
    verdict: the certificate's sentence, "" where nothing was checked.

  Returns:
    The report.
  """
  rows = list(runs.read(directory.metrics_path))
  page = pages.page(rows)
  for title, table in page.tables.items():
    tables.print_table(table, console, title)
  for sentence in (*page.sentences, verdict):
    if sentence:
      console.print(sentence, highlight=False, markup=False)
  report = _write(directory, rows, page, verdict)
  console.print(f"report: {report}", highlight=False, soft_wrap=True)
  return report


def finish(
  verdict: certificate.Certificate,
  directory: runs.RunDirectory,
  console: rich.console.Console,
  unchecked: str = "",
) -> runs.RunResult:
  """The end of a run whose outputs were checked: `conclude`, report, last words.

  Args:
    verdict: over all of its outputs.
    directory: where it stands.
    console: where to print.
    unchecked: what is said where the verdict is over nothing.
  """
  exact = certificate.finish(verdict, directory)
  conclude(directory, console, verdict.sentence() or unchecked)
  console.print(f"run directory: {directory.path}", soft_wrap=True)
  return runs.RunResult(directory.path, exact)


def report_finished(
  directory: runs.RunDirectory, console: rich.console.Console
) -> runs.RunResult:
  """Says that a run is finished and stays as it is; draws its report if it has none."""
  console.print(
    f"{directory.path} holds this run, finished {directory.finished}; nothing was done."
    " To remove it and begin anew, set overwrite = True.",
    highlight=False,
    soft_wrap=True,
  )
  if not directory.report_path.exists():  # it was killed between its end and that
    redraw(directory.path)
  return runs.RunResult(directory.path)


def note_data(
  corpus: batches.Corpus, log: runs.MetricsLog, console: rich.console.Console
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
  directory = runs.RunDirectory(path)
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
  served = {
    name: _rows(runs.RunDirectory(path))
    for name, path in zip(_names(paths), paths, strict=True)
  }
  for name, rows in served.items():
    if not any(row["kind"] == "request" for row in rows):
      raise base.InputError(
        f"compare: received {name}, which served no requests, expected runs of"
        " `osd online`; leave it out."
      )
  folder = Path(output)
  folder.mkdir(parents=True, exist_ok=True)
  drawn, note = [], ""
  try:
    drawn = [plots.draw_comparison(served, folder / "comparison.png")]
  except ImportError as error:
    note = f"Plots were left out: {error}"
  table = [comparison_row(name, rows) for name, rows in served.items()]
  saved = [
    f"{name}: {said}"
    for name, rows in served.items()
    if (said := account_lib.verdict(rows).sentence())
  ]
  if console is not None:
    tables.print_table(table, console)
    for sentence in saved:
      console.print(sentence, highlight=False, markup=False)
  return pages_html.write_page(
    folder / "report.html",
    [f"{len(served)} runs side by side.", *saved],
    {"Runs": table},
    drawn,
    title="Comparison of runs",
    note=note,
  )


def comparison_row(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """A run in one row: what was served, how well, how fast, at what price.

  Args:
    name: of the run.
    rows: of its metrics.jsonl.
  """
  requests = runs.request_rows(rows)
  account = account_lib.Account.of(rows)
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


def _rows(directory: runs.RunDirectory) -> list[dict[str, Any]]:
  try:
    return list(runs.read(directory.metrics_path))
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
  directory: runs.RunDirectory,
  rows: Sequence[Mapping[str, Any]],
  page: pages.Page,
  verdict: str,
) -> Path:
  drawn, note = plots.draw_plots_if_available(rows, directory.plots_path)
  return pages_html.write_report(
    directory,
    [*page.sentences, *([verdict] if verdict else [])],
    page.tables,
    drawn,
    title=page.title,
    note=note,
  )
