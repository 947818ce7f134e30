"""Writes benchmarks/README.md from the newest results.

  python benchmarks/write_readme.py            # results/*.jsonl -> README.md
  python benchmarks/write_readme.py --note     # record machine and commit

The page shows only the rows listed in `SHOWN`. The program also updates the table of
accelerators in docs/results.md.
"""

import argparse
import ast
import json
import math
import operator
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import measure

HERE = pathlib.Path(__file__).resolve().parent
RESULTS, PAGE = HERE / "results", HERE.parent / "docs" / "results.md"
NOTE = "provenance.json"
TABLE, END = "<!-- tokens a second by machine -->", "<!-- end -->"

INTRO = """# Benchmarks

`make bench` runs every program below with its defaults; this takes hours and is best
done on an idle machine. Results are appended to `benchmarks/results/*.jsonl`, one row
per figure with its machine and commit. This page shows the newest value of the main
figures, including those that miss their goal; `python benchmarks/write_readme.py`
writes it. What the figures mean for a user: [docs/results.md](../docs/results.md).

How we measure: everything that is compared runs in the same process, interleaved,
after a warm-up. Thread counts are fixed before anything is imported. Medians count,
and ratios are taken pair by pair. With one thread the clock is the CPU time of the
process, with several it is wall time. A physical bound, such as the measured memory
bandwidth, is taken in the same run. Weights at published shapes are random; a
*scripted* draft does all the work of a real one and is right with a probability alpha
that we choose. Machines are shared virtual ones with two cores, so ratios can be
trusted and milliseconds cannot.
"""

ATTACHED = (
  "runs/demo_independent.gin, attached shipped:demo_attached_draft,"
  " attached_gin demo_by_worth"
)
# What the page shows: benchmark, case, figure, clock.
SHOWN = (
  ("greedy", "flan-t5-base, 1 row", "ours over HF float32", "cpu, 1 thread(s)"),
  (
    "greedy",
    "flan-t5-large, 1 row",
    "ours over the memory bound",
    "wall, 2 thread(s)",
  ),
  (
    "speculative",
    "flan-t5-base, ablation",
    "alpha 0.8, the fastest of these, over plain",
    "cpu, 1 thread(s)",
  ),
  (
    "speculative",
    "flan-t5-large",
    "tokens/s over HF assisted float32, alpha 0.8",
    "cpu, 1 thread(s)",
  ),
  (
    "speculative",
    "tinyllama-1.1b, drafts with llama-68m",
    "tokens/s over HF assisted float32, alpha 0.8",
    "cpu, 1 thread(s)",
  ),
  (
    "adaptive",
    "flan-t5-base + t5-small, 1 row, alpha 0.7",
    "adaptive, speed over the best fixed K",
    "cpu, 1 thread(s)",
  ),
  (
    "compile",
    "flan-t5-large + t5-small, second process",
    "weights in memory to first token, s",
    "wall, 2 thread(s)",
  ),
  (
    "update",
    "t5-small, 8 x 64 targets",
    "step, ours over torch float32",
    "cpu, 1 thread(s)",
  ),
  ("learning", "demo pair, I = 4", "between tokens, p99, ms", "wall, 2 thread(s)"),
  (
    "serving",
    "shipped pair, 8 clients",
    "online over frozen, inter-token latency p99",
    "wall, 2 thread(s)",
  ),
  (
    "serving",
    "shipped pair, 8 clients",
    "overhead over the bare engine, tokens/s",
    "wall, 2 thread(s)",
  ),
  (
    "serving",
    "shipped pair, online, 4 times the capacity",
    "overload over full load, latency p99",
    "wall, 2 thread(s)",
  ),
  (
    "whole_run",
    f"{ATTACHED}, seed 0",
    "attached online, over plain",
    "wall, 2 thread(s)",
  ),
  (
    "whole_run",
    f"{ATTACHED}, seed 0",
    "attached online, over attached frozen",
    "wall, 2 thread(s)",
  ),
  (
    "ahead_of_time",
    "flan-t5-xl, h100:1=1",
    "kernels of a plain step a decoder layer",
    "compiled only",
  ),
)

