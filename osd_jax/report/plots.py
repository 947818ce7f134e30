"""PNG plots of a run, drawn from the rows of metrics.jsonl; needs [plots]."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from osd_jax import base, runs
from osd_jax.report import canvas, compile_plots, series, serving_plots, training_plots

# In reading order; each returns None where the rows hold nothing for it.
PLOTS: dict[str, Callable[[Sequence[series.Row]], Any]] = {
  "distribution_overlap": serving_plots.overlap,
  "tokens_per_target_call": serving_plots.tokens_per_call,
  "milliseconds_per_token": serving_plots.milliseconds,
  "latency": serving_plots.latency,
  "acceptance_per_position": serving_plots.per_position,
  "tokens_per_round": serving_plots.rounds,
  "update_loss": serving_plots.loss,
  "time_saved": serving_plots.saved,
  "time_spent": serving_plots.account,
  "training_loss": training_plots.loss,
  "held_out": training_plots.held_out,
  "drafts": training_plots.drafts,
  "speeds": training_plots.speeds,
  "certificate": training_plots.certificate,
  "memory_of_a_chip": compile_plots.memory,
  "tokens_per_second": compile_plots.speeds,
}


def draw_plots_if_available(
  rows: Iterable[Mapping[str, Any]], directory: str | Path
) -> tuple[list[Path], str]:
  """Draws the plots, or says why there are none; never fails for want of them.

  Returns:
    The files, and a sentence for the user.
  """
  try:
    paths = draw_plots(rows, directory)
  except ImportError as error:
    return [], f"Plots were left out: {error}"
  return paths, f"{len(paths)} plots in {directory}"


def draw_plots(rows: Iterable[Mapping[str, Any]], directory: str | Path) -> list[Path]:
  """Draws every plot for which the rows hold data.

  Args:
    rows: rows of metrics.jsonl.
    directory: folder of the PNG files, made if absent.

  Returns:
    The files, in reading order.

  Raises:
    MissingExtraError: matplotlib is not installed; says what to install.
  """
  rows = list(rows)
  drawn = {name: (lambda draw=draw: draw(rows)) for name, draw in PLOTS.items()}
  return _drawn(drawn, Path(directory))


def draw_comparison(
  served: Mapping[str, Sequence[Mapping[str, Any]]], path: Path
) -> Path:
  """Draws overlap, tokens per call and time of several served streams in one plot.

  Args:
    served: name -> rows of metrics.jsonl.
    path: the PNG file.

  Raises:
    MissingExtraError: matplotlib is not installed; says what to install.
  """
  return _drawn({path.stem: lambda: _comparison(served)}, path.parent)[0]


def _drawn(figures: Mapping[str, Callable[[], Any]], directory: Path) -> list[Path]:
  """Saves each figure that there is under its name."""
  try:
    import matplotlib
  except ImportError as error:
    raise base.MissingExtraError(
      "plots need matplotlib: pip install osd-jax[plots]"
    ) from error
  directory.mkdir(parents=True, exist_ok=True)
  paths = []
  with matplotlib.rc_context(canvas.STYLE):
    for name, draw in figures.items():
      figure = draw()
      if figure is not None:
        figure.savefig(directory / f"{name}.png", dpi=canvas.DPI)
        paths.append(directory / f"{name}.png")
  return paths


def _comparison(served: Mapping[str, Sequence[Mapping[str, Any]]]) -> Any:
  from matplotlib.figure import Figure

  figures = {
    "overlap": "Distribution overlap",
    "tokens_per_target_call": "Tokens per target call",
    "online_ms_per_token": "ms per token",
  }
  figure = Figure(figsize=(canvas.WIDTH, 7.5), layout="constrained")
  grid = figure.subplots(len(figures), 1, sharex=True)
  for axes, (name, title) in zip(grid, figures.items()):
    tops = []
    for number, (run, rows) in enumerate(served.items()):
      requests = runs.request_rows(rows)
      starts = [part.start for part in series.segments(requests)]
      values = runs.column(requests, name)
      axes.plot(
        *serving_plots.trend(serving_plots.places(requests), values, starts),
        canvas.STYLES[number % len(canvas.STYLES)],
        color=canvas.COLORS[number % len(canvas.COLORS)],
        lw=1.8,
        label=run,
      )
      tops.append(np.nanquantile(values, 0.95) if np.isfinite(values).any() else 0)
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_ylim(0, 1.02 if name == "overlap" else max(max(tops) * 1.15, 1))
  grid[-1].set_xlabel(f"request; mean of the last {series.WINDOW}, anew at each shift")
  handles, names = grid[0].get_legend_handles_labels()
  figure.legend(handles, names, loc="outside upper center", ncols=3, frameon=False)
  return figure
