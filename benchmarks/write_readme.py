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
from collections.abc import Mapping, Sequence
from typing import Any

import measure

HERE = pathlib.Path(__file__).resolve().parent
NOTE = "provenance.json"

INTRO = """# Benchmarks

Written by `python benchmarks/write_readme.py` from `benchmarks/results/`; `make bench`
runs everything, best on a machine with nothing else to do.

Contenders do the same work by turns in the same process, after a turn that warms up;
threads are fixed before anything is imported; medians count, and ratios are taken turn
for turn. With one thread the clock is the CPU time of the process, with several it is
wall time. A bound (what the measured bandwidth of memory allows, say) is measured in
the same run. Where weights are random, shapes are the published ones; a "scripted"
draft runs in full and is right with a probability alpha of our choice, which makes
acceptance synthetic. What was asked and is not met stays in the table.
"""

BOUNDS = {  # what limits what is measured
  "accelerator": "One row is bounded by kernels launched one after another and by"
  " the bytes of the weights; many rows by caches and arithmetic.",
  "adaptive": "Bounded by the best fixed K and by plain decoding: choosing K costs a"
  " little and gains where acceptance changes.",
  "batching": "Plain decoding of few rows is bounded by memory, so that verifying"
  " K + 1 tokens costs little more than one. With more rows arithmetic is the bound,"
  " and a round has to be accepted nearly whole to pay.",
  "compile": "Bounded by XLA.",
  "greedy": "One row is bounded by memory bandwidth: every step reads the decoder's"
  " weights once. Rows of a batch share that reading until arithmetic is the bound.",
  "growth": "A step is bounded by weights that do not grow; caches, output head and"
  " prefill do.",
  "learning": "Bounded by cores: what an update computes is not computed for serving,"
  " unless a core was idle.",
  "reading_memory": "Bounded by the model itself and its largest tensor.",
  "speculative": "Bounded by (1 - alpha^(K + 1)) / (1 - alpha) tokens a round over"
  " the time of K + 1 draft steps and one verification.",
  "update": "Bounded by arithmetic: forward and backward over all positions at once.",
  "round": "Bounded by memory, as `verify` and the draft's steps are.",
  "verify": "Bounded by memory for few tokens, where one more costs little, by"
  " arithmetic for many.",
  "whole_run": "Bounded by cores, as `learning` is.",
}

_COMPARISONS = {
  "<=": operator.le,
  ">=": operator.ge,
  "<": operator.lt,
  ">": operator.gt,
}


def met(value: float, asked: str) -> str:
  """ "yes" or "no"; "" where nothing that can be compared was asked."""
  found = re.match(r"\s*(<=|>=|<|>)\s*(-?[\d.]+(?:e[+-]?\d+)?)", asked)
  if not found:
    return ""
  holds = _COMPARISONS[found.group(1)](value, float(found.group(2)))
  return "yes" if holds else "**no**"


def number(value: float) -> str:
  """Four digits, no exponents where a person would not write them."""
  if math.isinf(value):
    return "never in this run"
  if value and 1e-4 <= abs(value) < 1e-2:
    return f"{value:.3g}"
  if abs(value) >= 1e4:
    return f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.3g}"
  return f"{value:.4g}"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
  """A Markdown table of one benchmark."""
  lines = [
    "| case | figure | measured | asked | met | clock |",
    "|---|---|---|---|---|---|",
  ]
  for row in rows:
    asked = str(row.get("asked") or "")
    cells = [
      row["case"],
      row["figure"],
      number(row["value"]),
      asked,
      met(row["value"], asked),
      row.get("clock", ""),
    ]
    lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
  return "\n".join(lines)


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


def section(
  name: str, rows: Sequence[Mapping[str, Any]], note: Mapping[str, Any]
) -> str:
  """One benchmark: what, how, how bounded, on what, and the table."""
  title, said, command = program(name)
  parts = [
    f"## {name}: {title[:1].lower() + title[1:]}",
    f"`{command}`",
    said,
    BOUNDS.get(name, ""),
    f"Hardware: {'; '.join(machines(note, rows))}.",
    table(rows),
  ]
  return "\n\n".join(part for part in parts if part)


def page(results: pathlib.Path) -> str:
  """The whole README.md."""
  note = noted(results)
  parts = [INTRO.strip()]
  for path in sorted(results.glob("*.jsonl")):
    rows = [json.loads(line) for line in path.read_text().splitlines() if line]
    parts.append(section(path.stem, rows, note))
  return "\n\n".join(parts) + "\n"


def noted(results: pathlib.Path) -> dict[str, Any]:
  """What `--note` wrote before the run, or what is true now."""
  path = results / NOTE
  return json.loads(path.read_text()) if path.exists() else measure.provenance()


def machines(note: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
  """What rows were measured on and which code; what a row lacks, the note says."""
  commits: dict[str, set[str]] = {}
  for row in rows:
    at = {**note, **row}
    machine = f"{at['cores']} core{'s' * (at['cores'] > 1)} of {at['cpu']}"
    where = at.get("hardware") or f"{machine}, jax {at['jax']}, {at['date']}"
    commits.setdefault(where, set()).add(at["commit"])
  return [
    f"{where}, commit{'s' * (len(found) > 1)} {', '.join(sorted(found))}"
    for where, found in sorted(commits.items())
  ]


def main(arguments: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--note", action="store_true")
  parser.add_argument("--results", type=pathlib.Path, default=HERE / "results")
  parser.add_argument("--output", type=pathlib.Path, default=HERE / "README.md")
  given = parser.parse_args(arguments)
  if given.note:
    given.results.mkdir(exist_ok=True)
    text = json.dumps(measure.provenance(), indent=2) + "\n"
    (given.results / NOTE).write_text(text)
    return
  given.output.write_text(page(given.results))


if __name__ == "__main__":
  main()
