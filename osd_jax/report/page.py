"""report.html: one self-contained page that loads nothing from outside."""

import base64
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from osd_jax import base, runs
from osd_jax.runs.directory import RunDirectory, write_text

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


def write_report(
  run_directory: RunDirectory,
  headline: Sequence[str],
  tables: Mapping[str, Sequence[Mapping[str, Any]]],
  plots: Sequence[Path],
  *,
  title: str,
  note: str = "",
) -> Path:
  """Writes report.html: sentences, tables, plots, sample answers and provenance.

  Args:
    run_directory: the run; its outputs, provenance and config are shown too.
    headline: sentences that state the results.
    tables: heading -> rows; the keys are the columns.
    plots: PNG files in reading order; they are embedded.
    title: title of the page.
    note: printed below the plots, for example why there are none.

  Returns:
    Path of the report.

  Raises:
    InputError: a plot is not a PNG file.
  """
  provenance = run_directory.provenance()
  samples = []
  if run_directory.outputs_path.exists():
    samples = _samples(runs.read(run_directory.outputs_path))
  return write_page(
    run_directory.report_path,
    headline,
    tables,
    plots,
    title=title,
    subtitle=_subtitle(run_directory.path, provenance),
    note=note,
    below=[
      *(["<h2>What was served</h2>", _table(samples)] if samples else []),
      "<h2>Origin</h2>",
      _details(
        "Provenance: code, versions, command, device", json.dumps(provenance, indent=2)
      ),
      _details("Settings", json.dumps(run_directory.config(), indent=2)),
      _details("Operative config", run_directory.operative_config() or "(none)"),
    ],
  )


def write_page(
  path: Path,
  headline: Sequence[str],
  tables: Mapping[str, Sequence[Mapping[str, Any]]],
  plots: Sequence[Path],
  *,
  title: str,
  subtitle: str = "",
  note: str = "",
  below: Sequence[str] = (),
) -> Path:
  """Writes a page with sentences, tables and plots; `below` is HTML for its end."""
  parts = [
    f"<h1>{_text(title)}</h1>",
    f'<p class="faint">{_text(subtitle)}</p>',
    '<div class="headline">',
    *(f"<p>{_text(sentence)}</p>" for sentence in headline),
    "</div>",
  ]
  for name, rows in tables.items():
    parts += [f"<h2>{_text(name)}</h2>", _table(rows)]
  if plots or note:
    parts.append("<h2>Plots</h2>")
  parts += [_image(Path(plot)) for plot in plots]
  if note:
    parts.append(f'<p class="faint">{_text(note)}</p>')
  write_text(path, _page(title, [*parts, *below]))
  return path


def _page(title: str, parts: Sequence[str]) -> str:
  return "\n".join(
    [
      "<!DOCTYPE html>",
      '<html lang="en"><head><meta charset="utf-8">',
      '<meta name="viewport" content="width=device-width, initial-scale=1">',
      f"<title>{_text(title)}</title><style>{_CSS}</style></head><body>",
      *parts,
      "</body></html>\n",
    ]
  )


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
    for place in sorted({0, len(part) // 2, len(part) - 1})
  ]


def _cut(text: str, limit: int = 400) -> str:
  return text if len(text) <= limit else text[:limit] + " ..."
