"""What a run writes: its directory, metrics.jsonl, plots and report.html.

Importing this package loads neither matplotlib nor tensorboardX.
"""

from osd_jax.writers.metrics_log import MetricsLog, TensorBoardLog, read
from osd_jax.writers.plots import draw_plots, draw_plots_if_available, plots_available
from osd_jax.writers.report import write_report
from osd_jax.writers.run_directory import RunDirectory, RunResult, check_output
from osd_jax.writers.series import cost_ledger, segments, trailing_mean

__all__ = [
  "MetricsLog",
  "RunDirectory",
  "RunResult",
  "TensorBoardLog",
  "check_output",
  "cost_ledger",
  "draw_plots",
  "draw_plots_if_available",
  "plots_available",
  "read",
  "segments",
  "trailing_mean",
  "write_report",
]
