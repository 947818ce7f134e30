"""Writes benchmarks/README.md from the newest results of every benchmark.

  python benchmarks/write_readme.py            # results/*.jsonl -> README.md
  python benchmarks/write_readme.py --note     # notes machine and commit, before a run

What a benchmark measures and its command are taken from the docstring of its program,
`bench_<name>.py` or `<name>.py`.
"""

import argparse
import ast
import json
import math
import operator
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import measure

HERE = pathlib.Path(__file__).resolve().parent
NOTE = "provenance.json"

INTRO = """# Benchmarks

Written by `python benchmarks/write_readme.py` from `benchmarks/results/`; `make bench`
runs the programs at their defaults, best on a machine with nothing else to do; rows of
other options were made by hand, and say which.

Contenders do the same work by turns in the same process, after a turn that warms up;
threads are fixed before anything is imported; medians count, and ratios are taken turn
for turn. With one thread the clock is the CPU time of the process, with several it is
wall time. A bound (what the measured bandwidth of memory allows, say) is measured in
the same run. Where weights are random, shapes are the published ones; a "scripted"
draft runs in full and is right with a probability alpha of our choice, which makes
acceptance synthetic.

Rows of different machines or commits stand in tables of their own. A figure that cannot
be (a time or a share below zero, the difference of two measured ones) is shown as
"within noise"; nothing is concluded from it.
"""

RESULTS, PAGE = HERE / "results", HERE.parent / "docs" / "results.md"
TABLE, END = "<!-- tokens a second by machine -->", "<!-- end -->"

BOUNDS = {  # what limits what is measured
  "accelerator": "One row is bounded by kernels launched one after another and by"
  " the bytes of the weights; many rows by caches and arithmetic.",
  "adaptive": "Bounded by the best fixed K and by plain decoding: choosing K costs a"
  " little and gains where acceptance changes.",
  "ahead_of_time": "Compiled, not run: counts are of the compilers' texts, tokens per"
  " second what published figures allow at most (a roofline without latencies).",
  "batching": "Plain decoding of few rows is bounded by memory, so that verifying"
  " K + 1 tokens costs little more than one. With more rows arithmetic is the bound,"
  " and a round has to be accepted nearly whole to pay.",
  "compile": "Bounded by XLA.",
  "greedy": "One row is bounded by memory bandwidth: every step reads the decoder's"
  " weights once. Rows of a batch share that reading until arithmetic is the bound.",
  "learning": "Bounded by cores: what an update computes is not computed for serving,"
  " unless a core was idle.",
  "speculative": "Bounded by (1 - alpha^(K + 1)) / (1 - alpha) tokens a round over"
  " the time of K draft steps and one verification.",
  "update": "Bounded by arithmetic: forward and backward over all positions at once.",
  "whole_run": "Bounded by cores, as `learning` is.",
}

MISSED, NOISE, MET = "**missed**", "within noise", "met"
VERDICTS = {
  MISSED: "Missed",
  NOISE: "Within noise: what was measured cannot be, so it is no verdict",
  MET: "Met",
}
SIGNED = ("gained", "lost", "slack")  # figures that may be negative
_COMPARISONS = {
  "<=": operator.le,
  ">=": operator.ge,
  "<": operator.lt,
  ">": operator.gt,
  "": lambda value, asked: abs(value - asked) <= 0.1 * asked,  # a number alone
}
Row = Mapping[str, Any]


def is_noise(row: Row) -> bool:
  """Whether a figure cannot be: a negative time or share, a difference of two."""
  signed = any(word in row["figure"] for word in SIGNED)
  return math.isnan(row["value"]) or (row["value"] < 0 and not signed)


def verdict(row: Row) -> str:
  """A key of `VERDICTS`; "" where nothing that can be compared was asked.

  A bound is kept or not; a number alone is kept within a tenth of it.
  """
  asked = re.match(r"\s*(<=|>=|<|>|)\s*(-?[\d.]+(?:e[+-]?\d+)?)", asked_of(row))
  if not asked:
    return ""
  if is_noise(row):
    return NOISE
  return MET if _COMPARISONS[asked[1]](row["value"], float(asked[2])) else MISSED


def asked_of(row: Row) -> str:
  """What was asked of a figure, "" if nothing was."""
  return str(row.get("asked") or "")


