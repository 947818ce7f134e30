"""Whole online runs of a tiny pair: complete, exact, and robust to broken updates.

`test_resume` covers interrupted runs, and thereby that a run repeats bit for bit.
"""

import dataclasses
import json
import shutil
import threading
import time

import jax
import numpy as np
import pytest
import tiny_online
from compilations import Compilations

from osd_jax import background, base, online, runs
from osd_jax.distillation import gate, update
from osd_jax.distillation import learner as learner_lib
from osd_jax.loop import meter
from osd_jax.loop import rows as rows_lib
from osd_jax.models import weights
from osd_tools import metrics_page


@dataclasses.dataclass
class Ran:
  """A finished run: folder, rows by kind, outputs by query, number of compilations."""

  path: object
  requests: list
  updates: list
  summary: list
  outputs: dict
  compiled: list

  def draft(self):
    return weights.load(self.path / "draft.safetensors").params


def run(config):
  """Runs a config; collects outputs and counts compilations before measurements."""
  outputs, compiled = {}, []
  real = meter.Meter.row

  def measure(self, done, query, *arguments):
    outputs[query.index] = done.tokens.tolist()
    compiled.append(watched.count)
    return real(self, done, query, *arguments)

  with Compilations() as watched, pytest.MonkeyPatch.context() as patch:
    patch.setattr(meter.Meter, "row", measure)
    path = online.run(config).path
  compiled.append(watched.count)
  rows = list(runs.read(path / "metrics.jsonl"))
  kinds = [
    [row for row in rows if row["kind"] == kind]
    for kind in ("request", "update", "summary")
  ]
  return Ran(path, *kinds, outputs, compiled)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
  return tiny_online.save_lively_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def make(pair, tmp_path_factory):
  """Runs a changed config in a new folder."""

  def made(rows=2, **changes):
    folder = tmp_path_factory.mktemp("run")
    return run(tiny_online.config(pair, folder / "run", rows, **changes))

  return made


@pytest.fixture(scope="module")
def learned(make):
  return make()


def same_bits(one, other):
  leaves = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
  return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in leaves)


def test_run_writes_all_results(learned):
  count = tiny_online.REQUESTS
  assert sorted(row["query"] for row in learned.requests) == list(range(count))
  assert [row["index"] for row in learned.requests] == list(range(count))
  for row in learned.requests:
    assert "nonfinite" not in row
    assert 0 <= row["overlap"] <= row["overlap_upper"] <= 1 + 1e-5
    assert len(learned.outputs[row["query"]]) == row["output_tokens"]
  assert len(learned.summary) == 1
  assert len({tuple(text) for text in learned.outputs.values()}) > count // 4
  assert sum(row["accepted"] for row in learned.requests) > 0
  for name in ("report.html", "draft.safetensors", "provenance.json"):
    assert (learned.path / name).stat().st_size > 0
  assert "not finished" not in (learned.path / "report.html").read_text()
  provenance = json.loads((learned.path / "provenance.json").read_text())
  assert provenance
  kept = sorted(path.name for path in (learned.path / "drafts").iterdir())
  # The draft is stored at each change of topic, which is every six requests.
  assert [name[:7] for name in kept] == ["000006_", "000012_", "000018_"]


def test_every_field_is_logged_when_the_reference_says(learned):
  fields = metrics_page.fields(rows_lib.Request)
  always = {name for name, (_, when, _) in fields.items() if not when}
  for row in learned.requests:
    assert always <= row.keys() - {"kind"} <= fields.keys()
  logged = set().union(*learned.requests) - {"kind"}
  # This run learns, compares, and measures the floor draft, so all other fields occur.
  logged |= {"ahead_since"}  # which is missing until learning is ahead
  assert logged == set(fields)


def test_updates_are_swapped_in_after_the_interval(learned):
  assert len(learned.updates) >= 3
  *promised, last = learned.updates
  interval = tiny_online.INTERVAL
  assert all(row["finished"] - row["launched"] == interval for row in promised)
  assert 0 <= last["finished"] - last["launched"] <= interval
  assert [row["version"] for row in learned.updates] == list(
    range(1, len(learned.updates) + 1)
  )
  assert not any(row["skipped"] for row in learned.updates)
  taken = {row["finished"]: row["version"] for row in learned.updates}
  version = 0
  for row in learned.requests:  # a request is measured before the update after it
    assert row["draft_version"] == version
    version = taken.get(row["index"] + 1, version)


def test_floor_draft_is_the_draft_of_version_0(learned):
  first = [row for row in learned.requests if row["draft_version"] == 0]
  later = [row for row in learned.requests if row["draft_version"] > 0]
  assert first and all(row["overlap"] == row["floor_overlap"] for row in first)
  assert all(row["acceptance_rate"] == row["floor_acceptance_rate"] for row in first)
  assert later and all(row["overlap"] != row["floor_overlap"] for row in later)


