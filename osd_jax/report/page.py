"""The end of a run: tables and sentences on the console, and report.html.

report.html is one self-contained page that loads nothing from outside. Everything it
says about measurements comes from metrics.jsonl, so it can be written again later.
"""

import base64
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.console

from osd_jax import base, certificate, runs
from osd_jax.costs import account as account_lib
from osd_jax.data import batches
from osd_jax.report import plots, tables
from osd_jax.runs.directory import write_text

_CSS = """
:root { color-scheme: light; }
body { margin: 2rem auto; max-width: 52rem; padding: 0 1rem; color: #222;
  background: #fff; font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
.faint { color: #666; font-size: .9rem; }
.headline { padding: .2rem 1rem; border-left: 4px solid #0072b2; background: #f4f8fb; }
.headline p { margin: .5rem 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; }
td { white-space: pre-line; }
th, td { padding: .3rem .8rem; vertical-align: top; text-align: left;
  border-bottom: 1px solid #ddd; }
th { border-bottom: 2px solid #999; vertical-align: bottom; }
.n { text-align: right; font-variant-numeric: tabular-nums; }
img { display: block; width: 100%; margin: 1.2rem 0; }
pre { overflow-x: auto; padding: .8rem; background: #f6f6f6; font-size: .8rem; }
summary { cursor: pointer; font-weight: 600; }
"""


def conclude(
  directory: runs.RunDirectory, console: rich.console.Console, verdict: str = ""
) -> Path:
  """Prints the tables and sentences of a run and writes its report.

  Args:
    directory: a run of any command.
    console: the console that shows tables and sentences.
    verdict: the certificate's sentence; "" if no output was checked.

  Returns:
    Path of the report.
  """
  rows = list(runs.read(directory.metrics_path))
  found = tables.summary(rows)
  for title, table in found.tables.items():
    tables.print_table(table, console, title)
  for sentence in (*found.sentences, verdict):
    if sentence:
      console.print(sentence, highlight=False, markup=False)
  report = _write(directory, rows, found, verdict)
  console.print(f"report: {report}", highlight=False, soft_wrap=True)
  return report


def finish(
  verdict: certificate.Certificate,
  directory: runs.RunDirectory,
  console: rich.console.Console,
  unchecked: str = "",
) -> runs.RunResult:
  """Writes the certificate and the report of a run whose outputs were checked.

  Args:
    verdict: the certificate of all outputs.
    directory: the run, whose files are completed.
    console: the console that shows tables and sentences.
    unchecked: printed instead of the verdict if no output was checked.
  """
  exact = certificate.finish(verdict, directory)
  conclude(directory, console, verdict.sentence() or unchecked)
  console.print(f"run directory: {directory.path}", soft_wrap=True)
  return runs.RunResult(directory.path, exact)


def report_finished(
  directory: runs.RunDirectory, console: rich.console.Console
) -> runs.RunResult:
  """Prints that a run is already finished, and writes its report if it is missing."""
  console.print(
    f"{directory.path} holds this run, finished {directory.finished}; nothing was done."
    " To remove it and begin again, set overwrite = True.",
    highlight=False,
    soft_wrap=True,
  )
  # A run that was killed after its last step is finished but has no report.
  if not directory.report_path.exists():
    redraw(directory.path)
  return runs.RunResult(directory.path)


def note_data(
  corpus: batches.Corpus, log: runs.MetricsLog, console: rich.console.Console
) -> None:
  """Prints and logs how many rows of a corpus were skipped, cut or left out."""
  for sentence in corpus.sentences:
    console.print(sentence, highlight=False, soft_wrap=True)
  log.write("data", {"tasks": corpus.report})


def redraw(path: str | Path) -> Path:
  """Writes plots and report of a run again, whether it is finished or not.

  Returns:
    Path of the report.

  Raises:
    InputError: `path` is not a run directory, or has no metrics.jsonl.
  """
  directory = runs.RunDirectory(path)
  directory.provenance()  # raises if this is not a run directory
  rows = _rows(directory)
  written = directory.path / "certificate.json"
  verdict = ""
  if written.exists():
    verdict = json.loads(written.read_text(encoding="utf-8")).get("sentence", "")
  return _write(directory, rows, tables.summary(rows), verdict)


