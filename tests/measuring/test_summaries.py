"""The words of a run: segments by place in the stream, figures as they were logged."""

import io

import pytest
import rich.console

from osd_jax import writers
from osd_jax.measuring import summaries

SHIFTS = [(0, "maths"), (60, "sql")]


def requests() -> list[dict]:
  """120 requests; overlap jumps at 30 of each segment; every fourth is compared."""
  rows = []
  for index in range(120):
    row = {
      "kind": "request",
      "index": index,
      "query": index,
      "source": "maths" if index < 60 else "sql",
      "overlap": 0.5 if index % 60 < 10 else 0.9,
      "floor_overlap": 0.5,
      "draft_acceptance_rate": 0.7,
      "tokens_per_target_call": 4.0,
      "output_tokens": 10 if index % 8 else 30,
      "decode_ms": 20.0,
      "online_ms_per_token": 2.0,
      "metering_ms": 1.0,
    }
    if index % 4 == 0:
      row |= {"plain_ms_per_token": 4.0, "floor_ms_per_token": 3.0}
    rows.append(row)
  update = {
    "kind": "update",
    "finished": 8,
    "version": 1,
    "loss": 1.0,
    "update_ms": 500.0,
    "wait_ms": 100.0,
    "skipped": 2,
    "steps": 2,
  }
  return [*rows, update, {"kind": "summary", "wall_seconds": 3.0}]


def test_segments_follow_the_stream_whatever_finished_first():
  rows = [row for row in requests() if row["kind"] == "request"]
  parts = summaries.split(list(reversed(rows)), SHIFTS)
  assert [label for label, _ in parts] == ["maths", "sql"]
  assert [row["query"] for row in parts[1][1]] == list(range(60, 120))


def test_a_segment_that_was_not_reached_is_left_out():
  rows = [row for row in requests() if row["kind"] == "request"][:50]
  assert [label for label, _ in summaries.split(rows, SHIFTS)] == ["maths"]


def test_the_table_holds_first_and_last_means():
  rows = [row for row in requests() if row["kind"] == "request"]
  table = summaries.agreement_table(summaries.split(rows, SHIFTS))
  first = (10 * 0.5 + 40 * 0.9) / 50
  assert table[0]["overlap first 50"] == pytest.approx(first, abs=1e-3)
  assert table[0]["overlap last 50"] == pytest.approx(0.9)
  assert table[0]["frozen last 50"] == pytest.approx(0.5)


def test_speeds_are_weighted_by_tokens_and_over_the_same_requests():
  rows = [row for row in requests() if row["kind"] == "request"]
  rows[0]["plain_ms_per_token"] = 8.0  # 30 of the compared requests' 600 tokens
  rows[0]["online_ms_per_token"] = 2.0
  for row in rows:
    if "plain_ms_per_token" not in row:
      row["online_ms_per_token"] = 1000.0  # was not compared: must not count
  text = " ".join(summaries.headline(rows, summaries.split(rows, SHIFTS), requests()))
  expected = 4.0 + 4.0 * 30 / 600
  assert f"plain decoding {expected:.2f} ms/token" in text
  assert f"{expected / 2:.2f}x plain, 1.50x the frozen draft" in text


def test_costs_are_added_up_in_seconds():
  cost = summaries.cost_row(requests())
  assert cost["updates"] == 1 and cost["skipped steps"] == 2
  assert cost["update seconds"] == 0.5 and cost["waiting seconds"] == 0.1
  assert cost["decode seconds"] == pytest.approx(2.4)


def test_a_run_is_concluded_with_a_page_and_a_table(tmp_path):
  directory = writers.RunDirectory.create(tmp_path / "run")
  with writers.MetricsLog(directory.metrics_path) as log:
    for row in requests():
      log.write(row.pop("kind"), row)
  shown = io.StringIO()
  console = rich.console.Console(file=shown, width=200)
  summaries.conclude(directory, SHIFTS, console, "token-for-token equal")
  assert "maths" in shown.getvalue() and "token-for-token" in shown.getvalue()
  page = directory.report_path.read_text(encoding="utf-8")
  assert "token-for-token" in page and "http" not in page.split("<pre>")[0]
