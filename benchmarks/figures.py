"""Draws the pictures of the results page from the committed results.

  python benchmarks/figures.py    # all pictures -> docs/figures
  python benchmarks/figures.py acceptance time_saved

Each picture is written as SVG twice, for light and for dark pages. The file contains a
hash of the results it was drawn from, with which a test detects outdated pictures.
docs/results.md, docs/real_model.md, docs/reproducing_the_paper.md and
docs/open_questions.md explain the pictures.
"""

import argparse
import dataclasses
import functools
import hashlib
import json
import pathlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from osd_jax.report import plots, tables

HERE = pathlib.Path(__file__).resolve().parent
FIGURES = HERE.parent / "docs" / "figures"
WINDOW, FEW = 25, 5  # requests in a trailing mean; the first FEW means are not drawn
WHOLE = (800, 1600)  # number of requests of the demo and of the real domains
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Theme:
  """Colors of everything but the data.

  Attributes:
    ink: text.
    faint: axes.
    grid: grid lines.
  """

  ink: str
  faint: str
  grid: str

  @property
  def style(self) -> dict[str, Any]:
    """The theme as matplotlib rcParams."""
    return {
      **plots.STYLE,
      "font.size": 11,
      "svg.hashsalt": "osd_jax",
      "text.color": self.ink,
      "axes.labelcolor": self.ink,
      "axes.edgecolor": self.faint,
      "xtick.color": self.ink,
      "ytick.color": self.ink,
      "grid.color": self.grid,
      "figure.facecolor": "none",
      "axes.facecolor": "none",
      "savefig.facecolor": "none",
    }


THEMES = {
  "light": Theme(ink="#222222", faint="#B8B8B8", grid="#ECECEC"),
  "dark": Theme(ink="#E2E4EA", faint="#6B6F7B", grid="#3A3D47"),
}
# Distinguishable on light and dark pages, and by color-blind readers.
BLUE, ORANGE, GREEN, PINK, GREY = "#2F8FD0", "#E07B2A", "#1AA37A", "#CC79A7", "#8A8A8A"
COLORS = (BLUE, ORANGE, GREEN, PINK, GREY)
SYSTEMS = {
  "independent frozen": (ORANGE, ":"),
  "independent online": (ORANGE, "-"),
  "attached frozen": (BLUE, ":"),
  "attached online": (BLUE, "-"),
}
# Way to draft -> color, and whether it is mixed with the cache.
DRAFTERS = {
  "lookup": (GREY, False),
  "cache": (GREEN, False),
  "frozen": (ORANGE, False),
  "frozen + cache": (ORANGE, True),
  "online": (BLUE, False),
  "online + cache": (BLUE, True),
  "oracle of choice": (PINK, False),
}


# On a page of the docs, which is wider than a report's pictures.
wide_figure = functools.partial(plots.figure, width=8.0, height=4.0)


def newest(rows: Iterable[Row]) -> dict[tuple[str, str, str], float]:
  """Returns the last value of each (case, clock, figure)."""
  return {
    (row["case"], row.get("clock", ""), row["figure"]): row["value"] for row in rows
  }


def legend(made: Any, axes: Any, handles: Sequence[Any] = ()) -> None:
  """Draws the legend in one line below the axes; `handles` replace the line samples."""
  samples, names = axes.get_legend_handles_labels()
  handles = handles or samples
  place = "outside lower center"
  made.legend(handles, names, loc=place, ncols=4, frameon=False, fontsize=9)


def acceptance(rows: Sequence[Row]) -> Any:
  """Draws the overlap over the demo's requests, frozen and online."""
  figure, (axes,) = wide_figure("Overlap with the target, demo stream, attached draft")
  (row,) = rows
  for name, values, color, style in (
    ("learns while it serves", row["online"], BLUE, "-"),
    ("frozen", row["frozen"], ORANGE, "--"),
  ):
    means = trailing(values, row["shifts"])
    axes.plot(range(1, len(means) + 1), means, style, color=color, lw=1.8, label=name)
  for start, topic in row["shifts"]:
    axes.axvline(start, color=GREY, lw=0.8)
    axes.annotate(
      topic, (start + 6, 0.02), xycoords=("data", "axes fraction"), fontsize=10
    )
  axes.set(xlabel="request", ylabel=f"overlap, mean of {WINDOW} requests")
  axes.set_xlim(0, len(row["online"]))
  legend(figure, axes)
  return figure


