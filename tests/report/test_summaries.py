"""Summaries of a run: tables and sentences, redrawn reports, compared runs."""

import dataclasses
import html
import io
import json
import sys

import made_rows
import numpy as np
import pytest
import rich.console

from osd_jax import base, certificate, runs
from osd_jax.loop import rows as rows_lib
from osd_jax.report import page, tables
from osd_tools import rows as tool_rows


def requests() -> list[rows_lib.Row]:
  """Returns rows of 120 requests in two segments of 60.

  The overlap rises after 10 requests of each segment. Every fourth request is compared
  with plain decoding and with the frozen draft.
  """
  rows = [
    made_rows.request(
      index,
      source="maths" if index < 60 else "sql",
      overlap=0.5 if index % 60 < 10 else 0.9,
      floor_overlap=0.5,
      tokens_per_target_call=4.0,
      output_tokens=10 if index % 8 else 30,
      decode_ms=20.0,
      online_ms_per_token=2.0,
      metering_ms=1.0,
      plain_ms_per_token=None if index % 4 else 4.0,
      floor_ms_per_token=None if index % 4 else 3.0,
    )
    for index in range(120)
  ]
  update = made_rows.update(update_ms=500.0, wait_ms=100.0, skipped=2)
  return [update, *rows, rows_lib.Summary(wall_seconds=3.0)]


def served(**changes) -> list[rows_lib.Request]:
  """Returns the requests, with other values of some fields."""
  rows = rows_lib.of(rows_lib.Request, requests())
  return [dataclasses.replace(row, **changes) for row in rows]


def logged(path, rows) -> runs.RunDirectory:
  directory = runs.RunDirectory.start(path)
  with runs.MetricsLog(directory.metrics_path) as log:
    for row in rows:
      log.write(row)
  directory.close()
  return directory


def test_agreement_table_has_first_and_last_means():
  table = tables.agreement_table(tables.by_segment(served()))
  # The first 50 requests of a topic are 10 before the rise and 40 after it.
  first = (10 * 0.5 + 40 * 0.9) / 50
  assert [row["topic"] for row in table] == ["maths", "sql"]
  assert table[0]["overlap first 50"] == pytest.approx(first, abs=1e-3)
  assert table[0]["overlap last 50"] == pytest.approx(0.9)
  assert table[0]["frozen last 50"] == pytest.approx(0.5)


def test_speeds_are_token_weighted_means_over_compared_requests():
  rows = served()
  for row in rows:
    if row.plain_ms_per_token is None:  # these requests must not count
      rows[row.index] = dataclasses.replace(row, online_ms_per_token=1000.0)
  rows[0] = dataclasses.replace(rows[0], plain_ms_per_token=8.0)  # 30 of 600 tokens
  (table,) = tables.speed_table([("all", rows)])
  assert table["plain ms/token"] == pytest.approx(4.0 + 4.0 * 30 / 600)
  assert table["online ms/token"] == 2.0


def test_percentiles_are_those_of_the_compared_requests():
  rows = served()
  for number in range(30):
    rows[4 * number] = dataclasses.replace(
      rows[4 * number], online_ms_per_token=float(number)
    )
  table = {row["decoding"]: row for row in tables.latency_table(rows)}
  assert list(table) == ["plain", "frozen", "online"]
  assert table["online"]["p50"] == pytest.approx(14.5)
  assert table["online"]["p99"] == pytest.approx(np.percentile(np.arange(30), 99))


def headline(**changes):
  """Figures and sentences of a run whose compared requests have other fields."""
  rows = [
    dataclasses.replace(row, **changes)
    if isinstance(row, rows_lib.Request) and row.plain_ms_per_token
    else row
    for row in requests()
  ]
  found = tables.summary(rows).headline
  assert len(found) == 4
  return [fact.figure for fact in found], " ".join(fact.sentence for fact in found)