def test_compared_outputs_equal_plain_decoding(learned):
  compared = [row for row in learned.requests if "certificate" in row]
  # One request of each block of 8 is drawn at random.
  assert [row["index"] // 8 for row in compared] == [0, 1, 2]
  for row in compared:
    assert row["certificate"]["equal"] == row["certificate"]["outputs"] == 1
    assert row["plain_ms_per_token"] > 0 and row["floor_ms_per_token"] > 0
    assert row["floor_tokens_per_target_call"] >= 1


def test_nothing_compiles_after_the_first_updates(learned):
  before, after = learned.compiled[12], learned.compiled[-1]
  assert before > 0 and after == before


HASTY = gate.GateConfig(error_rate=0.99)


@pytest.mark.usefixtures("hasty_gate")
def test_gate_decides_which_draft_serves_and_changes_no_output(learned, make):
  gated = make(gate=HASTY)
  assert gated.outputs == learned.outputs
  assert gated.compiled[12] == gated.compiled[-1]
  rows = list(runs.read(gated.path / "metrics.jsonl"))
  decisions = [row for row in rows if row["kind"] == "gate"]
  first = decisions[0]
  assert first["name"] == "promoted" and first["text"].startswith("gate: trained")
  versions = [row["draft_version"] for row in gated.requests]
  assert not any(versions[: first["finished"]]) and any(versions)
  scored = [row for row in gated.requests if row.get("rival_overlap") is not None]
  assert len(scored) > 3 and all(row["gate_ms"] > 0 for row in scored)
  fields = metrics_page.fields(rows_lib.Request).keys()
  assert set().union(*gated.requests) - {"kind"} >= fields - {"ahead_since"}
  page = (gated.path / "report.html").read_text()
  assert f"Gate: trained drafts served from request {first['finished']}" in page


def test_frozen_draft_gives_the_same_outputs(learned, make, pair):
  frozen = make(learn=False)
  assert frozen.outputs == learned.outputs
  assert not frozen.updates
  assert all(row["overlap"] == row["floor_overlap"] for row in frozen.requests)
  assert same_bits(frozen.draft(), weights.load(pair.draft).params)
  assert not same_bits(learned.draft(), weights.load(pair.draft).params)


TWO_CORES = pytest.mark.skipif(background.cores() < 2, reason="needs a second core")


@TWO_CORES
@pytest.mark.usefixtures("hasty_gate")
def test_free_updates_process_answers_in_the_background(learned, make):
  """Compared requests are the exception, because plain and floor decoding are timed."""
  free = make(free_updates=True, gate=HASTY)
  assert free.outputs == learned.outputs
  for row in free.requests:
    spent, beside = row["metering_ms"], row["metering_beside_ms"]
    alone = "plain_ms_per_token" in row
    assert (spent > 0) == alone and (beside > 0) == (not alone)
    assert alone or row["gate_ms"] == 0
  assert free.updates and any(row["draft_version"] for row in free.requests)
  assert all(row["metering_ms"] > row["metering_beside_ms"] for row in learned.requests)
  assert [row["index"] for row in free.requests] == list(range(tiny_online.REQUESTS))
  assert all(
    row["certificate"]["equal"] for row in free.requests if "certificate" in row
  )


@TWO_CORES
def test_interrupted_background_run_continues(learned, pair, tmp_path, monkeypatch):
  real, release = meter.Meter.row, threading.Event()

  def slow(self, done, query, index, *others):
    if index == 7:  # still being processed when the run is interrupted
      release.wait()
    return real(self, done, query, index, *others)

  config = tiny_online.config(
    pair, tmp_path / "run", free_updates=True, compare_every=0
  )
  with runs.RunDirectory.start(config.run_directory, config) as directory:
    loop = online.begin(config, directory)
    monkeypatch.setattr(meter.Meter, "row", slow)
    while loop._answered < 8:
      loop.step()
    while loop.finished < 7:
      time.sleep(0.001)
    assert max(loop._checkpointer.steps()) < loop.finished < loop._answered
    threading.Timer(0.5, release.set).start()  # the checkpoint waits for this
    loop.checkpoint()
    loop.wait()
    loop.server.close()
    monkeypatch.undo()
  ended = run(config)
  assert sorted(row["query"] for row in ended.requests) == list(
    range(tiny_online.REQUESTS)
  )
  assert all(learned.outputs[place] == out for place, out in ended.outputs.items())
  assert len(ended.outputs) < tiny_online.REQUESTS  # the others were answered before


@TWO_CORES
def test_error_in_the_background_ends_the_run(make, monkeypatch):
  real = meter.Meter._agreement

  def spoilt(self, *arguments):
    return real(self, *arguments) | {"overlap": float("nan")}

  monkeypatch.setattr(meter.Meter, "_agreement", spoilt)
  with pytest.raises(base.InputError, match="scores that are not finite"):
    make(free_updates=True, compare_every=0)


def test_waiting_for_a_slow_update_changes_no_result(learned, make, monkeypatch):
  real_slice, learner = update.take_slice, learner_lib.UpdateRunner
  real_pace, asked = learner.wait_if_behind, []

  def slow(*arguments):
    time.sleep(0.5)  # longer than serving takes between updates
    return real_slice(*arguments)

  def wait_if_behind(self, finished, in_flight):
    before = self._update and self._update.asked
    real_pace(self, finished, in_flight)
    asked.append(self._update.asked - before if self._update else 0)

  monkeypatch.setattr(update, "take_slice", slow)
  monkeypatch.setattr(learner, "wait_if_behind", wait_if_behind)
  late = make(floor_metering=False, compare_every=0)
  assert set(asked) == {0, 1}  # at most one slice per step, and only if one is due
  assert late.outputs == learned.outputs
  assert same_bits(late.draft(), learned.draft())


def spoil_draw(monkeypatch, number):
  """Puts NaN into the rows of one update; warm-up draws the first rows."""
  real, launches = update.draw_update, []

  def draw(*arguments):
    batches = real(*arguments)
    launches.append(len(launches))
    if len(launches) != number:
      return batches
    return tuple(
      batch.replace(
        records=batch.records.replace(log_probs=batch.records.log_probs * np.nan)
      )
      for batch in batches
    )

  monkeypatch.setattr(update, "draw_update", draw)


def test_broken_update_is_skipped_and_serving_continues(learned, make, monkeypatch):
  spoil_draw(monkeypatch, 3)  # the second update
  broken = make()
  assert broken.outputs == learned.outputs
  skipped = [row["skipped"] for row in broken.updates]
  assert skipped[1] == 2  # slices per update
  assert not any(skipped[:1] + skipped[2:])
  versions = [row["version"] for row in broken.updates]
  assert versions[:3] == [1, 1, 2]
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(broken.draft()))