def trailing(values: Sequence[float], shifts: Sequence[tuple[int, str]]) -> np.ndarray:
  """Returns trailing means of `WINDOW` requests, NaN for the first `FEW` after a shift.

  So no line crosses a shift or starts with the value of a single request.
  """
  starts = [start for start, _ in shifts]
  means = tables.trailing_mean(np.array(values), WINDOW, starts)
  for start in starts:
    means[start : start + FEW] = np.nan
  return means


def time_saved(rows: Sequence[Row]) -> Any:
  """Draws the share of plain decoding's time saved over requests, for each target."""
  courses = dict(sorted(panels(rows).items(), reverse=True))
  figure, axes = wide_figure(
    "Time saved over plain decoding, learning included",
    columns=len(courses),
    alike=False,
  )
  for panel, (title, course) in zip(axes, courses.items(), strict=True):
    panel.axhline(0, color=GREY, lw=1)
    panel.set_title(title, fontsize=10, loc="left")
    for (seed, system), row in course.items():
      if system in SYSTEMS:
        color, style = SYSTEMS[system]
        places, share = saved(course[seed, "plain"], row)
        name = system if seed == min(s for s, _ in course) else None
        panel.plot(places, share, style, color=color, lw=1.6, label=name)
    panel.set_xlabel("requests")
  axes[0].set_ylabel("% of all of plain's time")
  legend(figure, axes[0])
  return figure


def panels(
  rows: Sequence[Row], requests: Sequence[int] = WHOLE
) -> dict[str, dict[tuple[int, str], Row]]:
  """Selects runs on two cores whose attached draft learns when it pays.

  Only the newest run of each seed is used.

  Args:
    rows: rows of `bench_whole_run`.
    requests: allowed numbers of requests; runs of other lengths are skipped.

  Returns:
    title -> (seed, system) -> row.
  """
  courses = [row for row in rows if "cumulated_seconds" in row]
  attached = {
    row["setting"]
    for row in courses
    if row["system"] == "attached online"
    and "by_worth" in row["setting"]
    and row["block_ends"][-1] in requests
  }
  by_title: dict[str, dict[tuple[int, str], Row]] = {}
  for row in courses:
    if row["setting"] in attached and "1 thread" not in row["clock"]:
      title = _title(row["setting"])
      by_title.setdefault(title, {})[row["seed"], row["system"]] = row
  return by_title


def _title(setting: str) -> str:
  """Returns a panel title that names the target."""
  if "shift_cpu" in setting:
    return "four real domains"
  shape = re.search(r"(?:demo_target_as_|padded:)([\w-]+)", setting)
  return f"{shape[1]}'s cost" if shape else "the demo's target"


def saved(plain: Row, row: Row) -> tuple[list[int], np.ndarray]:
  """Returns requests served and the % of plain decoding's time saved by then."""
  ours, its = (np.array([0.0, *r["cumulated_seconds"]]) for r in (row, plain))
  return [0, *row["block_ends"]], 100 * (its - ours) / its[-1]


def beside_hugging_face(rows: Sequence[Row]) -> Any:
  """Draws the time per token of transformers and osd_jax, and the memory bound."""
  values_of = newest(rows)
  clock = "cpu, 1 thread(s)"
  shapes = ("flan-t5-base", "flan-t5-large", "tinyllama-1.1b")
  series = {
    "transformers, float32": ("HF float32, ms/token", GREY),
    "transformers, bfloat16": ("HF bfloat16, ms/token", "#B9B9B9"),
    "osd_jax, plain, float32": ("ours, ms/token", BLUE),
  }
  picture, (axes,) = wide_figure("Plain decoding of one row, one core")
  width = 0.26
  for place, (name, (figure, color)) in enumerate(series.items()):
    values = [values_of[f"{shape}, 1 row", clock, figure] for shape in shapes]
    where = np.arange(len(shapes)) + (place - 1) * width
    bars = axes.bar(where, values, width * 0.94, color=color, label=name)
    axes.bar_label(bars, fmt="%.0f", fontsize=8, padding=2)
  for place, shape in enumerate(shapes):
    least = values_of[f"{shape}, 1 row", clock, "memory bound, ms/token"]
    name = "memory bound" if place == 0 else None
    ends = (place - 1.5 * width, place + 1.5 * width)
    axes.plot(ends, (least, least), color=ORANGE, lw=2, label=name)
  axes.set_xticks(range(len(shapes)), shapes)
  axes.set_ylabel("ms a token")
  legend(picture, axes)
  return picture


