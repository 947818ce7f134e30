"""The end of a run: tables and sentences on the console, and report.html.

report.html is one self-contained page that loads nothing from outside: a headline, at
most four pictures, tables, and the rest folded away. Everything it says about
measurements comes from metrics.jsonl, so it can be written again later.
"""

import dataclasses
import html
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

_CSS = """
:root { color-scheme: light dark; --page: #fff; --ink: #222; --plain: #666;
  --faint: #b8b8b8; --grid: #ececec; --card: #f4f7fa; --pause: #fbf7d5;
  --online: #0072b2; --frozen: #d55e00; }
@media (prefers-color-scheme: dark) { :root { --page: #15181c; --ink: #e4e6ea;
  --plain: #a4abb5; --faint: #565d67; --grid: #2a2f36; --card: #1e2329;
  --pause: #2b2919; --online: #4aa8e0; --frozen: #f0883e; } }
body { margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: var(--ink);
  background: var(--page); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.2rem; margin: 2.4rem 0 .6rem; }
a { color: inherit; text-decoration: underline dotted var(--plain); }
.faint, figcaption { color: var(--plain); font-size: .9rem; }
.faint { overflow-wrap: anywhere; }
.alert { padding: .8rem 1rem; border: 2px solid var(--frozen); font-weight: 600; }
.cards, .plots { display: grid; gap: 1rem; margin: 1.2rem 0;
  grid-template-columns: repeat(auto-fit, minmax(min(15rem, 100%), 1fr)); }
.plots { gap: 2rem; grid-template-columns:
  repeat(auto-fit, minmax(min(26rem, 100%), 1fr)); }
.cards p { margin: 0; padding: .8rem 1rem; background: var(--card);
  border-top: 3px solid var(--online); border-radius: 4px; font-size: .95rem; }
.cards b { display: block; font-size: 1.3rem; line-height: 1.25;
  margin-bottom: .3rem; overflow-wrap: anywhere; }
figure { margin: 0; max-width: 40rem; }
svg { display: block; width: 100%; height: auto; }
svg text { font-family: inherit !important; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; }
th, td { padding: .35rem .8rem; vertical-align: top; text-align: left;
  border-bottom: 1px solid var(--grid); }
th { border-bottom: 2px solid var(--faint); vertical-align: bottom; }
td { white-space: pre-wrap; } .long { overflow-wrap: anywhere; }
.n { text-align: right; font-variant-numeric: tabular-nums; }
pre { padding: .8rem; background: var(--card); font-size: .8rem;
  white-space: pre-wrap; overflow-wrap: anywhere; }
details { margin: .8rem 0; border-top: 1px solid var(--grid); padding-top: .8rem; }
summary { cursor: pointer; font-weight: 600; }
dl { columns: 22rem; column-gap: 2.5rem; font-size: .9rem; }
dl div { break-inside: avoid; margin-bottom: .7rem; }
dt { font-weight: 600; } dd { margin: 0; }
:target { background: var(--card); outline: 6px solid var(--card); }
@media (max-width: 72rem) {
  table { font-size: .82rem; } th, td { padding: .35rem .4rem; }
}
@media (max-width: 52rem) { /* each row of a table becomes a block */
  table, tbody, tr, td { display: block; } tr:first-child { display: none; }
  tr { padding: .5rem 0; border-bottom: 1px solid var(--faint); }
  td { padding: .1rem 0; border: 0; display: flex; gap: 1rem;
    justify-content: space-between; text-align: left; }
  td::before { content: attr(data-label); color: var(--plain); flex: 0 0 auto;
    max-width: 60%; white-space: normal; }
  td:first-child { font-weight: 600; } td.long { display: block; }
  td.long::before { display: block; font-weight: 400; }
}
"""

# Colours of the plots that follow the colour scheme of the page.
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
  found = tables.summary(rows)
  for title, table in {**found.tables, **found.details}.items():
    tables.print_table(table, console, title)
  report, note = _write(directory, rows, verdict)
  facts = [f"{fact.figure}: {fact.sentence}" for fact in found.headline]
  _say(console, *facts, *found.notes, *found.details_notes, verdict, note)
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
  written = directory.path / "certificate.json"
  verdict = ""
  if written.exists():
    verdict = json.loads(written.read_text(encoding="utf-8")).get("sentence", "")
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
  found = tables.comparison(served)
  folder = Path(output)
  folder.mkdir(parents=True, exist_ok=True)
  drawn, note = plots.draw_comparison(served, folder / "plots")
  written = write_page(folder / "report.html", found, drawn, note=note)
  if console is not None:
    tables.print_table(found.tables["Runs"], console)
    facts = [fact.sentence for fact in found.headline]
    _say(console, *facts, *found.notes, *found.details_notes, note)
  return written


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
  found = tables.summary(rows)
  drawn, note = plots.draw_plots(rows, directory.plots_path)
  if verdict:
    found = dataclasses.replace(found, notes=[verdict, *found.notes])
  return write_report(directory, found, drawn, note), note


# --- report.html ----------------------------------------------------------------------