# What limits each benchmark's figures.
BOUNDS = {
  "accelerator": "kernel launches and weight bytes for one row; caches and arithmetic"
  " for many",
  "adaptive": "the best fixed K, and plain decoding",
  "ahead_of_time": "compiled only: a roofline without latencies",
  "compilations": "compiled only: counts, and a compiler's estimates",
  "batching": "memory for few rows, arithmetic for many",
  "compile": "XLA",
  "greedy": "memory bandwidth: every step reads the decoder's weights once",
  "learning": "cores: an update takes what serving leaves idle",
  "serving": "the engine; HTTP, the queue and streaming come on top",
  "speculative": "(1 - alpha^(K+1)) / (1 - alpha) tokens per round",
  "target_alone": "what repeats in answers, and the cost of verifying more tokens",
  "update": "arithmetic",
  "versions": "memory bandwidth, and the code that XLA generates",
  "whole_run": "cores, as for learning",
}

SERVING = """## Serving under load

`bench_serving.py` starts one `osd serve` per system on this machine; its docstring
defines the figures. `--overload 4` measures how a full server behaves, and
`--model FOLDER` serves a model folder. `http_load.py` holds the server process, the
clients and the traces; [serving_soak and serving_kill](../experiments) use it, too.

[AIPerf](https://github.com/ai-dynamo/aiperf) can load a running `osd serve`. It reads
`metrics.speculative_decoding` from the answers and reports acceptance in its section
"Spec Decode". AIPerf needs a tokenizer from the Hugging Face hub even though the server
counts the tokens. Without a network, use a tokenizer that splits text into words, in a
folder that is laid out like the hub's cache:

<!-- not run: installs AIPerf (1.2 GB) in an environment of its own; needs osd serve -->
```sh
python -m venv runs/aiperf && runs/aiperf/bin/pip install aiperf==0.13.0
zcat osd_jax/assets/topics/*.stream.jsonl.gz | sed 's/"prompt":/"text":/' \\
    | shuf -n 100 --random-source=LICENSE > runs/aiperf/prompts.jsonl
runs/aiperf/bin/python - <<'END'
import pathlib, tokenizers, transformers
words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0}, "?"))
words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
cache = pathlib.Path("runs/aiperf/home/hub/models--our--words")
made = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
made.save_pretrained(cache / "snapshots/1")
(cache / "refs").mkdir()
(cache / "refs/main").write_text("1")
END
HF_HOME=runs/aiperf/home HF_HUB_OFFLINE=1 runs/aiperf/bin/aiperf profile --model osd \\
    --url http://127.0.0.1:8000 --endpoint-type chat --streaming \\
    --tokenizer our/words --use-server-token-count --extra-inputs temperature:0 \\
    --input-file runs/aiperf/prompts.jsonl --custom-dataset-type single_turn \\
    --concurrency 8 --request-count 100 --output-artifact-dir runs/aiperf/artifacts
```"""

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
  "<=": operator.le,
  ">=": operator.ge,
  "<": operator.lt,
  ">": operator.gt,
  "": lambda value, asked: abs(value - asked) <= 0.1 * asked,
}
Row = Mapping[str, Any]


def verdict(row: Row) -> str:
  """ "met" or "missed" against `asked`; "" if nothing comparable was asked.

  `asked` is a bound such as "<= 0.5", or a number that must be met within a tenth.
  """
  goal = re.match(r"\s*(<=|>=|<|>|)\s*(-?[\d.]+(?:e\d+)?)", str(row.get("asked") or ""))
  if not goal or math.isnan(row["value"]):
    return ""
  met = _COMPARISONS[goal[1]](row["value"], float(goal[2]))
  return "met" if met else "**missed**"


def table(rows: Sequence[Any], columns: Mapping[str, Callable[[Any], str]]) -> str:
  """A Markdown table with one function of the row per column."""
  lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
  for row in rows:
    cells = [cell(row).replace("|", "/") for cell in columns.values()]
    lines.append(f"| {' | '.join(cells)} |")
  return "\n".join(lines)


def origin(row: Row) -> str:
  """The machine and the commit that a row was measured with."""
  machine = row.get("hardware") or f"{row['cores']} cores, {row['cpu']}"
  return f"{machine}, {row['commit']}"


def shown_rows(rows: Iterable[Row]) -> list[Row]:
  """The newest row of each entry of `SHOWN`; entries without a row are skipped."""
  newest = {
    (row["benchmark"], row["case"], row["figure"], row.get("clock", "")): row
    for row in rows
    if "figure" in row  # whole_run also stores time courses
  }
  return [newest[key] for key in SHOWN if key in newest]


