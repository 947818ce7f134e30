"""Summaries of a run: tables and sentences, redrawn reports, compared runs."""

import io
import json

import pytest
import rich.console

from osd_jax import base, runs
from osd_jax.report import page, tables


def requests() -> list[dict]:
  """Returns rows of 120 requests in two segments of 60.

  The overlap rises after 10 requests of each segment. Every fourth request is compared
  with plain decoding and with the frozen draft.
  """
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


def logged(path, rows) -> runs.RunDirectory:
  directory = runs.RunDirectory.start(path)
  with runs.MetricsLog(directory.metrics_path) as log:
    for row in rows:
      values = {name: value for name, value in row.items() if name != "kind"}
      log.write(row["kind"], values)
  directory.close()
  return directory


def segments(rows=None):
  return tables.by_segment([row for row in rows or requests() if "query" in row])


def test_agreement_table_has_first_and_last_means():
  table = tables.agreement_table(segments())
  # The first 50 requests of a topic are 10 before the rise and 40 after it.
  first = (10 * 0.5 + 40 * 0.9) / 50
  assert [row["topic"] for row in table] == ["maths", "sql"]
  assert table[0]["overlap first 50"] == pytest.approx(first, abs=1e-3)
  assert table[0]["overlap last 50"] == pytest.approx(0.9)
  assert table[0]["frozen last 50"] == pytest.approx(0.5)


def test_speeds_are_token_weighted_means_over_compared_requests():
  rows = [row for row in requests() if row["kind"] == "request"]
  rows[0]["plain_ms_per_token"] = 8.0  # 30 of the compared requests' 600 tokens
  rows[0]["online_ms_per_token"] = 2.0
  for row in rows:
    if "plain_ms_per_token" not in row:
      # Requests that were not compared must not count.
      row["online_ms_per_token"] = 1000.0
  (table,) = tables.speed_table([("all", rows)])
  assert table["plain ms/token"] == pytest.approx(4.0 + 4.0 * 30 / 600)
  assert table["online ms/token"] == 2.0


def test_summary_states_the_parts_of_the_wall_time():
  sentences = tables.summary(requests()).sentences
  (spent,) = (text for text in sentences if text.startswith("Wall time"))
  assert spent == (
    "Wall time 3.0 s: serving 2.4, waiting for updates 0.1, comparing 0.0, metering"
    " 0.1, rest 0.4. Learning took 0.5 s (1 updates, 2 steps skipped); during 0.4 s of"
    " them serving went on."
  )


def judged(overlap):
  return {
    "sql": {
      "requests": 8,
      "distribution_overlap": overlap,
      "distribution_overlap_upper": 0.9,
      "acceptance_rate": 0.5,
    }
  }


OFFLINE = [
  {"kind": "evaluation", "step": 0, "tasks": judged(0.25)},
  {"kind": "step", "step": 5, "loss": 2.0, "skipped": 0},
  {"kind": "step", "step": 10, "loss": 1.0, "skipped": 3},
  {"kind": "evaluation", "step": 10, "tasks": judged(0.75)},
]
RIGHT = {"sql": {"rows": 8, "token_accuracy": 0.75, "exact_match": 0.5}}
PRETRAIN = [*OFFLINE[1:3], {"kind": "evaluation", "step": 10, "tasks": RIGHT}]
CHECK = {"outputs": 4, "equal": 4, "near_ties": 0, "passed": True}
CERTIFY = [{"kind": "certificate", "K": 3, "rows": 1, "draft": "pair", **CHECK}]
SPEEDS = {"speed_up": 1.25, "predicted": 1.5, "predicted_paper": 2.0}
EVALUATE = [
  {"kind": "quality", "task": "sql", "exact_match": 0.5},
  {"kind": "draft", "task": "sql", "draft": "first", "distribution_overlap": 0.4},
  {"kind": "speed", "rows": 1, "draft": "first", **SPEEDS},
]


