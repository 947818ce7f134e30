"""Rows of metrics.jsonl: what is written is read back, and the reference lists all."""

import dataclasses
import json
import math

import made_rows
import numpy as np
import pytest

from osd_jax import base, certificate, runs
from osd_jax.loop import rows
from osd_tools import metrics_page


def test_rows_are_read_as_they_were_written(tmp_path):
  failure = certificate.Difference(0, 2, 5, None, 1.5, 0.5, False)
  verdict = certificate.Certificate(outputs=1, tokens=9, failures=(failure,))
  entries = [
    rows.Start(loading_ms=1.0, compiling_ms=2.0, measuring_ms=0.0),
    made_rows.request(3, certificate=verdict, paused=False, gate_ms=0.0),
    made_rows.update(skipped=1),
    rows.Event(finished=3, name="unsaved", text="a draft"),
  ]
  with runs.MetricsLog(tmp_path / "metrics.jsonl") as log:
    for entry in entries:
      log.write(entry)
    log.append({"kind": "of another version"})
  assert rows.read(tmp_path / "metrics.jsonl") == entries


def test_numbers_that_are_not_finite_are_read_as_nan(tmp_path):
  with runs.MetricsLog(tmp_path / "metrics.jsonl") as log:
    log.write(made_rows.request(overlap=np.float32(np.inf)))
  line = json.loads((tmp_path / "metrics.jsonl").read_text())
  assert line["nonfinite"] == ["overlap"] and line["overlap"] is None
  # Unmeasured fields are left out; a rate of nothing is null.
  assert "floor_overlap" not in line and line["draft_acceptance_rate"] is not None
  assert math.isnan(rows.read(tmp_path / "metrics.jsonl")[0].overlap)


def test_row_without_a_field_names_kind_and_version():
  with pytest.raises(base.InputError, match=r"'summary'.*Another version"):
    rows.parse({"kind": "summary"})


def test_every_field_is_documented_and_the_page_is_current(repository):
  for kind in rows.KINDS.values():
    assert metrics_page.section(kind).count("\n| `") == len(dataclasses.fields(kind))
  page = (repository / metrics_page.PAGE).read_text("utf-8")
  assert metrics_page.updated(page) == page
  assert metrics_page.updated(page.replace("| `loading_ms`", "| `x`")) == page