def test_run_ends_without_saving_a_draft_that_overflows(make, monkeypatch):
  """The last update of a run may be the one that breaks the draft."""
  real = learner_lib.Learner.finish

  def finish(learner):
    outcome = real(learner)
    broken = jax.tree.map(lambda leaf: leaf * np.inf, learner.serving)
    learner._drafts |= dict.fromkeys(("newest", "proven"), broken)
    return outcome

  monkeypatch.setattr(learner_lib.Learner, "finish", finish)
  ran = make(floor_metering=False, compare_every=0)
  assert len(ran.summary) == 1 and not (ran.path / "draft.safetensors").exists()
  assert "the draft is not saved" in (ran.path / "report.html").read_text()


def test_served_draft_is_the_average(pair, tmp_path):
  directory = runs.RunDirectory.start(tmp_path / "run")
  loop = online.begin(tiny_online.config(pair, directory.path), directory)
  while not loop.server.engine.draft_version:
    loop.step()
  state = loop.server.learner.state()[0]["learner"]
  assert same_bits(loop.server.draft_params, state.ema)
  assert not same_bits(loop.server.draft_params, state.params)
  loop.close(0.0)


def test_continued_run_serves_the_saved_draft_and_shortlist(
  pair, tmp_path, monkeypatch
):
  """The newest average differs, because a skipped update changes it without a swap."""
  spoil_draw(monkeypatch, 3)  # the second update
  directory = runs.RunDirectory.start(tmp_path / "run")
  config = tiny_online.config(pair, directory.path, checkpoint_every=1)
  loop = online.begin(config, directory)
  while not loop.server.learner.state()[0]["learner"].skipped:
    loop.step()
  loop.wait()
  count, serving = loop.finished, loop.server.draft_params
  served, shortlist = loop.server.engine.served.draft, loop.server.engine.shortlist
  assert not same_bits(serving, loop.server.learner.state()[0]["learner"].served)
  assert not np.array_equal(shortlist, np.arange(len(shortlist)))
  loop.close(0.0)
  again = online.begin(config, directory)
  assert again.finished == count and same_bits(again.server.draft_params, serving)
  assert same_bits(again.server.engine.served.draft, served)
  np.testing.assert_array_equal(again.server.engine.shortlist, shortlist)
  again.close(0.0)


def files(folder):
  return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


def test_finished_run_is_left_unchanged(pair, learned, monkeypatch):
  monkeypatch.setattr(online, "begin", None)  # building a loop would fail
  config = tiny_online.config(pair, learned.path)
  before = files(learned.path)
  assert online.run(config).path == learned.path
  with pytest.raises(
    ValueError, match=r"OnlineConfig\.learn: stored True, given False"
  ):
    online.run(dataclasses.replace(config, learn=False))
  after = files(learned.path)
  assert {**after, ".lock": b""} == {**before, ".lock": b""}


def test_missing_report_of_a_finished_run_is_written(pair, learned, tmp_path):
  """A run may be killed between its end and its report."""
  shutil.copytree(learned.path, tmp_path / "run")
  page = tmp_path / "run" / "report.html"
  page.unlink()
  assert online.run(tiny_online.config(pair, tmp_path / "run")).exact
  assert "not finished" not in page.read_text() and "equal plain" in page.read_text()