def programs(results: pathlib.Path) -> list[tuple[str, str, int]]:
  """(path, title, stored rows) of every benchmark program, by name."""
  entries = []
  for path in sorted(HERE.glob("*.py")):
    name = path.stem.removeprefix("bench_")
    if name in BOUNDS:
      title = (ast.get_docstring(ast.parse(path.read_text())) or name).split("\n\n")[0]
      path_of_rows = results / f"{name}.jsonl"
      count = len(path_of_rows.read_text().splitlines()) if path_of_rows.exists() else 0
      entries.append((path.name, " ".join(title.split()), count))
  return entries


def page(results: pathlib.Path) -> str:
  """The whole README.md."""
  every_row = [row for path in sorted(results.glob("*.jsonl")) for row in read(path)]
  figures = {
    "benchmark": lambda row: row["benchmark"],
    "case": lambda row: row["case"],
    "figure": lambda row: row["figure"],
    "asked": lambda row: str(row.get("asked") or ""),
    "got": lambda row: f"{row['value']:.3g}",
    "": verdict,
    "machine, commit": origin,
  }
  columns = {
    "program": lambda entry: f"`python benchmarks/{entry[0]}`",
    "measures": lambda entry: entry[1],
    "limited by": lambda entry: BOUNDS[entry[0][:-3].removeprefix("bench_")],
    "rows": lambda entry: str(entry[2]),
  }
  return (
    "\n\n".join(
      [
        INTRO.strip(),
        "## Main figures",
        table(shown_rows(every_row), figures),
        "## Programs",
        table(programs(results), columns),
        SERVING,
      ]
    )
    + "\n"
  )


def by_machine(rows: Sequence[Row]) -> str:
  """Upper bounds on tokens/s, plain / speculative: machines down, pairs across."""
  targets_of: dict[str, dict[str, dict[str, float]]] = {}
  for row in rows:
    target, _, machine = row["case"].partition(", ")
    cell = targets_of.setdefault(machine, {}).setdefault(target, {})
    cell[row["figure"]] = row["value"]
  pairs = sorted({target for cells in targets_of.values() for target in cells})

  def cell_of(target: str) -> Callable[[str], str]:
    return lambda machine: _at_most(targets_of[machine].get(target))

  columns = {"machine": lambda machine: machine}
  return table(
    list(targets_of), columns | {target: cell_of(target) for target in pairs}
  )


def _at_most(cell: Mapping[str, float] | None) -> str:
  if cell is None:
    return ""
  needed, available = cell["needed, GB a chip"], cell["of a chip's, GB"]
  if needed > available:
    return f"{needed:.1f} GB of {available:.0f}: does not fit"
  plain, drafted = "plain tokens/s, at most", "frozen tokens/s at 0.8, at most"
  return f"{cell[plain]:,.0f} / {cell[drafted]:,.0f}"


def with_table(text: str, made: str) -> str:
  """`text` with the table between the two marks replaced."""
  before, _, rest = text.partition(TABLE)
  _, mark, after = rest.partition(END)
  if not mark:
    raise ValueError(f"the page has no {TABLE} ... {END}")
  return f"{before}{TABLE}\n{made}\n{END}{after}"


def read(path: pathlib.Path) -> list[Row]:
  """Rows of a benchmark; the note fills in what a row does not say about its run."""
  note_path = path.parent / NOTE
  note = (
    json.loads(note_path.read_text()) if note_path.exists() else measure.provenance()
  )
  note["benchmark"] = path.stem
  return [note | json.loads(line) for line in path.read_text().splitlines() if line]


def main(arguments: Sequence[str] | None = None) -> None:
  """Writes the note, or the two pages."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--note", action="store_true", help="record machine and commit")
  parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
  parser.add_argument("--output", type=pathlib.Path, default=HERE / "README.md")
  args = parser.parse_args(arguments)
  if args.note:
    args.results.mkdir(exist_ok=True)
    text = json.dumps(measure.provenance(), indent=2) + "\n"
    (args.results / NOTE).write_text(text)
    return
  args.output.write_text(page(args.results))
  if args.results == RESULTS:
    machines = by_machine(read(RESULTS / "ahead_of_time.jsonl"))
    PAGE.write_text(with_table(PAGE.read_text(), machines))


if __name__ == "__main__":
  main()