def got(row: Row) -> str:
  """The value as a table shows it."""
  return NOISE if is_noise(row) else number(row["value"])


def number(value: float) -> str:
  """Four digits, no exponents where a person would not write them."""
  if math.isinf(value):
    return "never in this run"
  if value and 1e-4 <= abs(value) < 1e-2:
    return f"{value:.3g}"
  if abs(value) >= 1e4:
    return f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.3g}"
  return f"{value:.4g}"


def table(rows: Sequence[Any], columns: Mapping[str, Callable[[Any], str]]) -> str:
  """A Markdown table: a function of the row for the cells of each column."""
  lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
  for row in rows:
    cells = [cell(row).replace("|", "/") for cell in columns.values()]
    lines.append(f"| {' | '.join(cells)} |")
  return "\n".join(lines)


def tables(rows: Sequence[Row], columns: Mapping[str, Callable[[Row], str]]) -> str:
  """A table a machine and commit, each below a line that names them."""
  groups: dict[str, list[Row]] = {}
  for row in rows:
    groups.setdefault(origin(row), []).append(row)
  return "\n\n".join(f"{at}:\n\n{table(groups[at], columns)}" for at in groups)


def origin(row: Row) -> str:
  """The machine and the code that a row was measured with."""
  machine = f"{row['cores']} core{'s' * (row['cores'] > 1)} of {row['cpu']}"
  where = row.get("hardware") or f"{machine}, jax {row['jax']}, {row['date']}"
  return f"{where}, commit {row['commit']}"


_CASE: dict[str, Callable[[Row], str]] = {
  "case": lambda row: row["case"],
  "figure": lambda row: row["figure"],
}
_CLOCK: dict[str, Callable[[Row], str]] = {"clock": lambda row: row.get("clock", "")}
_JUDGED = {"asked": asked_of, "got": got, "verdict": verdict}
_NAMED: dict[str, Callable[[Row], str]] = {
  "benchmark": lambda row: f"[{row['benchmark']}](#{row['benchmark']})"
}


def pivoted(rows: Sequence[Row]) -> str:
  """A table a machine, commit and clock: a column a case, a line a figure.

  Turned round where there are more cases than figures. What all cases say alike stands
  in the line above.
  """
  groups: dict[str, list[Row]] = {}
  for row in rows:
    clock = row.get("clock", "")
    groups.setdefault(origin(row) + (f"; {clock}" if clock else ""), []).append(row)
  parts = []
  for at, group in groups.items():
    cases = list(dict.fromkeys(row["case"] for row in group))
    alike, short = shortened(cases)
    cells = {(row["figure"], short[row["case"]]): judged(row) for row in group}
    lines = list(dict.fromkeys(figure for figure, _ in cells))
    columns, corner = list(dict.fromkeys(short.values())), "figure"
    if len(columns) > len(lines):
      cells = {(case, figure): cell for (figure, case), cell in cells.items()}
      lines, columns, corner = columns, lines, "case"
    shown = {
      corner: lambda line: line,
      **{column: _cell(cells, column) for column in columns},
    }
    parts.append(f"{at}{f'; {alike}' if alike else ''}:\n\n{table(lines, shown)}")
  return "\n\n".join(parts)


def _cell(cells: Mapping[tuple[str, str], str], column: str) -> Callable[[str], str]:
  return lambda line: cells.get((line, column), "")


def shortened(cases: Sequence[str]) -> tuple[str, dict[str, str]]:
  """What all cases begin with, whole parts between commas, and what is left of each."""
  parts = {case: case.split(", ") for case in cases}
  alike: list[str] = []
  for words in zip(*parts.values(), strict=False):
    if len(set(words)) > 1 or len(cases) == 1:
      break
    alike.append(words[0])
  left = {case: ", ".join(words[len(alike) :]) for case, words in parts.items()}
  return ", ".join(alike), {case: text or "alone" for case, text in left.items()}


def judged(row: Row) -> str:
  """The value, and what was asked of it where something was."""
  asked, said = asked_of(row), verdict(row)
  return f"{got(row)} ({asked}: {said})" if said and said != NOISE else got(row)


def verdicts(rows: Sequence[Row]) -> str:
  """Everything of which something was asked, what was missed first."""
  parts = ["## Asked and got"]
  for kind, title in VERDICTS.items():
    found = [row for row in rows if verdict(row) == kind]
    if found:
      parts += [f"### {title}", tables(found, _NAMED | _CASE | _JUDGED | _CLOCK)]
  return "\n\n".join(parts)


