"""What a run writes: its directory, metrics, outputs, plots and report.html.

Importing this package loads neither matplotlib nor tensorboardX.
"""

from osd_jax.writers.json_lines import read
from osd_jax.writers.ledger import Ledger
from osd_jax.writers.metrics_log import MetricsLog
from osd_jax.writers.outputs_log import KEPT as OUTPUTS_KEPT
from osd_jax.writers.outputs_log import Output, OutputsLog
from osd_jax.writers.plots import (
  draw_comparison,
  draw_plots,
  draw_plots_if_available,
)
from osd_jax.writers.report import write_page, write_report
from osd_jax.writers.run_directory import RunDirectory, RunResult
from osd_jax.writers.series import by_segment, of_kind, request_rows

__all__ = [
  "OUTPUTS_KEPT",
  "Ledger",
  "MetricsLog",
  "Output",
  "OutputsLog",
  "RunDirectory",
  "RunResult",
  "by_segment",
  "draw_comparison",
  "draw_plots",
  "draw_plots_if_available",
  "of_kind",
  "read",
  "request_rows",
  "write_page",
  "write_report",
]
