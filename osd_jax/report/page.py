"""The end of a run: tables and sentences on the console, and report.html.

report.html is one self-contained page that loads nothing from outside: a headline, at
most four pictures, tables, and the rest folded away. Everything it says about
measurements comes from metrics.jsonl, so it can be written again later.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.console

from osd_jax import base, certificate, runs
from osd_jax.data import batches
from osd_jax.loop import rows as rows_lib
from osd_jax.report import plots, tables
from osd_jax.runs.directory import write_text

# Colors of the plots that follow the color scheme of the page.
_THEMED = {
  plots.PAGE: "--page",
  plots.INK: "--ink",
  plots.PLAIN: "--plain",
  plots.FAINT: "--faint",
  plots.GRID: "--grid",
  plots.PAUSE: "--pause",
  plots.ONLINE: "--online",
  plots.FLOOR: "--frozen",
}

# Headings of tables link to the first term that they contain.
GLOSSARY = {
  "tokens per target call": "How many tokens one call of the target gives on average:"
  " the accepted drafted tokens and one of its own. Plain decoding gives 1, and K"
  " drafted tokens give at most K + 1.",
  "overlap": "The share of the target's next-token distribution that the draft's"
  " distribution covers, from 0 to 1, as a mean over all generated tokens. It is"
  " measured before the draft trains on the request.",
  "acceptance": "The same overlap, of the distributions that decided which drafted"
  " tokens were accepted, with temperature and top-p.",
  "draft accepted": "Accepted tokens / drafted tokens.",
  "frozen": "Decoding with the draft as it was before the first request. Online minus"
  " frozen is what learning gives.",
  "online": "Decoding with the draft that learns from the requests.",
  "plain": "Decoding with the target alone, one token per call.",
  "near ties": "Outputs that differ where two tokens have the same score up to"
  " rounding. Both are right.",
  "learning": "Updates of the draft. They run mostly on another thread while serving"
  " goes on.",
  "wall": "Time from the start of the command to the last request.",
  "ended by": "Why an answer ended: EOS is the target's own end, LENGTH the limit.",
  "metering": "Measuring how well the drafts agree with the target. Only the report"
  " needs it for the frozen draft.",
  "comparing": "Serving a random part of the requests again by plain decoding and by"
  " the frozen draft. Speeds are measured on these.",
  "slices": "Parts of an update, short enough that requests do not wait long.",
  "alarms": "Faults of a run that would go unnoticed, because the outputs stay right.",
}


def conclude(
  directory: runs.RunDirectory, console: rich.console.Console, verdict: str = ""
) -> Path:
  """Prints the tables and sentences of a run of any command and writes its report.

  `verdict` is the certificate's sentence, "" if no output was checked. Returns the path
  of the report.
  """
  rows = rows_lib.read(directory.metrics_path)
  result = tables.summary(rows)
  for title, table in {**result.tables, **result.details}.items():
    tables.print_table(table, console, title)
  report, note = _write(directory, rows, verdict)
  facts = [f"{fact.figure}: {fact.sentence}" for fact in result.headline]
  _say(console, *facts, *result.notes, *result.details_notes, verdict, note)
  console.print(f"report: {report}", highlight=False, soft_wrap=True)
  return report


def finish(
  verdict: certificate.Certificate,
  directory: runs.RunDirectory,
  console: rich.console.Console,
  unchecked: str = "",
) -> runs.RunResult:
  """Writes the certificate and the report of a run whose outputs were checked.

  `unchecked` is printed instead of the verdict if no output was checked.
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
  log.write(rows_lib.Data(tasks=corpus.report))


def redraw(path: str | Path) -> Path:
  """Writes plots and report of a run again, finished or not; returns the report's path.

  Raises:
    InputError: `path` is not a run directory, or has no metrics.jsonl.
  """
  directory = runs.RunDirectory(path)
  directory.provenance()  # raises if this is not a run directory
  rows = _rows(directory)
  certificate_path = directory.path / "certificate.json"
  verdict = ""
  if certificate_path.exists():
    verdict = json.loads(certificate_path.read_text(encoding="utf-8")).get(
      "sentence", ""
    )
  return _write(directory, rows, verdict)[0]