def test_headline_says_what_was_served_and_whether_learning_paid():
  """2.4 s of decoding and .1 s of waiting for 1,500 tokens at 4 and 3 ms each."""
  figures, text = headline()
  assert figures == [
    "120 requests", "4.00 tokens per call", "2.40x plain decoding", "Learning paid"
  ]  # fmt: skip
  assert "2 topics (maths, sql)" in text and "saved 2.0 s against the frozen" in text
  assert "Serving took 2.5 s" in text and "taken 6.0 s (2.40x, surely" in text


@pytest.mark.parametrize(
  ("changes", "figure", "said"),
  [
    ({"decode_ms": 100.0}, "Learning has not paid", "0.4 s longer"),
    (
      {"plain_ms_per_token": 1.0, "floor_ms_per_token": 3.0},
      "Learning helped, drafting did not pay",
      "plain decoding would have been faster",
    ),
  ],
)
def test_headline_does_not_praise_learning_that_did_not_pay(changes, figure, said):
  figures, text = headline(**changes)
  assert figures[3] == figure and said in text


def test_note_says_which_drafts_the_gate_let_serve():
  rows = served(gate_ms=1.0)
  first = "Gate: the first draft served all requests."
  assert first in tables.summary(rows).notes
  names = [("promoted", 30), ("confirmed", 50), ("taken_back", 70)]
  fields = {"version": 1, "answers": 8, "gain": 0.1, "text": ""}
  rows += [rows_lib.Gate(name=name, finished=at, **fields) for name, at in names]
  note = "Gate: trained drafts served from request 30, an earlier draft again from 70."
  assert note in tables.summary(rows).notes
  assert not any("Gate" in note for note in tables.summary(requests()).notes)


def test_headline_without_learning_or_comparisons_says_so():
  figures = [fact.figure for fact in tables.summary(served()).headline]
  assert figures[-1] == "No learning"
  alone = served(plain_ms_per_token=None)
  assert tables.summary(alone).headline[-1].figure == "Not compared"


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
  rows_lib.Evaluation(step=0, tasks=judged(0.25)),
  rows_lib.Step(step=5, loss=2.0, skipped=0),
  rows_lib.Step(step=10, loss=1.0, skipped=3),
  rows_lib.Evaluation(step=10, tasks=judged(0.75)),
]
RIGHT = {"sql": {"rows": 8, "token_accuracy": 0.75, "exact_match": 0.5}}
PRETRAIN = [*OFFLINE[1:3], rows_lib.Evaluation(step=10, tasks=RIGHT)]
CHECK = certificate.Certificate(outputs=4, equal=4, tokens=9)
CERTIFY = [rows_lib.Certified(K=3, rows=1, draft="pair", **CHECK.row())]
COMPILED = [
  tool_rows.Memory(what="weights", gigabytes_a_chip=1.0),
  tool_rows.Fits(needed_gb=1.0, memory_gb=2.0, advice="", text="It needs 1.00 GB."),
]
EVALUATE = [
  rows_lib.Quality(
    task="sql",
    prompts=2,
    references=2,
    exact_match=0.5,
    ended=1.0,
    looping=0.0,
    distinct=1.0,
    output_tokens=8.0,
    token_accuracy=None,
  ),
  made_rows.draft("first", 0.4),
  made_rows.draft("second", 0.125, rows_lib.Change),
  made_rows.speed(),
]


