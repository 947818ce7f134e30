"""Replays of recorded answers give the figures of real runs."""

import dataclasses
import sys
import types

import jax
import numpy as np
import pytest
import tiny_online
from conftest import ROOT

from osd_jax import corpus, offline, online, pairs, runs
from osd_jax.costs.table import Costs, RoundCosts
from osd_jax.data import examples, streams
from osd_jax.data.batches import EncodedExample, read_corpus
from osd_jax.distillation import schedule
from osd_jax.engine.requests import Request
from osd_jax.engine.server import Server
from osd_jax.main import settings
from osd_tools import chips, replay

sys.path += [str(ROOT / "experiments" / "open_questions"), str(ROOT / "benchmarks")]

import bigger
import frequent
import gkd
import idle_compiled
import mixing
import orders
import recordings
import setting
import stability
import targets
import tuning

from experiments.open_questions import run, utilisation


def answers_of(counts) -> recordings.Recording:
  """A recording whose rows are numbers."""
  topics = np.repeat(np.arange(len(counts)), counts)
  names = tuple("abcdefgh"[: len(counts)])
  return recordings.Recording(tuple(range(len(topics))), topics, names)  # pyright: ignore


@pytest.mark.parametrize("drafted", [1, 3, 7])
def test_a_walk_emits_every_token_once(drafted):
  """Each call emits its accepted tokens and one more, which a rejection replaces."""
  rng = np.random.default_rng(drafted)
  for share in (0.0, 0.3, 0.8, 1.0):
    right = np.broadcast_to(rng.random(40) < share, (drafted, 40))
    calls, rejected = replay.walk(right)
    assert not (rejected & right[0]).any()
    if share == 0:
      assert calls == 40 and rejected.all()
    if share == 1:
      assert calls == -(-40 // (drafted + 1)) and not rejected.any()
    # Tokens between two rejections take one call for every K + 1 of them.
    ends = np.flatnonzero(rejected)
    lengths = np.diff(np.concatenate([[-1], ends, [39] if not rejected[-1] else []]))
    assert calls == sum(-(-int(n) // (drafted + 1)) for n in lengths)


@pytest.mark.parametrize("kind", [*run.KINDS, "gradual", "heavy tailed"])
def test_a_stream_has_no_answer_twice(kind):
  recording = answers_of([40, 40, 40, 40])
  order = orders.order(recording, kind, 12, seed=1)
  assert len(set(order.tolist())) == len(order)
  counts = np.bincount(recording.topics[order], minlength=4)
  if kind == "heavy tailed":
    assert counts[0] > 1.5 * counts[1] > 2 * counts[3]
  else:
    assert counts.tolist() == [12] * 4
  assert (order != orders.order(recording, kind, 12, seed=2)).any()


def test_the_adversary_leaves_a_topic_once_the_draft_has_adapted():
  recording = answers_of([80, 80, 80])

  def served(overlap):
    stream = orders.Adversary(recording, 70, 0)
    for _ in stream:
      stream.overlaps.append(overlap)
    return recording.topics[stream.order]

  assert (np.diff(np.flatnonzero(np.diff(served(0.95)))) == orders.LATEST).all()
  assert np.flatnonzero(np.diff(served(0.5))).tolist() == [orders.LONGEST - 1]


@pytest.mark.parametrize("interval", run.INTERVALS)
def test_every_interval_has_the_same_slices(interval):
  plan = run.Every(interval)
  state, slices = plan.init(), []
  for _ in range(1000):
    state, now = plan.update(state, schedule.Request(0.5, 9, max(run.INTERVALS)))
    slices.append(now)
  assert sum(slices) == 1000 - 1000 % interval
  assert np.count_nonzero(slices) == 1000 // interval


@pytest.mark.parametrize("slices", [0, 8])
def test_a_schedule_that_is_told_of_a_shift_trains_after_it(slices):
  """Overlap is high all the time, so the schedule itself rests."""

  def trained(plan):
    state, found = plan.init(), []
    for _ in range(300):
      state, now = plan.update(state, schedule.Request(0.99, 9, 16))
      found.append(now)
    return np.asarray(found)

  usual = schedule.ScheduleConfig(update_interval=4)
  alone = trained(usual)
  told = trained(run.Told(usual, 16, (200,), slices, 2))
  assert (told[:200] == alone[:200]).all() and not alone[150:].any()
  after = told[200 : 201 + run.AFTER_SHIFT]
  if slices:
    assert after.sum() == slices * (run.AFTER_SHIFT // 2)
  else:
    assert after.any()  # the pause has ended
  assert not told[260:].any()


def test_recovery_is_the_whole_stretch_if_overlap_stays_low():
  low, high = np.full(40, 0.5), np.full(40, 0.9)
  assert run.recovered(low, high) == 40
  assert run.recovered(np.concatenate([low[:20], high[:20]]), high) < 40
  assert run.recovered(high, high) == 5


def test_time_counts_calls_and_updates():
  """Half the calls at 2 ms, and 40 slices at 3 ms."""
  costs = Costs(RoundCosts((2.0,), num_draft_tokens=(7,)), lost_ms=24.0, slices=8)
  same = {"question": "how_often", "stream": "sharp", "seed": 0}
  cells = [
    same | {"system": "floor", "calls": 600, "slices": 0},
    same | {"system": "online", "calls": 300, "slices": 40},
  ]
  found = run.spent(cells, costs)
  assert found["floor"]["sharp"] == [1.0]
  assert found["online"]["sharp"] == [(600 + 120) / 1200]


def test_forgetting_is_the_largest_loss_until_a_topic_comes_back():
  kept = np.array([[0.5, 0.2], [0.5, 0.6], [0.7, 0.6]])
  assert run.forgotten(kept) == 0
  assert run.forgotten(kept - [[0, 0], [0.1, 0], [0, 0]]) == pytest.approx(0.1)
  # A loss before the topic's own stretch is not forgetting.
  assert run.forgotten(kept - [[0, 0.2], [0, 0], [0, 0]]) == 0


def test_parts_of_a_stream_are_merged_in_its_order():
  order, parts = np.array([4, 1, 7, 2]), [np.array([4, 7]), np.array([1, 2])]
  courses = [
    replay.Course(own / 10, tuple(np.ones((1, n), bool) for n in own), 1, 2)
    for own in parts
  ]
  found = run.merged(courses, parts, order)
  assert found.tokens.tolist() == order.tolist() and found.updates == 2
  np.testing.assert_array_equal(found.overlap, order / 10)


@pytest.mark.parametrize("name", tuning.MORE_TOPICS)
def test_a_drawn_topic_has_no_prompt_in_two_splits(name):
  splits = {"train": 3000, "eval": 200, "stream": 400}
  drawn = {split: tuning.drawn(name, split, 5000) for split in splits}
  assert {split: len(rows) for split, rows in drawn.items()} == splits
  assert len({prompt for rows in drawn.values() for prompt, _ in rows}) == 3600
  assert tuning.drawn(name, "stream", 7) == drawn["stream"][:7]


def test_a_tuned_target_keeps_the_draft(tmp_path):
  """By default, a target other than the shipped one has a new draft."""
  files = tuning.with_target(pairs.PairConfig(), tmp_path / "tuned.safetensors")
  assert files.named("draft") == pairs.PairConfig().named("draft") != "attached"
  assert files.sibling_draft and files.target.endswith("tuned.safetensors")


def test_a_task_of_small_letters_has_the_shipped_prompts(tmp_path):
  task = tuning.in_small_letters(tmp_path, "sql", "eval")
  own = list(examples.texts(task))
  shipped = examples.topic_examples("sql", "eval", 64)
  assert [row.prompt for row in own] == [row.prompt for row in shipped]
  assert own[0].reference == shipped[0].reference.lower() != shipped[0].reference


def test_recovery_counts_requests_until_the_former_overlap_is_near():
  low, high = np.full(30, 0.5), np.full(30, 0.9)
  assert targets.recovered(high, 0.9) == 0
  assert targets.recovered(low, 0.9) is None
  # 23 of the last 25 requests are good: .868 of overlap, more than .95 of .9.
  assert targets.recovered(np.concatenate([low, high]), 0.9) == 30 + 23


def test_templates_do_not_count_what_the_prompt_says():
  def row(prompt, answer):
    target = np.array([answer])
    return types.SimpleNamespace(
      source=np.array([prompt]), target=target, mask=target > 0
    )

  rows = [row([7, n], [3, n, 4, 0]) for n in (10, 11, 12)]
  assert stability.templates(rows) == {"templates": 1.0, "template_entropy": 0.0}
  rows.append(row([7, 10], [3, 11, 4, 5]))
  found = stability.templates(rows)
  assert found["templates"] == 2
  assert found["template_entropy"] == pytest.approx(0.8113, abs=1e-4)


def test_a_measure_that_predicts_the_gain_has_no_error():
  """Twice a measure is the gain; the others are constant, so only the mean is left."""
  cells = [
    dict.fromkeys(stability.MEASURES, 0.5)
    | {"stream": f"{name}, every 5", "gain_late": 2 * x, "template_entropy": x}
    for name, x in zip("abcd", (0.1, 0.3, 0.2, 0.6), strict=True)
  ]
  off = stability.errors(cells)
  np.testing.assert_allclose(off["template_entropy"], 0, atol=1e-9)
  # The mean of the other three gains.
  assert off["the mean"][0] == pytest.approx(2 * (1.1 / 3) - 0.2)
  assert off["gain_at_end, as it is"][3] == pytest.approx(1.2 - 0.5)
  # Streams of another pair are predicted by all of these, whatever their topics.
  other = cells[0] | {"pair": "another", "template_entropy": 3.0, "gain_late": 5.0}
  off = stability.errors(cells, [other])
  assert off["template_entropy"] == [pytest.approx(1.0)]
  assert off["the mean"] == [pytest.approx(5.0 - 0.6)]
  # .5 is more than the first and the third gain, .2 and .4; and not by .4 than these.
  assert stability.too_high(cells, "gain_at_end", by=0.05) == 2
  assert stability.too_high(cells, "gain_at_end", by=0.4) == 0


def test_streams_are_told_apart_by_pair_and_new_topics():
  cells = [
    {"pair": pair, "new_topics": new}
    for pair in ("demo", "eight topics")
    for new in (0.0, 0.3, 0.0)
  ]
  found = stability.parts(cells)
  assert {name: len(group) for name, group in found.items()} == {
    "demo": 2,
    "demo, new topics come": 1,
    "eight topics": 2,
    "eight topics, new topics come": 1,
  }


def test_a_cache_is_judged_where_the_draft_is_wrong():
  course = lambda *right: replay.Course(np.zeros(1), (np.array([right]),))
  draft, cache = course(True, False, False, True), course(True, True, False, False)
  assert stability.where_wrong(draft, cache) == 0.5
  assert stability.where_wrong(course(True), course(False)) == 0.0


def test_recall_and_precision_of_frequent_tokens():
  right = np.array([5] * 6 + [7] * 3 + [8])
  named = np.array([5] * 3 + [7] * 3 + [7, 7, 5] + [8])
  found = frequent.figures(right, named, count=1)
  assert found["share"] == 0.6 and found["recall"] == 0.5
  assert found["precision"] == 0.75 and found["recall_of_others"] == 0.75
  perfect = frequent.figures(right, right, count=1)
  assert perfect["recall"] == perfect["precision"] == perfect["recall_of_others"] == 1


def test_costs_of_short_models_are_continued_to_all_layers():
  """A layer adds 10 bytes, 4 operations and 3 kernels to the rest of a model."""
  cost = lambda layers: idle_compiled.Cost(
    100.0 + 10 * layers, 50.0 + 4 * layers, 0.0, 2.0 + 3 * layers
  )
  assert cost(1).deeper(cost(2), 32) == cost(32)


@pytest.mark.parametrize(("flops", "idle"), [(0, 1.0), (10, 0.5), (20, 0.0), (40, 0.0)])
def test_a_program_is_idle_while_it_reads(flops, idle):
  """Reading takes 1 second, in which the chip could do 20 operations."""
  chip = chips.Chip(memory=1e9, bandwidth=100, flops=20, link=1e9)
  cost = idle_compiled.Cost(read=100, flops=flops, moved=0, kernels=5)
  assert idle_compiled.share(cost, chip) == pytest.approx(idle)


@pytest.fixture(scope="module", params=["prompt", "tokens"])
def config(request, tmp_path_factory):
  """A run of one row whose draft is served as it is trained."""
  folder = tmp_path_factory.mktemp("pair")
  pair = tiny_online.attached(tiny_online.save_lively_pair(folder))
  shape = dataclasses.replace(pair.attached, reads=request.param)
  made = tiny_online.config(pair, folder / "run", rows=1)
  served = dataclasses.replace(pair, attached=shape)
  return dataclasses.replace(made, pair=pairs.load_pair(served))


@pytest.fixture(scope="module")
def recording(config):
  stream = streams.make(config.stream, config.pair.vocabulary)
  asked = [
    EncodedExample(stream[i].tokens, stream[i].task_id, np.zeros(0, np.int32))
    for i in range(len(stream))
  ]
  names = [task.label for task in config.stream.tasks]
  return recordings.record(config.pair, asked, names, config.decoding)


@pytest.mark.slow
def test_a_replay_repeats_a_run(config, recording):
  """Overlaps, target calls and updates are those of the run on the same stream."""
  directory = online.run(config).path
  rows = list(runs.read(directory / "metrics.jsonl"))
  requests = [row for row in rows if row["kind"] == "request"]
  requests.sort(key=lambda row: row["index"])
  examples = read_corpus(config.warm_start, config.pair.vocabulary)
  seen = corpus.reference_rows(config.pair, examples, config.decoding)
  drafted = config.decoding.num_draft_tokens
  course = replay.learned(
    config.pair, recording.rows, config.learning, drafted, list(seen)
  )
  np.testing.assert_allclose(
    course.overlap, [row["overlap"] for row in requests], atol=2e-4
  )
  assert course.calls(drafted).tolist() == [row["target_calls"] for row in requests]
  assert course.tokens.tolist() == [row["output_tokens"] for row in requests]
  assert course.updates + 1 >= sum(row["kind"] == "update" for row in rows) > 2
  # Negative control: a draft that does not learn has other overlaps.
  floor = replay.frozen(
    config.pair.draft, config.pair.draft_params, recording.rows, drafted
  )
  assert np.abs(floor.overlap - course.overlap).max() > 0.01


@pytest.mark.slow
def test_a_replayed_cache_has_the_calls_of_a_served_one(tmp_path):
  """The second half of the prompts repeats the first, so the cache is right there."""
  files = tiny_online.save_lively_pair(tmp_path)
  pair = pairs.load_pair(dataclasses.replace(files, draft="cache"))
  config = tiny_online.config(files, tmp_path / "run", rows=1)
  decoding = dataclasses.replace(config.decoding, cache_tokens=1024)
  stream = streams.make(config.stream, pair.vocabulary)
  asked = [Request(stream[place % 5].tokens) for place in range(10)]
  with Server(pair, decoding) as server:
    served = server.run(asked)
  answers = [jax.device_get(done.batch) for done in served]
  course = replay.cache(pair.target, answers, decoding.num_draft_tokens, 1024)
  calls = course.calls(decoding.num_draft_tokens)
  assert calls.tolist() == [done.target_calls for done in served]
  assert calls[5:].sum() < calls[:5].sum()


@pytest.fixture
def tiny(config, recording, tmp_path) -> setting.Setting:
  """What the questions share, with the tiny pair."""
  costs = Costs(RoundCosts((2.0,), num_draft_tokens=(3,)), lost_ms=24.0, slices=8)
  return setting.Setting(
    name="demo",
    pair=config.pair,
    files=pairs.PairConfig(),
    decoding=config.decoding,
    answers=recording,
    held_out=recording,
    seen=[],
    learning=config.learning,
    costs=costs,
    drafted=3,
    ceiling=None,
    out=tmp_path,
    per_topic=6,
    seeds=1,
  )


@pytest.mark.slow
def test_a_replaced_target_is_replayed_with_old_records_and_without(tiny):
  pair, answers = tiny.pair, tiny.answers
  moved = jax.tree.map(lambda leaf: leaf * 1.1, pair.target_params)
  new = dataclasses.replace(pair, target_params=moved)
  prompts = [targets.prompt_of(row, new, 0) for row in answers.rows]
  after = recordings.record(new, prompts, answers.names, tiny.decoding)
  after = dataclasses.replace(after, topics=answers.topics)
  order = tiny.order("mixture", 0)
  first = answers.answers(order[:12])
  again = targets.scored_again(tiny, new, first)
  same = targets.scored_again(tiny, pair, first)
  tails = lambda rows: np.concatenate([row.records.tail for row in rows])[: len(first)]
  np.testing.assert_allclose(tails(same), tails(first), atol=2e-3)
  assert np.abs(tails(again) - tails(first)).max() > 0.01  # another target's
  cells = {
    key["system"]: compute()
    for key, compute in targets.replaced(
      tiny, new, after, "mixture", 0, (order[:12], order[12:])
    )
  }
  assert len(cells) == 6 and {cell["requests"] for cell in cells.values()} == {12}
  drafts = {name: cell for name, cell in cells.items() if "cache" not in name}
  assert len({cell["before"] for cell in drafts.values()}) == 1
  assert (
    drafts["does not learn"]["slices"]
    == 0
    < drafts["learns, old records kept"]["slices"]
  )
  # Records matter. Of the old answers, kept and scored again differ by less than .0001.
  del drafts["learns, old records scored again"]
  assert len({cell["after"] for cell in drafts.values()}) == 3


def test_a_draft_goes_on_with_the_new_target(config):
  """What was trained moves; what belongs to the target does not."""
  pair = config.pair
  moved = jax.tree.map(lambda leaf: leaf + 1, pair.draft_params)
  new = dataclasses.replace(pair, draft_params=moved)
  trained, frozen = pair.draft.split(
    targets.with_draft(new, pair, pair.draft_params).draft_params
  )
  same = lambda one, other: jax.tree.map(np.testing.assert_array_equal, one, other)
  same(trained, pair.draft.split(pair.draft_params)[0])
  same(frozen, pair.draft.split(moved)[1])


@pytest.mark.slow
def test_a_log_is_measured_without_what_comes_later(tiny, monkeypatch):
  """The log has one topic, the requests after it also have another."""
  names = tiny.answers.names[:2]
  monkeypatch.setattr(stability, "LOG", 4)
  monkeypatch.setattr(stability, "LATER", 6)
  slow, quick = (stability.measures(tiny, names, period, 0) for period in (4, 1))
  assert slow["changes"] == 0 < quick["changes"] == 1
  assert slow["new_topics"] == 0.6667 and quick["new_topics"] == 0
  assert set(stability.MEASURES) < set(slow)
  # The same log with other requests after it.
  monkeypatch.setattr(stability, "LATER", 4)
  shorter = stability.measures(tiny, names, 4, 0)
  later = {"gain_late", "floor_late", "new_topics"}
  for name in set(slow) - later:
    assert shorter[name] == slow[name], name
  assert shorter["new_topics"] == 1 != slow["new_topics"]


def test_every_divergence_has_all_texts_and_positions(tiny):
  keys = [(key["stream"], key["system"]) for key, _ in gkd.gkd(tiny)]
  assert len(keys) == len(set(keys))
  for stream in (
    "offline, mix_token",
    "online, all positions",
    "online, error positions",
  ):
    assert {name for one, name in keys if one == stream} >= set(gkd.DIVERGENCES)


@pytest.mark.parametrize("share", mixing.SHARES)
def test_every_mix_has_as_many_texts(share):
  made, _ = settings.load(
    offline.OfflineConfig,
    ["experiments/demo_ceiling.gin"],
    [f"GENERATED_TRAIN_ROWS={mixing.SHIPPED}", *mixing.bindings(60, share, 1)],
  )
  counts = dict(
    zip([task.label for task in made.corpus.tasks], made.corpus.limits(), strict=True)
  )
  assert sum(counts.values()) == 60 and 0 not in counts.values()
  assert counts.get("sql", 0) == 60 * share


@pytest.fixture(scope="module")
def shipped(tmp_path_factory) -> setting.Setting:
  """What the questions share, with the demo's pair and two answers to each topic."""
  made, _ = settings.load(online.OnlineConfig, ["runs/demo.gin"], [])
  texts, _ = settings.load(offline.OfflineConfig, ["experiments/demo_ceiling.gin"], [])
  prompts = dataclasses.replace(texts.evaluation, limit_rows=2)
  pair = pairs.load_pair(made.pair)
  names = [task.label for task in prompts.tasks]
  asked = read_corpus(prompts, pair.vocabulary)
  decoding = dataclasses.replace(made.decoding, source_lengths=(40,))
  answers = recordings.record(pair, asked, names, decoding)
  return setting.Setting(
    name="demo",
    pair=pair,
    files=made.pair,
    decoding=decoding,
    answers=answers,
    held_out=answers,
    seen=[],
    learning=made.learning,
    costs=Costs(RoundCosts((2.0,), num_draft_tokens=(3,)), lost_ms=24.0, slices=8),
    drafted=7,
    ceiling=None,
    out=tmp_path_factory.mktemp("questions"),
    per_topic=2,
    seeds=2,
  )


@pytest.mark.slow
def test_a_draft_is_distilled_on_a_mix(shipped, monkeypatch):
  monkeypatch.setattr(mixing, "STEPS", 8)
  cell = mixing.mixed(shipped, 4, 0.5, 0)
  before = setting.held_out(shipped, shipped.pair.draft_params)
  assert list(cell["by_topic"]) == list(shipped.held_out.names)
  assert cell["overlap"] != pytest.approx(np.mean(before), abs=1e-3)
  keys = [key for key, _ in mixing.mixing(shipped)]
  assert len({tuple(key.values()) for key in keys}) == len(keys) == 20


@pytest.mark.slow
def test_drafts_of_all_sizes_have_equal_compute(shipped, monkeypatch):
  monkeypatch.setattr(bigger, "STEPS", 4)
  monkeypatch.setattr(bigger, "TEXTS", 1)
  cells = {
    name: bigger.of_size(shipped, bigger.SIZES[name], True, 0)
    for name in ("narrow", "as shipped")
  }
  assert cells["as shipped"]["steps"] == 4 < cells["narrow"]["steps"]
  assert cells["as shipped"]["products"] == 1
  for cell in cells.values():
    assert cell["steps"] * cell["products"] == pytest.approx(4, abs=0.5)
    assert cell["requests"] == 8
  by_steps = bigger.of_size(shipped, bigger.SIZES["narrow"], False, 0)
  assert by_steps["steps"] == 4
  assert len({key["system"] for key, _ in bigger.bigger(shipped)}) == 4


def test_idle_arithmetic_is_what_a_call_does_not_use(config, monkeypatch):
  """A call that takes twice as long as its products need is half idle."""
  pair, most = config.pair, 1e9
  needed = 2 * utilisation.multiplied(pair) * 3 / most * 1e3  # ms of 3 rows, 1 token

  def steps(decoding, models, source):
    assert source.shape[0] == decoding.rows == 3
    return {"plain_step_ms": 2 * needed, "verify_ms": 8 * needed}

  monkeypatch.setattr(utilisation.measurement, "measure_steps", steps)
  found = utilisation.measured(pair, 3, 7, most)
  assert (found["idle_plain"], found["idle_verify"]) == (0.5, 0.0)
  sizes = [leaf.size for leaf in jax.tree.leaves(pair.target_params) if leaf.ndim > 1]
  assert 0 < utilisation.multiplied(pair) < sum(sizes)  # without the encoder


def test_a_chip_is_full_where_arithmetic_takes_as_long_as_reading():
  rows = {row["chip"]: row for row in utilisation.on_chips(7e9, 160e6)}
  assert rows["h100"]["full_at"] == round(9.9e14 / 3.35e12)
  twice = {row["chip"]: row for row in utilisation.on_chips(14e9, 160e6)}
  assert twice["v5e"]["steps_per_call"] == pytest.approx(
    2 * rows["v5e"]["steps_per_call"], rel=0.01
  )


def test_new_sets_without_their_pair_are_refused(monkeypatch, capsys):
  """Otherwise the demo's pair would answer in their place."""
  monkeypatch.setattr("sys.argv", ["run.py", "how_often", "--new_sets"])
  with pytest.raises(SystemExit):
    run.main()
  assert "--new_sets: expected --qwen FOLDER too" in capsys.readouterr().err