def speed_by_acceptance(rows: Sequence[Row]) -> Any:
  """Draws the speedup of speculation by acceptance, measured and in theory."""
  picture, axes = wide_figure(
    "Speculation over plain decoding, by acceptance", columns=2
  )
  alphas = np.linspace(0.5, 0.95, 46)
  for panel, target in zip(axes, ("flan-t5-base", "flan-t5-large"), strict=True):
    panel.axhline(1, color=GREY, lw=1)
    panel.set_title(
      f"{target} + t5-small (8 bits, short head)", fontsize=10, loc="left"
    )
    for drafted, color, mark in ((3, BLUE, "o"), (7, ORANGE, "s")):
      pattern = rf"alpha ([\d.]+), K {drafted}, both draft, over plain"
      points = [
        (float(match[1]), row["value"])
        for row in rows
        if row["case"] == target and (match := re.fullmatch(pattern, row["figure"]))
      ]
      # The middle point gives the cost of a round; the other points test the theory.
      alpha, speed = points[len(points) // 2]
      cost = tokens(alpha, drafted) / speed
      line = tokens(alphas, drafted) / cost
      panel.plot(
        alphas, line, "--", color=color, lw=1.2, label=f"theory, K = {drafted}"
      )
      panel.plot(*zip(*points, strict=True), mark, color=color, label=f"K = {drafted}")
    panel.set_xlabel("acceptance of a drafted token")
  axes[0].set_ylabel("times plain decoding")
  legend(picture, axes[0])
  return picture


def tokens(alpha: Any, drafted: int) -> Any:
  """Returns the expected tokens per round, (1 - a^(K + 1)) / (1 - a)."""
  return (1 - alpha ** (drafted + 1)) / (1 - alpha)


def rows_in_flight(rows: Sequence[Row]) -> Any:
  """Draws the speedup of speculation by the number of rows, on one core."""
  picture, (axes,) = wide_figure(
    "flan-t5-base + t5-small (float32), K = 3, rows in flight"
  )
  axes.axhline(1, color=GREY, lw=1)
  values_of = newest(rows)
  counts = (1, 2, 4, 8, 16)
  for alpha, color, mark in ((0.7, BLUE, "o:"), (0.9, ORANGE, "s:")):
    values = [
      value
      for count in counts
      for (case, _, figure), value in values_of.items()
      if case.endswith(f", K 3, {count} row{'s' * (count > 1)}")
      and figure == f"alpha {alpha}, over plain"
    ]
    axes.plot(counts, values, mark, color=color, label=f"acceptance {alpha}")
  axes.set_xscale("log", base=2)
  axes.set_xticks(counts, [str(count) for count in counts])
  axes.set(xlabel="rows in flight", ylabel="times plain decoding")
  legend(picture, axes)
  return picture


def learning_latency(rows: Sequence[Row]) -> Any:
  """Draws the time between tokens for several update intervals and without updates."""
  values_of = newest(rows)
  cases = [
    case
    for case in dict.fromkeys(case for case, _, _ in values_of)
    if case.startswith("demo pair") and "free" not in case
  ]
  cases.sort(key=lambda case: -int(re.findall(r"\d+|$", case)[0] or 99))
  names = [case.removeprefix("demo pair, ").removesuffix(" draft") for case in cases]
  picture, (axes,) = wide_figure("Time between tokens while the demo's draft learns")
  for place, (what, color) in enumerate((("p50", BLUE), ("p99", ORANGE))):
    values = [
      next(v for (c, _, f), v in values_of.items() if (c, f) == (case, figure))
      for case in cases
      for figure in (f"between tokens, {what}, ms",)
    ]
    where = np.arange(len(cases)) + (place - 0.5) * 0.36
    bars = axes.bar(where, values, 0.34, color=color, label=what)
    axes.bar_label(bars, fmt="%.1f", fontsize=8, padding=2)
  axes.set_xticks(range(len(cases)), names)
  axes.set(xlabel="an update every I requests", ylabel="ms")
  legend(picture, axes)
  return picture


def ahead_of_time(rows: Sequence[Row]) -> Any:
  """Draws upper bounds on tokens/s by chip, for Flan-T5-XL with t5-small."""
  values_of = newest(rows)
  cases = list(dict.fromkeys(c for c, _, _ in values_of if c.startswith("flan-t5-xl,")))
  value = {
    figure: [values_of[case, "compiled only", figure] for case in cases]
    for figure in (
      "plain tokens/s, at most",
      "frozen tokens/s at 0.8, at most",
      "needed, GB a chip",
      "of a chip's, GB",
    )
  }
  fits = np.array(value["needed, GB a chip"]) <= np.array(value["of a chip's, GB"])
  picture, (axes,) = wide_figure(
    "Flan-T5-XL + t5-small, compiled for: tokens per second at most"
  )
  handles: list[Any] = []
  for place, (name, color) in enumerate((("plain", GREY), ("frozen", BLUE))):
    figure = "plain tokens/s, at most" if name == "plain" else list(value)[1]
    where = np.arange(len(cases)) + (place - 0.5) * 0.36
    label = name if name == "plain" else "speculative, acceptance .8"
    bars = axes.bar(where, value[figure], 0.34, color=color, label=label)
    for bar, it_fits in zip(bars, fits, strict=True):
      bar.set_alpha(1.0 if it_fits else 0.25)
    handles.append(bars[int(np.argmax(fits))])
  names = [
    re.sub(r"flan-t5-xl, (\w+):.*=(\d+)", r"\1 x\2", case)
    + ("" if it_fits else "\ndoes not fit")
    for case, it_fits in zip(cases, fits, strict=True)
  ]
  axes.set_xticks(range(len(cases)), names, fontsize=9)
  axes.set_ylabel("tokens/s, roofline")
  legend(picture, axes, handles)
  return picture


def drafters(rows: Sequence[Row]) -> Any:
  """Draws tokens per target call of each way to draft, by stream and temperature.

  Of runs of several lengths, the longest is drawn.
  """
  rows = [row for row in rows if row["rows"] == 1 and not row["by_worth"]]
  streams = sorted({_stream(row) for row in rows})
  longest = {
    stream: max(row["requests"] for row in rows if _stream(row) == stream)
    for stream in streams
  }
  rows = [row for row in rows if row["requests"] == longest[_stream(row)]]
  values = {(row["system"], _stream(row)): row["tokens_per_call"] for row in rows}
  figure, (axes,) = wide_figure("Tokens per call of the target, one row")
  width = 0.9 / len(DRAFTERS)
  for place, (name, (color, is_mixed)) in enumerate(DRAFTERS.items()):
    where = np.arange(len(streams)) + (place - (len(DRAFTERS) - 1) / 2) * width
    heights = [values.get((name, stream), np.nan) for stream in streams]
    bars = axes.bar(
      where,
      heights,
      width * 0.92,
      color=color,
      hatch="///" if is_mixed else None,
      edgecolor="#FFFFFF" if is_mixed else color,
      label=name,
    )
    axes.bar_label(bars, fmt="%.1f", fontsize=7, padding=1)
  axes.axhline(1, color=GREY, lw=1)
  axes.set_xticks(range(len(streams)), streams)
  axes.set_ylabel("tokens per target call")
  legend(figure, axes)
  return figure


ON_A_REAL_MODEL = {
  "transformers plain": ("transformers, float32", "#B9B9B9"),
  "transformers bfloat16": ("transformers, bfloat16", "#B9B9B9"),
  "transformers lookup": ("transformers, prompt lookup", GREY),
  "plain": ("plain decoding", "#5A5A5A"),
  "cache": ("n-gram cache", GREEN),
  "frozen": ("attached draft", ORANGE),
  "frozen + cache": ("attached draft and cache", BLUE),
}


def real_model(rows: Sequence[Row]) -> Any:
  """Draws the speed of each system over plain decoding in its run."""
  greedy = (row for row in rows if row["stream"] == "qwen" and not row["temperature"])
  by_system = {row["system"]: row for row in greedy}
  names = [name for name in ON_A_REAL_MODEL if name in by_system]
  figure, (axes,) = wide_figure("Qwen2.5-Coder-0.5B, one row, two cores")
  bars = axes.barh(
    [ON_A_REAL_MODEL[name][0] for name in names],
    [by_system[name]["over_plain"] for name in names],
    color=[ON_A_REAL_MODEL[name][1] for name in names],
  )
  notes = []
  for name in names:
    speed, tokens = by_system[name]["over_plain"], by_system[name]["tokens_per_call"]
    notes.append(f"{speed:.2f}x   ({tokens:.2f} tokens)")
  axes.bar_label(bars, notes, fontsize=8, padding=3)
  axes.axvline(1, color=GREY, lw=1, ls=":")
  axes.invert_yaxis()
  axes.margins(x=0.3)
  axes.set_xlabel("speed, plain decoding = 1   (tokens per call of the target)")
  return figure


def how_often(rows: Sequence[Row]) -> Any:
  """Draws tokens per call by the interval between updates, with equal training."""
  figure, (axes,) = wide_figure("How often to update, one slice for each request")
  by_stream = _by_stream(rows, "how_often")
  for (stream, systems), color in zip(by_stream.items(), COLORS):
    intervals = {
      int(name.removeprefix("I = ")): values
      for name, values in systems.items()
      if name.startswith("I = ")
    }
    _line(axes, intervals, color, "-", stream)
    axes.axhline(np.mean(systems["floor"]), color=color, lw=1, ls=":")
  axes.set_xscale("log", base=2)
  axes.set_xticks([1, 2, 4, 8, 32, 128, 500], [1, 2, 4, 8, 32, 128, 500])
  axes.set_xlabel("requests between updates   (dotted: the first draft, frozen)")
  axes.set_ylabel("tokens per call of the target")
  legend(figure, axes)
  return figure


CHANGING = {
  "floor": (GREY, ":"),
  "cache": (GREEN, "-"),
  "best in hindsight": (PINK, "-"),
  "online": (BLUE, "-"),
  "online, gated": (BLUE, "--"),
  "offline ceiling": (ORANGE, ":"),
}


def changing_topics(rows: Sequence[Row]) -> Any:
  """Draws tokens per call by the number of requests before the topic changes."""
  figure, (axes,) = wide_figure("Topics that change, four in turn")
  by_stream = _by_stream(rows, "variance")
  for system, (color, style) in CHANGING.items():
    periods = {
      int(stream.split()[1]): systems[system]
      for stream, systems in by_stream.items()
      if stream.startswith("every") and system in systems
    }
    if periods:
      _line(axes, periods, color, style, system)
  axes.set_xscale("log")
  axes.set_xticks([5, 25, 100, 150], [5, 25, 100, 150])
  axes.set_xlabel("requests of a topic before the next one")
  axes.set_ylabel("tokens per call of the target")
  legend(figure, axes)
  return figure


STABILITY = {
  "demo": ("the demo's pair", BLUE),
  "eight topics": ("target of eight topics", ORANGE),
  "demo_independent": ("the demo's independent pair", GREEN),
}


def stability(rows: Sequence[Row]) -> Any:
  """Draws the gain of learning after a log by the gain at the log's end."""
  figure, (axes,) = wide_figure("Gain of learning, tokens per call of the target")
  cells = [row for row in rows if row["question"] == "stability"]
  for pair, (label, color) in STABILITY.items():
    for is_new in (False, True):
      group = [
        c for c in cells if c["pair"] == pair and (c["new_topics"] > 0) == is_new
      ]
      places = ([cell[name] for cell in group] for name in ("gain_at_end", "gain_late"))
      face = "none" if is_new else color
      name = None if is_new else label
      axes.scatter(*places, s=24, facecolors=face, edgecolors=color, label=name)
  axes.scatter(
    [], [], s=24, facecolors="none", edgecolors=GREY, label="new topics come"
  )
  axes.axline((0, 0), slope=1, color=GREY, lw=1, ls=":")
  axes.set_xlabel("requests 51 to 100   (dotted: the same gain)")
  axes.set_ylabel("requests 101 to 300")
  legend(figure, axes)
  return figure


PAPER = {
  "generic": (GREY, ":"),
  "cache": (GREEN, "-"),
  "static": (ORANGE, "-"),
  "as published": (PINK, "-"),
  "ours": (BLUE, "-"),
  "cache + ours": (BLUE, "--"),
}
PAPER_WINDOW = 4  # blocks


def paper(rows: Sequence[Row]) -> Any:
  """Draws tokens per call over the longest streams of SQL, for both kinds of drafts."""
  of_draft = {
    name: [row for row in rows if row["set"] == "spider" and row["pair"].endswith(name)]
    for name in ("independent", "attached")
  }
  figure, panels = wide_figure(
    "A published target and questions about databases", columns=2, alike=False
  )
  for axes, (name, some) in zip(panels, of_draft.items(), strict=True):
    axes.set_title(f"{name} draft")
    longest = max(row["online"] for row in some)
    for system, (color, style) in PAPER.items():
      courses = [
        _rolling(np.asarray(row["blocks"]))
        for row in some
        if (row["online"], row["column"]) == (longest, system)
      ]
      if courses:
        requests, values = np.mean(courses, axis=0)
        axes.plot(requests, values, color=color, ls=style, label=system)
    axes.set_xlabel("requests")
  panels[0].set_ylabel("tokens per call of the target")
  legend(figure, panels[-1])
  return figure


def _rolling(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns requests served, and tokens per call of the last `PAPER_WINDOW` blocks."""
  sums = np.cumsum(np.pad(blocks, ((PAPER_WINDOW, 0), (0, 0))), axis=0)
  late = (sums[PAPER_WINDOW:] - sums[:-PAPER_WINDOW])[PAPER_WINDOW - 1 :]
  return np.cumsum(blocks[:, 0])[PAPER_WINDOW - 1 :], late[:, 1] / late[:, 2]


def _by_stream(rows: Sequence[Row], question: str) -> dict[str, dict[str, list[float]]]:
  """Returns stream -> system -> the demo's tokens per call, one value of each seed."""
  by_stream: dict[str, dict[str, list[float]]] = {}
  for row in rows:
    if row["question"] == question and row["pair"] == "demo":
      systems = by_stream.setdefault(row["stream"], {})
      systems.setdefault(row["system"], []).append(row["tokens_per_call"])
  return by_stream


def _line(
  axes: Any, values: dict[int, list[float]], color: str, style: str, label: str
) -> None:
  """Draws means over the seeds, and their range."""
  places = sorted(values)
  means = [np.mean(values[place]) for place in places]
  axes.plot(places, means, color=color, ls=style, marker="o", ms=4, label=label)
  low, high = ([f(values[place]) for place in places] for f in (min, max))
  axes.fill_between(places, low, high, color=color, alpha=0.15, lw=0)


def _stream(row: Row) -> str:
  return f"{row['stream']}, T = {row['temperature']:g}"


# name -> (function that draws it, file of its rows)
DRAWN: dict[str, tuple[Callable[[Sequence[Row]], Any], str]] = {
  "acceptance": (acceptance, "experiments/demo_stream/overlap.jsonl"),
  "time_saved": (time_saved, "benchmarks/results/whole_run.jsonl"),
  "beside_hugging_face": (beside_hugging_face, "benchmarks/results/greedy.jsonl"),
  "speed_by_acceptance": (speed_by_acceptance, "benchmarks/results/speculative.jsonl"),
  "rows_in_flight": (rows_in_flight, "benchmarks/results/batching.jsonl"),
  "learning_latency": (learning_latency, "benchmarks/results/learning.jsonl"),
  "ahead_of_time": (ahead_of_time, "benchmarks/results/ahead_of_time.jsonl"),
  "drafters": (drafters, "experiments/drafters/cells.jsonl"),
  "real_model": (real_model, "experiments/drafters/real_model.jsonl"),
  "paper": (paper, "experiments/paper/cells.jsonl"),
  "how_often": (how_often, "experiments/open_questions/cells.jsonl"),
  "changing_topics": (changing_topics, "experiments/open_questions/cells.jsonl"),
  "stability": (stability, "experiments/open_questions/cells.jsonl"),
}


def source_hash(name: str) -> str:
  """Returns a hash of the rows that a picture is drawn from."""
  text = (HERE.parent / DRAWN[name][1]).read_bytes()
  return hashlib.sha256(text).hexdigest()[:16]


def draw(name: str, folder: pathlib.Path = FIGURES) -> list[pathlib.Path]:
  """Writes a picture for light and for dark pages; returns the files."""
  import matplotlib

  drawer, source = DRAWN[name]
  lines = (HERE.parent / source).read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  folder.mkdir(parents=True, exist_ok=True)
  paths = []
  for theme, colors in THEMES.items():
    with matplotlib.rc_context(colors.style):
      figure = drawer(rows)
      path = folder / f"{name}.{theme}.svg"
      notes = {"Date": None, "Creator": None, "Source": f"{source} {source_hash(name)}"}
      figure.savefig(path, metadata=notes)
      # Matplotlib writes trailing blanks.
      path.write_text(re.sub(r"[ ]+$", "", path.read_text(), flags=re.MULTILINE))
      paths.append(path)
  return paths


def main() -> None:
  """Draws the named pictures, by default all."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("names", nargs="*", choices=[[], *DRAWN], help="default: all")
  parser.add_argument("--output", type=pathlib.Path, default=FIGURES)
  args = parser.parse_args()
  for name in args.names or DRAWN:
    for path in draw(name, args.output):
      print(path)


if __name__ == "__main__":
  main()