def compare(
  paths: Sequence[str | Path],
  output: str | Path = "comparison",
  console: rich.console.Console | None = None,
) -> Path:
  """Compares online runs: the fastest, one table, plots, and the verdict of each.

  The page is written to the folder `output`, which is created if needed; the console
  shows table and sentences. Returns the path of the page.

  Raises:
    InputError: fewer than two different runs, one of them served no requests, or the
      folder cannot be written to.
  """
  if len(paths) < 2:
    raise base.InputError(
      f"RUN: received {len(paths)} runs, expected two or more; name their folders."
    )
  places = [Path(path).resolve() for path in paths]
  if twice := [path for path, place in zip(paths, places) if places.count(place) > 1]:
    raise base.InputError(
      f"RUN: received {twice[0]} {len(twice)} times, expected different runs; name"
      " each folder once."
    )
  runs.check_output("--output", output, "folder")
  served = {
    name: _rows(runs.RunDirectory(path))
    for name, path in zip(_names(paths), paths, strict=True)
  }
  for name, rows in served.items():
    if not rows_lib.of(rows_lib.Request, rows):
      raise base.InputError(
        f"RUN: received {name}, which served no requests, expected runs of"
        " `osd online`; leave it out."
      )
  result = tables.comparison(served)
  folder = Path(output)
  folder.mkdir(parents=True, exist_ok=True)
  pictures, note = plots.draw_comparison(served, folder / "plots")
  page_path = write_page(folder / "report.html", result, pictures, note=note)
  if console is not None:
    tables.print_table(result.tables["Runs"], console)
    facts = [fact.sentence for fact in result.headline]
    _say(console, *facts, *result.notes, *result.details_notes, note)
  return page_path


def _say(console: rich.console.Console, *sentences: str) -> None:
  for sentence in filter(None, sentences):
    console.print(sentence, highlight=False, markup=False)


def _rows(directory: runs.RunDirectory) -> list[rows_lib.Row]:
  try:
    return rows_lib.read(directory.metrics_path)
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
  directory: runs.RunDirectory, rows: Sequence[rows_lib.Row], verdict: str
) -> tuple[Path, str]:
  """Draws the plots and writes the page; returns its path and why plots are missing."""
  result = tables.summary(rows)
  pictures, note = plots.draw_plots(rows, directory.plots_path)
  if verdict:
    result = dataclasses.replace(result, notes=[verdict, *result.notes])
  return write_report(directory, result, pictures, note), note


# --- report.html ----------------------------------------------------------------------


def write_report(
  directory: runs.RunDirectory,
  result: tables.Summary,
  pictures: Sequence[plots.Plot],
  note: str = "",
) -> Path:
  """Writes report.html of a run, with sample answers and provenance; returns its path.

  The plots are embedded in reading order. `note` is printed below them, for example why
  there are none.
  """
  provenance = directory.provenance()
  if directory.outputs_path.exists():
    served = {"What was served": _samples(runs.read(directory.outputs_path))}
    result = dataclasses.replace(result, tables={**result.tables, **served})
  return write_page(
    directory.report_path,
    result,
    pictures,
    subtitle=_subtitle(directory.path, provenance),
    note=note,
    texts={
      "Provenance: code, versions, command, device": json.dumps(provenance, indent=2),
      "Settings": json.dumps(directory.config(), indent=2),
      "Operative config": directory.operative_config() or "(none)",
    },
  )