def compare(
  paths: Sequence[str | Path],
  output: str | Path = "comparison",
  console: rich.console.Console | None = None,
) -> Path:
  """Compares online runs: one table, their verdicts and one plot.

  Args:
    paths: the run directories, two or more.
    output: folder of the page, created if needed.
    console: the console that shows the table, if given.

  Returns:
    Path of the page.

  Raises:
    InputError: fewer than two runs, or one of them served no requests.
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
  # The plot is optional: the table and the verdicts need no matplotlib.
  drawn, note = [], ""
  try:
    drawn = [plots.draw_comparison(served, folder / "comparison.png")]
  except ImportError as error:
    note = f"Plots were left out: {error}"
  table = [tables.comparison_row(name, rows) for name, rows in served.items()]
  verdicts = [
    f"{name}: {said}"
    for name, rows in served.items()
    if (said := account_lib.verdict(rows).sentence())
  ]
  if console is not None:
    tables.print_table(table, console)
    for sentence in verdicts:
      console.print(sentence, highlight=False, markup=False)
  found = tables.Summary(
    "Comparison of runs",
    [f"{len(served)} runs side by side.", *verdicts],
    {"Runs": table},
  )
  return write_page(folder / "report.html", found, drawn, note=note)


def _rows(directory: runs.RunDirectory) -> list[dict[str, Any]]:
  try:
    return list(runs.read(directory.metrics_path))
  except OSError as error:
    raise base.InputError(
      f"report: received {directory.path}, expected the folder of a run with its"
      f" metrics.jsonl ({error.strerror})."
    ) from error


def _names(paths: Sequence[str | Path]) -> list[str]:
  """Names of the folders; a name that occurs twice is replaced by its whole path."""
  names = [Path(path).resolve().name for path in paths]
  return [
    name if names.count(name) == 1 else str(path)
    for name, path in zip(names, paths, strict=True)
  ]


def _write(
  directory: runs.RunDirectory,
  rows: Sequence[Mapping[str, Any]],
  found: tables.Summary,
  verdict: str,
) -> Path:
  drawn, note = plots.draw_plots_if_available(rows, directory.plots_path)
  if verdict:
    found = tables.Summary(found.title, [*found.sentences, verdict], found.tables)
  return write_report(directory, found, drawn, note)


# --- report.html ----------------------------------------------------------------------


def write_report(
  directory: runs.RunDirectory,
  found: tables.Summary,
  drawn: Sequence[Path],
  note: str = "",
) -> Path:
  """Writes report.html: sentences, tables, plots, sample answers and provenance.

  Args:
    directory: the run; its outputs, provenance and config are shown too.
    found: sentences and tables of the page.
    drawn: PNG files in reading order; they are embedded.
    note: printed below the plots, for example why there are none.

  Returns:
    Path of the report.

  Raises:
    InputError: a plot is not a PNG file.
  """
  provenance = directory.provenance()
  samples = []
  if directory.outputs_path.exists():
    samples = _samples(runs.read(directory.outputs_path))
  return write_page(
    directory.report_path,
    found,
    drawn,
    subtitle=_subtitle(directory.path, provenance),
    note=note,
    below=[
      *(["<h2>What was served</h2>", _table(samples)] if samples else []),
      "<h2>Origin</h2>",
      _details(
        "Provenance: code, versions, command, device", json.dumps(provenance, indent=2)
      ),
      _details("Settings", json.dumps(directory.config(), indent=2)),
      _details("Operative config", directory.operative_config() or "(none)"),
    ],
  )


def write_page(
  path: Path,
  found: tables.Summary,
  drawn: Sequence[Path],
  *,
  subtitle: str = "",
  note: str = "",
  below: Sequence[str] = (),
) -> Path:
  """Writes a page with sentences, tables and plots; `below` is HTML for its end."""
  parts = [
    f"<h1>{_text(found.title)}</h1>",
    f'<p class="faint">{_text(subtitle)}</p>',
    '<div class="headline">',
    *(f"<p>{_text(sentence)}</p>" for sentence in found.sentences),
    "</div>",
  ]
  for name, rows in found.tables.items():
    parts += [f"<h2>{_text(name)}</h2>", _table(rows)]
  if drawn or note:
    parts.append("<h2>Plots</h2>")
  parts += [_image(Path(plot)) for plot in drawn]
  if note:
    parts.append(f'<p class="faint">{_text(note)}</p>')
  lines = [
    "<!DOCTYPE html>",
    '<html lang="en"><head><meta charset="utf-8">',
    '<meta name="viewport" content="width=device-width, initial-scale=1">',
    f"<title>{_text(found.title)}</title><style>{_CSS}</style></head><body>",
    *parts,
    *below,
    "</body></html>\n",
  ]
  write_text(path, "\n".join(lines))
  return path


def _subtitle(path: Path, provenance: Mapping[str, Any]) -> str:
  sha = provenance.get("git_sha")
  facts = [
    path.name,
    f"started {provenance['started']}",
    "" if provenance.get("finished") else "not finished",
    f"{provenance['device_count']} x {provenance['device_kind']}",
    f"seed {provenance['seed']}" if provenance["seed"] is not None else "",
    f"commit {sha[:10]}" if sha else "",
  ]
  return " · ".join(fact for fact in facts if fact)


def _details(summary: str, text: str) -> str:
  return (
    f"<details><summary>{_text(summary)}</summary><pre>{_text(text)}</pre></details>"
  )


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
  columns = list(dict.fromkeys(name for row in rows for name in row))
  if not columns:
    return '<p class="faint">No rows.</p>'
  numeric = {name: _is_numeric([row.get(name) for row in rows]) for name in columns}
  head = "".join(_cell("th", name.replace("_", " "), numeric[name]) for name in columns)
  lines = [f"<tr>{head}</tr>"]
  for row in rows:
    cells = (_cell("td", _format(row.get(n)), numeric[n]) for n in columns)
    lines.append(f"<tr>{''.join(cells)}</tr>")
  return '<div class="wide"><table>\n' + "\n".join(lines) + "\n</table></div>"


def _cell(tag: str, text: str, numeric: bool) -> str:
  kind = ' class="n"' if numeric else ""
  return f"<{tag}{kind}>{_text(text)}</{tag}>"


def _is_numeric(values: Sequence[Any]) -> bool:
  known = [value for value in values if value is not None]
  return all(
    (isinstance(v, (int, float)) and not isinstance(v, bool))
    or (isinstance(v, str) and v[:-1].replace(".", "").isdigit() and v[-1] in "%x")
    for v in known
  )


def _format(value: Any) -> str:
  """Formats a number with three decimals below 100, and with one above."""
  if value is None:
    return "–"
  if isinstance(value, float):
    return f"{value:.3f}" if abs(value) < 100 else f"{value:,.1f}"
  if isinstance(value, int) and not isinstance(value, bool):
    return f"{value:,}"
  return str(value)


def _image(path: Path) -> str:
  data = path.read_bytes() if path.is_file() else b""
  if not data.startswith(b"\x89PNG"):
    raise base.InputError(
      f"report: received {path} as a plot, expected a PNG file; draw it first."
    )
  name = path.stem.replace("_", " ")
  # Embedded, so that the page still shows its plots when it is moved or mailed.
  encoded = base64.b64encode(data).decode("ascii")
  return f'<img alt="{_text(name)}" src="data:image/png;base64,{encoded}">'


def _text(text: str) -> str:
  return html.escape(str(text), quote=True)


def _samples(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """The first, middle and last answer of every task, from the rows of outputs.jsonl."""
  by_task: dict[str, list[Mapping[str, Any]]] = {}
  for row in rows:
    by_task.setdefault(row["task"], []).append(row)
  return [
    {
      "topic": task,
      "request": part[place]["query"],
      "prompt": _cut(part[place]["prompt"]),
      "output": _cut(part[place]["text"]),
      "ended by": part[place]["stop_reason"],
      "tokens per target call": part[place]["tokens_per_target_call"],
    }
    for task, part in by_task.items()
    # A set, because a task with one or two answers has equal places.
    for place in sorted({0, len(part) // 2, len(part) - 1})
  ]


def _cut(text: str, limit: int = 400) -> str:
  return text if len(text) <= limit else text[:limit] + " ..."