@pytest.mark.parametrize(
  ("rows", "title", "words"),
  [
    (
      requests(),
      "Online speculative decoding",
      ["<b>2.40x plain decoding</b>", "Measured over all", "wall time"],
    ),
    (
      OFFLINE,
      "Offline distillation",
      ["10 steps: loss 2.0000", "from 0.25 at", "0.250"],
    ),
    (PRETRAIN, "Supervised training", ["loss 2.0000", "Exact match over", "0.500"]),
    (CERTIFY, "Certificate", ["near ties", "pair"]),
    (EVALUATE, "Evaluation", ["1.25x plain decoding", "(1.50x predicted", "+0.125"]),
    (COMPILED, "Memory of a chip", ["It needs 1.00 GB.", "gigabytes a chip"]),
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


def test_missing_plots_are_explained_on_the_console_and_the_page(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "matplotlib", None)
  console = rich.console.Console(file=io.StringIO(), width=200)
  report = page.conclude(logged(tmp_path / "run", requests()), console)
  shown_page = html.unescape(report.read_text(encoding="utf-8"))
  for shown in (console.file.getvalue(), shown_page):
    assert 'pip install "osd_jax[plots]"' in shown


@pytest.fixture
def compared(tmp_path):
  """Two runs with the same stream; the second takes twice as long."""
  for name, scale in (("one", 1.0), ("two", 2.0)):
    rows = [requests()[0], *served(decode_ms=20.0 * scale)]
    logged(tmp_path / name, rows)
  return [tmp_path / "one", tmp_path / "two"]


def test_comparison_names_the_winner_and_shows_every_run(compared, tmp_path):
  shown = rich.console.Console(file=io.StringIO(), width=200)
  written = page.compare(compared, tmp_path / "out", shown)
  text = written.read_text(encoding="utf-8")
  assert written == tmp_path / "out" / "report.html" and text.count("<svg") == 4
  # 1,500 tokens in 2.5 and 4.9 s, waiting for the update included.
  for said in (text, shown.file.getvalue()):
    assert "one is 1.96x as fast as two (surely" in said
    assert "1.67 ms per token, waiting" in said
    assert "one: Measured over all" in said and "two: Measured over all" in said
  assert "different requests" not in text
  found = tables.comparison(
    {path.name: rows_lib.read(path / "metrics.jsonl") for path in compared}
  )
  first, second = found.tables["Runs"]
  assert (first["overlap"], first["frozen overlap"]) == (0.833, 0.5)
  assert first["overlap gain"] == 0.333
  assert [row["speed over plain"] for row in (first, second)] == ["2.40x", "1.22x"]


def test_comparison_without_a_winner_or_with_other_requests_says_so():
  rows = requests()
  alike = tables.comparison({"a": rows, "b": rows})
  assert alike.headline[0].figure == "Equally fast" and not alike.notes
  without = served(source="x", floor_overlap=None, plain_ms_per_token=None)
  found = tables.comparison({"a": rows, "b": without})
  assert "served different requests" in found.notes[0]
  assert [said.split(":")[0] for said in found.details_notes] == ["a"]
  assert found.tables["Runs"][1]["overlap gain"] is None


def noisy(seed, count, scale=1.0):
  rng = np.random.default_rng(seed)
  return [
    dataclasses.replace(row, decode_ms=20.0 * scale * rng.gamma(9.0, 1 / 9.0))
    for row in served()[:count]
  ]


@pytest.mark.parametrize("count", [4, 16, 120])
def test_equal_runs_have_no_winner(count):
  """99 % intervals; "1.63x" of 16 requests was noise."""
  figures = [
    tables.comparison(
      {"a": noisy(2 * i, count), "b": noisy(2 * i + 1, count)}
    ).headline[0]
    for i in range(100)
  ]
  assert sum("is fastest" in fact.figure for fact in figures) <= 4
  if count == 4:
    assert figures[0].figure == "Too few to say"
    assert "4 requests are too few to say which run is fastest" in figures[0].sentence


def test_headline_of_few_compared_requests_says_so():
  rows = [made_rows.update(wait_ms=100.0), *served()[:4]]
  figures = [fact.figure for fact in tables.summary(rows).headline]
  assert figures[2:] == ["Speed: too few to say", "Learning: too few to say"]
  text = " ".join(fact.sentence for fact in tables.summary(rows).headline)
  assert "1 compared request is too few to say whether it paid" in text


def test_runs_that_cannot_be_compared_are_named(compared, tmp_path):
  logged(tmp_path / "offline", OFFLINE)
  refused = {
    "received offline, which served no requests": [compared[0], tmp_path / "offline"],
    "received 1 runs, expected two or more": compared[:1],
    "one 2 times, expected different runs": [*compared, tmp_path / "two/../one"],
  }
  for message, paths in refused.items():
    with pytest.raises(base.InputError, match=message):
      page.compare(paths, tmp_path / "out")
  assert not (tmp_path / "out").exists()