def write_page(
  path: Path,
  result: tables.Summary,
  pictures: Sequence[plots.Plot],
  *,
  subtitle: str = "",
  note: str = "",
  texts: Mapping[str, str] | None = None,
) -> Path:
  """Writes a page; `texts` are folded away at its end."""
  import jinja2  # only pages need it

  environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    keep_trailing_newline=True,
    undefined=jinja2.StrictUndefined,
  )
  text = environment.get_template("page.html").render(
    summary=result,
    plots=pictures,
    subtitle=subtitle,
    note=note,
    texts=texts or {},
    columns_of=_columns,
    drawing_of=_drawing,
    terms_of=_terms,
  )
  write_text(path, text)
  return path


@dataclasses.dataclass(frozen=True)
class Column:
  """A column of a table: `term` is the term of its heading that the page explains."""

  name: str
  term: str
  numeric: bool
  cells: Sequence[str]


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
  columns = []
  for name in dict.fromkeys(name for row in rows for name in row):
    values = [row.get(name) for row in rows]
    decimals = _decimals(values)
    cells = [_format(value, decimals) for value in values]
    columns.append(Column(name, _term(name), _is_numeric(values), cells))
  return columns


def _term(name: str) -> str:
  """The first term of the glossary in a heading, or ""."""
  return next((term for term in GLOSSARY if term in name), "")


def _terms(summary: tables.Summary) -> dict[str, str]:
  """The terms to which headings of the page link."""
  shown = [*summary.tables.values(), *summary.details.values()]
  links = {_term(name) for table in shown for row in table for name in row}
  return {term: text for term, text in GLOSSARY.items() if term in links}


def _subtitle(path: Path, provenance: Mapping[str, Any]) -> str:
  sha = provenance.get("git_sha")
  time = lambda text: text[:16].replace("T", " ")
  last = [provenance, *provenance["resumed"]][-1]  # session
  # A server never finishes. A session without an end goes on, or was killed.
  state = f"stopped in order {time(last['ended'])}" if last["ended"] else "not finished"
  facts = [
    path.name,
    f"started {time(provenance['started'])}",
    "" if provenance.get("finished") else state,
    f"{provenance['device_count']} x {provenance['device_kind']}",
    f"seed {provenance['seed']}" if provenance["seed"] is not None else "",
    f"commit {sha[:10]}" if sha else "",
  ]
  return " · ".join(fact for fact in facts if fact)


def _is_numeric(values: Sequence[Any]) -> bool:
  measured_values = [value for value in values if value is not None]
  return all(
    (isinstance(v, (int, float)) and not isinstance(v, bool))
    or (isinstance(v, str) and re.fullmatch(r"[+-]?[\d.]+[%x]?", v))
    for v in measured_values
  )


def _decimals(values: Sequence[Any]) -> int:
  """Decimals of a column: three digits or more of its largest number."""
  largest = max((abs(v) for v in values if isinstance(v, float)), default=0)
  return 3 if largest <= 1 else 2 if largest < 100 else 1


def _format(value: Any, decimals: int) -> str:
  if value is None:
    return "–"
  if isinstance(value, float):
    return f"{value:,.{decimals}f}"
  if isinstance(value, bool):
    return "yes" if value else "no"
  return f"{value:,}" if isinstance(value, int) else str(value)


def _drawing(plot: plots.Plot) -> tuple[str, str]:
  """Size and content of a plot, which is part of the page so that it can be mailed."""
  text = plot.path.read_text(encoding="utf-8") if plot.path.is_file() else ""
  match = re.search(r'<svg[^>]*?( viewBox="[^"]*")[^>]*>', text)
  if match is None:
    raise base.InputError(
      f"report: received {plot.path} as a plot, expected an SVG file; draw it first."
    )
  drawing = text[match.end() :]
  for color, variable in _THEMED.items():
    drawing = drawing.replace(color.lower(), f"var({variable})")
  return match[1], drawing


def _samples(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """The first, middle and last answer of every task, from the rows of outputs.jsonl."""
  by_task: dict[str, list[Mapping[str, Any]]] = {}
  for row in rows:
    if "prompt" in row:  # not kept of requests that nothing may learn from
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