def program(name: str) -> tuple[str, str, str]:
  """Title, explanation and command of a benchmark, from its program."""
  found = [HERE / f"bench_{name}.py", HERE / f"{name}.py"]
  path = next((path for path in found if path.exists()), found[0])
  text = ast.get_docstring(ast.parse(path.read_text())) if path.exists() else None
  title, *paragraphs = (text or name).split("\n\n")
  command, said = f"python benchmarks/{path.name}", []
  for part in paragraphs:
    if "python benchmarks/" in part:
      command = " ".join(part.split())
    else:  # a formula is indented by two, code in Markdown by four
      said.append(part.replace("  ", "    ", 1) if part.startswith("  ") else part)
  return " ".join(title.split()).rstrip("."), "\n\n".join(said), command


def section(name: str, rows: Sequence[Row]) -> str:
  """One benchmark: what, how, how bounded, and its tables."""
  title, said, command = program(name)
  found = pivoted(rows)
  parts = [
    f"### {name}",
    f"{title}: `{command}`",
    said,
    BOUNDS.get(name, ""),
    f"<details><summary>{len(rows)} rows</summary>\n\n{found}\n\n</details>",
  ]
  return "\n\n".join(part for part in parts if part)


def page(results: pathlib.Path) -> str:
  """The whole README.md."""
  found = {path.stem: read(path) for path in sorted(results.glob("*.jsonl"))}
  every_row = [row for rows in found.values() for row in rows]
  parts = [INTRO.strip(), verdicts(every_row), "## All that was measured"]
  parts += [section(name, rows) for name, rows in found.items()]
  return "\n\n".join(parts) + "\n"


def by_machine(rows: Sequence[Row]) -> str:
  """Tokens a second at most, plain / speculative: a row a machine, a column a pair."""
  found: dict[str, dict[str, dict[str, float]]] = {}
  for row in rows:
    target, _, machine = row["case"].partition(", ")
    cell = found.setdefault(machine, {}).setdefault(target, {})
    cell[row["figure"]] = row["value"]
  pairs = sorted({target for cells in found.values() for target in cells})

  def cell_of(target: str) -> Callable[[str], str]:
    return lambda machine: _at_most(found[machine].get(target))

  columns = {"machine": lambda machine: machine}
  return table(list(found), columns | {target: cell_of(target) for target in pairs})


def _at_most(cell: Mapping[str, float] | None) -> str:
  if cell is None:
    return ""
  needed, held = cell["needed, GB a chip"], cell["of a chip's, GB"]
  if needed > held:
    return f"{needed:.1f} GB of {held:.0f}: does not fit"
  plain, drafted = "plain tokens/s, at most", "frozen tokens/s at 0.8, at most"
  return f"{cell[plain]:,.0f} / {cell[drafted]:,.0f}"


def with_table(text: str, made: str) -> str:
  """A page whose table between the marks is this one."""
  before, _, rest = text.partition(TABLE)
  _, found, behind = rest.partition(END)
  if not found:
    raise ValueError(f"the page has no {TABLE} ... {END}")
  return f"{before}{TABLE}\n{made}\n{END}{behind}"


def read(path: pathlib.Path) -> list[Row]:
  """Rows of a benchmark; what a row does not say of its run, the note says."""
  note = {**noted(path.parent), "benchmark": path.stem}
  return [note | json.loads(line) for line in path.read_text().splitlines() if line]


def noted(results: pathlib.Path) -> dict[str, Any]:
  """What `--note` wrote before the run, or what is true now."""
  path = results / NOTE
  return json.loads(path.read_text()) if path.exists() else measure.provenance()


def main(arguments: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--note", action="store_true")
  parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
  parser.add_argument("--output", type=pathlib.Path, default=HERE / "README.md")
  given = parser.parse_args(arguments)
  if given.note:
    given.results.mkdir(exist_ok=True)
    text = json.dumps(measure.provenance(), indent=2) + "\n"
    (given.results / NOTE).write_text(text)
    return
  given.output.write_text(page(given.results))
  if given.results == RESULTS:
    made = by_machine(read(RESULTS / "ahead_of_time.jsonl"))
    PAGE.write_text(with_table(PAGE.read_text(), made))


if __name__ == "__main__":
  main()