def write_report(
  directory: runs.RunDirectory,
  found: tables.Summary,
  drawn: Sequence[plots.Plot],
  note: str = "",
) -> Path:
  """Writes report.html of a run, with sample answers and provenance; returns its path.

  The plots are embedded in reading order. `note` is printed below them, for example why
  there are none.
  """
  provenance = directory.provenance()
  if directory.outputs_path.exists():
    served = {"What was served": _samples(runs.read(directory.outputs_path))}
    found = dataclasses.replace(found, tables={**found.tables, **served})
  return write_page(
    directory.report_path,
    found,
    drawn,
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
  found: tables.Summary,
  drawn: Sequence[plots.Plot],
  *,
  subtitle: str = "",
  note: str = "",
  texts: Mapping[str, str] | None = None,
) -> Path:
  """Writes a page; `texts` are folded away at its end."""
  cards = [
    f"<p><b>{_text(fact.figure)}</b>{_text(fact.sentence)}</p>"
    for fact in found.headline
  ]
  parts = [
    f"<h1>{_text(found.title)}</h1>",
    *_paragraphs([subtitle]),
    _block("cards", cards),
    *_paragraphs(found.notes),
    _block("plots", map(_figure, drawn[:4])),
    *_paragraphs([note]),
    *(f"<h2>{_text(name)}</h2>{_table(rows)}" for name, rows in found.tables.items()),
    "<h2>Details</h2>" if found.details or found.details_notes or texts else "",
  ]
  if found.details_notes:
    said = "".join(_paragraphs(found.details_notes))
    parts.append(_details("In words", said))
  parts += [_details(name, _table(rows)) for name, rows in found.details.items()]
  if drawn[4:]:
    parts.append(_details("More plots", _block("plots", map(_figure, drawn[4:]))))
  terms = _glossary("".join(parts))
  for name, text in (texts or {}).items():
    parts.append(_details(name, f"<pre>{_text(text)}</pre>"))
  lines = [
    "<!DOCTYPE html>",
    '<html lang="en"><head><meta charset="utf-8">',
    '<meta name="viewport" content="width=device-width, initial-scale=1">',
    f"<title>{_text(found.title)}</title><style>{_CSS}</style></head><body>",
    *filter(None, parts),
    terms,
    "</body></html>\n",
  ]
  write_text(path, "\n".join(lines))
  return path


def _block(name: str, parts: Iterable[str]) -> str:
  inner = "".join(parts)
  return f'<div class="{name}">{inner}</div>' if inner else ""


def _paragraphs(sentences: Iterable[str]) -> list[str]:
  # Outputs that are not the target's are the one thing that nobody may overlook.
  return [
    f'<p class="{"alert" if "NOT EXACT" in said else "faint"}">{_text(said)}</p>'
    for said in sentences
    if said
  ]


def _details(summary: str, inner: str) -> str:
  return f"<details><summary>{_text(summary)}</summary>{inner}</details>"


def _glossary(body: str) -> str:
  """The terms to which headings of the page link."""
  used = {
    term: said for term, said in GLOSSARY.items() if f'"#{_anchor(term)}"' in body
  }
  entries = [
    f'<div id="{_anchor(term)}"><dt>{term}</dt><dd>{_text(said)}</dd></div>'
    for term, said in used.items()
  ]
  return f"<h2>Terms</h2><dl>{''.join(entries)}</dl>" if entries else ""


def _anchor(term: str) -> str:
  return term.replace(" ", "-")


def _subtitle(path: Path, provenance: Mapping[str, Any]) -> str:
  sha = provenance.get("git_sha")
  facts = [
    path.name,
    f"started {provenance['started'][:16].replace('T', ' ')}",
    "" if provenance.get("finished") else "not finished",
    f"{provenance['device_count']} x {provenance['device_kind']}",
    f"seed {provenance['seed']}" if provenance["seed"] is not None else "",
    f"commit {sha[:10]}" if sha else "",
  ]
  return " · ".join(fact for fact in facts if fact)


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
  columns = list(dict.fromkeys(name for row in rows for name in row))
  if not columns:
    return '<p class="faint">No rows.</p>'
  lines: list[list[str]] = [[] for _ in range(len(rows) + 1)]
  for name in columns:
    values = [row.get(name) for row in rows]
    numeric, decimals = _is_numeric(values), _decimals(values)
    cells = (_cell(name, _format(value, decimals), numeric) for value in values)
    for line, cell in zip(lines, [_heading(name, numeric), *cells]):
      line.append(cell)
  body = "\n".join(f"<tr>{''.join(line)}</tr>" for line in lines)
  return f'<div class="wide"><table>\n{body}\n</table></div>'


def _heading(name: str, numeric: bool) -> str:
  kind = ' class="n"' if numeric else ""
  term = next((term for term in GLOSSARY if term in name), "")
  shown = f'<a href="#{_anchor(term)}">{_text(name)}</a>' if term else _text(name)
  return f"<th{kind}>{shown}</th>"


def _cell(name: str, text: str, numeric: bool) -> str:
  kind = "n" if numeric else "long" if len(text) > 30 else ""
  # On a narrow screen the row is a block, and every cell shows the name of its column.
  return f'<td class="{kind}" data-label="{_text(name)}">{_text(text)}</td>'


def _is_numeric(values: Sequence[Any]) -> bool:
  known = [value for value in values if value is not None]
  return all(
    (isinstance(v, (int, float)) and not isinstance(v, bool))
    or (isinstance(v, str) and re.fullmatch(r"[+-]?[\d.]+[%x]?", v))
    for v in known
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


def _figure(plot: plots.Plot) -> str:
  """The plot as part of the page, so that it is there when the page is mailed."""
  text = plot.path.read_text(encoding="utf-8") if plot.path.is_file() else ""
  found = re.search(r'<svg[^>]*?( viewBox="[^"]*")[^>]*>', text)
  if found is None:
    raise base.InputError(
      f"report: received {plot.path} as a plot, expected an SVG file; draw it first."
    )
  drawing = text[found.end() :]
  for color, variable in _THEMED.items():
    drawing = drawing.replace(color.lower(), f"var({variable})")
  name = _text(plot.path.stem.replace("_", " "))
  return (
    f'<figure><svg role="img" aria-label="{name}"{found[1]}>{drawing}'
    f"<figcaption>{_text(plot.caption)}</figcaption></figure>"
  )


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