@pytest.mark.parametrize(
  ("rows", "title", "words"),
  [
    (
      requests(),
      "Online speculative decoding",
      ["maths: overlap 0.82", "Measured over all"],
    ),
    (OFFLINE, "Offline distillation", ["10 steps: loss 2.0000", "3 steps", "0.250"]),
    (PRETRAIN, "Supervised training", ["loss 2.0000", "Exact match over", "0.500"]),
    (CERTIFY, "Certificate", ["near ties", "pair"]),
    (EVALUATE, "Evaluation", ["1.25x plain decoding (1.50x predicted", "Drafts"]),
    ([], "Run", ["No measurements yet"]),
  ],
)
def test_every_kind_of_run_has_a_report_that_can_be_redrawn(
  tmp_path, rows, title, words
):
  directory = logged(tmp_path / "run", rows)
  shown = io.StringIO()
  console = rich.console.Console(file=shown, width=200)
  report = page.conclude(directory, console, "token-for-token equal")
  shown_page = report.read_text(encoding="utf-8")
  assert (
    f"<h1>{title}</h1>" in shown_page and "http" not in shown_page.split("<pre>")[0]
  )
  for word in [*words, "token-for-token equal"]:
    assert word in shown_page
  assert "token-for-token equal" in shown.getvalue()
  report.unlink()
  (directory.path / "certificate.json").write_text(
    json.dumps({"sentence": "token-for-token equal"})
  )
  assert page.redraw(directory.path) == report
  assert report.read_text(encoding="utf-8") == shown_page


def test_redrawing_a_folder_without_a_run_is_refused(tmp_path):
  with pytest.raises(base.InputError, match=r"provenance\.json"):
    page.redraw(tmp_path)
  runs.RunDirectory.start(tmp_path / "run")
  with pytest.raises(base.InputError, match=r"metrics\.jsonl"):
    page.redraw(tmp_path / "run")


def test_comparison_shows_the_figures_of_every_run(tmp_path):
  for name, scale in (("one", 1.0), ("two", 2.0)):
    rows = requests()
    for row in rows:
      if row["kind"] == "request":
        row |= {"decode_ms": scale * row["decode_ms"], "target_calls": 5}
    logged(tmp_path / name, rows)
  written = page.compare([tmp_path / "one", tmp_path / "two"], tmp_path / "out")
  text = written.read_text(encoding="utf-8")
  assert written == tmp_path / "out" / "report.html" and "data:image/png" in text
  tokens = sum(r["output_tokens"] for r in requests() if r["kind"] == "request")
  for scale in (1, 2):
    assert f"{round(scale * 120 * 20.0 / tokens, 2):.3f}" in text
  assert ">one<" in text and ">two<" in text


def test_comparison_shows_the_verdict_of_every_run(tmp_path):
  rows = requests()
  for row in rows:
    if row["kind"] == "request":
      row |= {"target_calls": 5, "drafted": 35}
  logged(tmp_path / "learned", rows)
  without = [
    {k: v for k, v in r.items() if k not in ("floor_overlap", "plain_ms_per_token")}
    for r in rows
  ]
  logged(tmp_path / "unknown", without)
  shown = rich.console.Console(file=io.StringIO(), width=200)
  paths = [tmp_path / "learned", tmp_path / "unknown"]
  written = page.compare(paths, tmp_path / "out", shown)
  for text in (shown.file.getvalue(), written.read_text(encoding="utf-8")):
    assert "learned: Measured over all" in text
    assert "unknown: Measured" not in text
  first, second = (tables.comparison_row("", r) for r in (rows, without))
  assert (first["overlap"], first["frozen overlap"]) == (0.833, 0.5)
  assert (first["frozen ms/token"], second["frozen overlap"]) == (3.0, None)


def test_runs_that_cannot_be_compared_are_named(tmp_path):
  logged(tmp_path / "one", requests())
  logged(tmp_path / "two", OFFLINE)
  with pytest.raises(base.InputError, match="received two, which served no requests"):
    page.compare([tmp_path / "one", tmp_path / "two"], tmp_path / "out")
  with pytest.raises(base.InputError, match="received 1 runs, expected two or more"):
    page.compare([tmp_path / "one"])
  assert not (tmp_path / "out").exists()


def test_compared_runs_with_the_same_name_show_their_paths(tmp_path):
  rows = [row | {"target_calls": 5} for row in requests()]
  paths = [tmp_path / parent / "run" for parent in ("a", "b")]
  for path in paths:
    logged(path, rows)
  text = page.compare(paths, tmp_path / "out").read_text(encoding="utf-8")
  assert all(str(path) in text for path in paths)
