"""The learner and its runners: updates are due on time and equal direct updates."""

import json
import math
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from distillation import rows

from osd_jax import base, testing
from osd_jax.costs.table import Costs, RoundCosts
from osd_jax.decoding import records
from osd_jax.distillation import (
  buffer,
  gate,
  learner,
  losses,
  optimizers,
  schedule,
  update,
)

SOURCE, VOCAB, LENGTH, KEPT, INTERVAL = 5, 8, 6, 4, 3
SLICES = 8  # slices per update of a learner from `learner_of`
MODEL = testing.tabular_model(VOCAB)
PLAIN = optimizers.OptimizerConfig(learning_rate=1e-3, warmup_steps=0)
WHOLE = losses.LossConfig("forward_kl", num_positions=0, num_tokens=0)
CONFIG = update.UpdateConfig(
  optimizer=optimizers.OptimizerConfig(learning_rate=0.05, warmup_steps=0),
  loss=WHOLE,
  steps_per_update=2,
  num_replay=4,
  ema_decay=0.0,
)


def params():
  return jnp.asarray(testing.random_table(VOCAB, 1)).at[:, :, 1].set(-3.0)


def assert_same_bits(found, wanted):
  jax.tree.map(np.testing.assert_array_equal, found, wanted)


def row(seed):
  """Returns a finished request with random records."""
  rng = np.random.default_rng(seed)
  records = rows.records_of(rng.normal(0, 2, (1, LENGTH, VOCAB)), KEPT)
  source = rng.integers(2, VOCAB, (1, SOURCE))
  return rows.batch_of(records, source, rng.integers(2, VOCAB, (1, LENGTH)))


@pytest.fixture
def learner_of():
  """Returns a function that makes learners; they are closed after the test."""
  learners = []

  def make(when=None, ema_decay=0.0, gate=None, **changes):
    always = {"update_interval": INTERVAL, "much_to_gain": 0.0}
    config = learner.LearningConfig(
      buffer=buffer.BufferConfig(capacity=16),
      update=update.UpdateConfig(
        optimizer=PLAIN,
        loss=WHOLE,
        steps_per_update=SLICES,
        num_new=2,
        num_replay=2,
        ema_decay=ema_decay,
      ),
      schedule=when or schedule.ScheduleConfig(**always | changes),
      gate=gate,
    )
    learners.append(learner.Learner(MODEL, params(), config, SOURCE, LENGTH, KEPT))
    return learners[-1]

  yield make
  for one in learners:
    one.runner.close()


def feed(one, overlaps):
  """Observes requests with these overlaps; returns the figures of all updates."""
  outcomes = [one.observe(row(one.finished), overlap) for overlap in overlaps]
  outcomes.append(one.finish())
  return [outcome.figures() for outcome in outcomes if outcome is not None]


def test_new_rows_of_an_update_arrived_after_the_last_launch(learner_of):
  one = learner_of()
  for _ in range(2 * INTERVAL):  # the second update is launched with the last request
    one.observe(row(one.finished), 0.5)
  pending = one.state()[0]["pending"]
  new = np.concatenate([batch.source[:2] for batch in pending])
  arrived = [row(index).source[0] for index in range(INTERVAL, 2 * INTERVAL)]
  assert len(new) == 2 * SLICES
  assert all(any(np.array_equal(x, y) for y in arrived) for x in new)


def test_no_update_begins_before_it_is_compiled(learner_of):
  one, release = learner_of(), threading.Event()
  one.runner.submit(release.wait)
  one.warm_up(in_background=True)
  assert not feed(one, [0.5] * INTERVAL)
  release.set()
  one.runner.submit(int).result()  # after compiling
  assert feed(one, [0.5] * INTERVAL)


def restored(state, make):
  """Makes a learner and restores `state`; checks the declared structure."""
  arrays, host = state
  one = make()
  shapes = one.structure(host)
  jax.tree.map(lambda a, b: np.testing.assert_equal(a.shape, b.shape), arrays, shapes)
  one.restore(jax.tree.map(jnp.array, arrays), host)
  return one


@pytest.mark.parametrize("overlap", [0.2, 0.8])
def test_restored_update_has_the_same_number_of_slices(learner_of, overlap):
  make = lambda: learner_of(much_to_gain=0.4)
  whole, interrupted = make(), make()
  for one in (whole, interrupted):
    for _ in range(INTERVAL):
      assert one.observe(row(one.finished), overlap) is None
  state = interrupted.state()
  assert len(state[0]["pending"]) == (SLICES if overlap < 0.5 else SLICES // 2)
  continued = restored(state, make)
  rest = [overlap] * (INTERVAL + 1)
  assert feed(continued, rest)[0]["loss"] == feed(whole, rest)[0]["loss"]
  assert_same_bits(continued.serving, whole.serving)


def test_restored_learner_serves_the_same_parameters(learner_of):
  """With a moving average, the served parameters differ from the newest ones."""
  make = lambda: learner_of(ema_decay=0.5)
  one = make()
  feed(one, [0.5] * INTERVAL)
  again = restored(one.state(), make)
  assert_same_bits(again.serving, one.serving)
  newest = one.state()[0]["learner"].params
  assert not np.array_equal(again.serving, newest)
  assert not np.array_equal(again.serving, params())


def judge(one, rival, requests, serving=0.5):
  """Observes requests on which the gate's rival has this overlap, up to a decision."""
  for _ in range(requests):
    overlaps = {"rival": rival, "floor": 0.1}
    rivals = {name: overlaps[name] for name in one.rivals}
    one.observe(row(one.finished), serving, rivals=rivals)
    if one.decision is not None:
      return


def test_gate_serves_the_first_draft_until_a_trained_one_is_better(learner_of):
  one = learner_of(gate=gate.GateConfig())
  judge(one, 0.4, 4 * INTERVAL)
  assert one.gate.newest >= 2 and one.version == 0
  assert_same_bits(one.serving, params())
  judge(one, 0.9, 40)
  assert one.version == one.gate.newest > 2
  assert_same_bits(one.serving, one.runner.learner.served)
  # The draft that was promoted last is better than the newest one.
  proven, version = one.serving, one.version
  judge(one, 0.9, 30, serving=0.2)
  assert one.decision.name == "taken_back"
  assert one.version == version < one.gate.newest
  assert_same_bits(one.serving, proven)


def test_every_new_draft_serves_by_default_until_it_is_shown_to_be_worse(learner_of):
  one = learner_of()
  judge(one, 0.0, 4 * INTERVAL)
  assert one.version >= 2 and one.decision is None
  assert_same_bits(one.serving, one.runner.learner.served)
  judge(one, 0.9, 30)
  assert one.decision.name == "taken_back" and one.version == 0
  assert_same_bits(one.serving, params())
  judge(one, 0.4, 2 * INTERVAL)  # from here on trained drafts have to be better
  assert one.version == 0 < one.gate.newest


@pytest.mark.parametrize("score", [0.3, math.nan])
def test_draft_that_is_far_worse_on_an_answer_never_serves(learner_of, score):
  one = learner_of()

  def observe(scores, requests):
    decisions = set()
    for _ in range(requests):
      one.observe(row(one.finished), 0.5, score=lambda params: scores)
      decisions.add(one.decision and one.decision.name)
    return decisions

  assert observe(score, 3 * INTERVAL) == {None, "refused"}
  assert one.version == 0 and int(one.runner.learner.version) >= 2
  assert_same_bits(one.serving, params())
  one.finish()  # the last update is checked, too
  assert one.version == 0
  assert observe(0.45, 2 * INTERVAL) == {None} and one.version > 2


def test_gate_replaces_a_broken_draft_instead_of_ending_the_run(learner_of):
  one = learner_of(gate=gate.GateConfig())
  judge(one, 0.9, 40)
  judge(one, 0.5, INTERVAL)
  assert one.version == one.gate.newest > one.gate.proven
  judge(one, 0.9, 1, serving=math.nan)
  assert one.decision.name == "taken_back"
  judge(one, 0.9, 1, serving=math.nan)
  assert one.version == 0
  with pytest.raises(base.InputError, match="check its weights"):
    judge(one, 0.9, 1, serving=math.nan)


def test_restored_learner_continues_with_the_same_gate(learner_of):
  make = lambda: learner_of(gate=gate.GateConfig())
  one = make()
  judge(one, 0.9, 40)
  judge(one, 0.5, INTERVAL)
  again = restored(one.state(), make)
  assert again.gate == one.gate and again.version == one.version > 0
  for either in (one, again):
    judge(either, 0.9, 30, serving=0.2)
    assert either.decision.name == "taken_back"
  assert again.version == one.version == one.gate.proven
  assert_same_bits(again.serving, one.serving)


def test_learner_goes_on_from_a_loaded_draft(learner_of):
  one, loaded = learner_of(), params() * 0.5
  for _ in range(2 * INTERVAL):  # the second update is launched with the last request
    one.observe(row(one.finished), 0.5)
  assert one.version > 0 and one.runner.busy
  before, rows = one.version, int(one.state()[0]["buffer"].added)
  one.load(loaded)
  assert one.version == before + 1 and not one.runner.busy
  assert_same_bits(one.serving, loaded)
  state, fresh = one.runner.learner, learner_of().runner.learner
  assert int(state.step) == 0 and int(state.version) == one.version
  assert_same_bits(state.opt_state, fresh.opt_state)
  assert int(one.state()[0]["buffer"].added) == rows
  feed(one, [0.5] * (2 * INTERVAL))
  assert one.version > before + 1
  assert not np.array_equal(one.serving, loaded)


def test_gate_serves_a_loaded_draft_until_the_first_one_is_better(learner_of):
  one, loaded = learner_of(gate=gate.GateConfig()), params() * 0.5
  judge(one, 0.4, 2 * INTERVAL)
  assert one.version == 0 and one.gate.newest > 0
  begun = one.gate.up.begun
  one.load(loaded)
  assert_same_bits(one.serving, loaded)
  assert one.gate.serving == one.version > 0
  assert one.gate.up.begun > begun  # what was spent of the error rate stays spent
  for _ in range(200):
    rivals = {name: {"rival": 0.1, "floor": 0.9}[name] for name in one.rivals}
    one.observe(row(one.finished), 0.1, rivals=rivals)
    if one.decision is not None:
      break
  assert one.decision.name == "floor_returned" and one.version == 0
  assert_same_bits(one.serving, params())


def test_draft_with_broken_scores_must_not_be_saved(learner_of):
  one = learner_of()
  one.check_finite()
  feed(one, [0.5] * INTERVAL)
  one.check_finite()
  one._drafts["newest"] = one.serving * jnp.nan
  with pytest.raises(base.InputError, match="the draft is not saved: .* not finite"):
    one.check_finite()
  # The first draft may be broken before any update.
  other = learner_of()
  with pytest.raises(base.InputError, match="check its weights"):
    other.observe(row(0), math.nan)
  with pytest.raises(base.InputError, match="the draft is not saved"):
    other.check_finite()


def test_schedule_with_costs_gets_the_number_of_emitted_tokens(learner_of):
  """The row is padded, so its length is not the number of tokens."""
  costs = Costs(RoundCosts((11.0,), num_draft_tokens=(7,)), lost_ms=1e9)
  one = learner_of(schedule.WorthConfig(costs=costs))
  one.observe(row(0).replace(mask=jnp.arange(LENGTH)[None] < 2), 0.5)
  assert one.state()[1]["schedule"]["tokens"] == 2.0
  one.observe(row(1), 0.5)
  assert one.state()[1]["schedule"]["tokens"] == 2.0 + (LENGTH - 2.0) / 20


def batches(seed=0):
  """Returns two micro-batches with records of a target."""
  table = jnp.asarray(testing.random_table(VOCAB, 7)).at[:, :, 1].set(-3.0)
  rng = np.random.default_rng(seed)
  tokens = rng.integers(2, VOCAB, (2, 4, LENGTH)).astype(np.int32)
  source = np.full((4, 2), 3, np.int32)
  return tuple(
    records.teacher_forced(MODEL, table, source, part, VOCAB) for part in tokens
  )


@pytest.fixture
def runner_of():
  """Returns a function that makes runners; they are closed afterwards."""
  learners = []

  def make(free=False, **changes):
    start = update.init_learner(CONFIG, params())
    one = learner.UpdateRunner(MODEL, CONFIG, start, INTERVAL, free, **changes)
    learners.append(one)
    return one

  yield make
  for one in learners:
    one.close()


def test_update_is_due_one_interval_after_its_launch(runner_of):
  one = runner_of()
  before = one.learner
  assert not one.busy and not one.due(100) and one.pending() is None
  one.launch(batches(), finished=4)
  one.wait()  # the update is ready, but not due before request 7
  assert one.busy and [one.due(n) for n in (4, 5, 6, 7, 8)] == [False] * 3 + [True] * 2
  assert one.learner is before  # the learner changes only in `take`
  outcome = one.take()
  assert outcome.launched == 4 and not one.busy and not one.due(100)
  assert outcome.learner is one.learner


@pytest.mark.parametrize("in_background", [True, False])
def test_updates_equal_the_direct_ones_bit_by_bit(runner_of, in_background):
  one = runner_of(in_background=in_background)
  direct = update.init_learner(CONFIG, params())
  for seed in range(3):
    before = one.learner
    one.launch(batches(seed), finished=seed)
    for _ in range(seed):  # slices that run between two calls of serving
      one.wait_if_behind(seed, 1)
    assert one.learner is before and one.pending()[0] == seed
    outcome = one.take()
    direct, report = update.update(MODEL, CONFIG, direct, batches(seed))
    assert_same_bits(outcome.learner, direct)
    assert outcome.losses == np.asarray(report.loss).tolist()
    assert outcome.grad_norms == np.asarray(report.grad_norm).tolist()
    assert outcome.skipped == 0 and outcome.version == seed + 1
    assert in_background or outcome.wait_ms == outcome.update_ms > 0
    assert not one.busy and one.pending() is None
  assert not np.array_equal(direct.params, params())
  other, _ = update.update(MODEL, CONFIG, direct, batches(9))
  assert not np.array_equal(other.params, direct.params)  # negative control


def test_free_update_is_due_when_it_is_ready(runner_of, monkeypatch):
  gate, real = threading.Event(), update.take_slice

  def slow(*arguments):
    assert gate.wait(30)
    return real(*arguments)

  monkeypatch.setattr(update, "take_slice", slow)
  one = runner_of(free=True)
  one.launch(batches(), finished=0)
  assert not one.due(1000)  # the number of finished requests does not matter
  gate.set()
  one.wait()
  assert one.due(0)
  assert int(one.take().learner.version) == 1


@pytest.fixture
def gated(monkeypatch):
  """Makes every slice wait for a semaphore.

  Returns:
    A function that installs the wait and returns the semaphore, initially at 0.
  """
  gate, real = threading.Semaphore(0), update.take_slice

  def slow(*arguments):
    assert gate.acquire(timeout=30)
    return real(*arguments)

  def close():
    monkeypatch.setattr(update, "take_slice", slow)
    return gate

  return close


def fall_behind(one, gate):
  """Runs an update of 0.1 s and takes it at once, so that learning is behind."""
  one.launch(batches(), finished=0)
  threading.Timer(0.1, gate.release, [CONFIG.steps_per_update]).start()
  one.take()


def test_step_waits_for_one_slice_if_the_last_update_was_late(runner_of, gated):
  one, gate = runner_of(), gated()
  fall_behind(one, gate)
  before = one.learner
  one.launch(batches(1), finished=0)
  # The requests in flight cannot complete an interval, so this does not wait.
  one.wait_if_behind(0, INTERVAL - 1)
  timer = threading.Timer(0.2, gate.release)
  timer.start()
  one.wait_if_behind(0, INTERVAL)
  timer.join()
  assert one.is_running  # one of two slices has run
  gate.release()
  one.wait_if_behind(0, INTERVAL)
  one.wait_if_behind(0, INTERVAL)  # both slices have run, so this does not wait
  outcome = one.take()
  assert outcome.wait_ms > 100
  gate.release(CONFIG.steps_per_update)
  expected, _ = update.update(MODEL, CONFIG, before, batches(1))
  assert_same_bits(outcome.learner, expected)


def test_waiting_time_does_not_count_as_serving(runner_of, gated):
  """Otherwise a late update would appear on time, and the next step would not wait."""
  one, gate = runner_of(), gated()
  fall_behind(one, gate)
  for seed in (1, 2):
    one.launch(batches(seed), finished=0)
    for _ in range(CONFIG.steps_per_update):
      threading.Timer(0.1, gate.release).start()
      started = time.perf_counter()
      one.wait_if_behind(0, INTERVAL)
      assert time.perf_counter() - started > 0.05
    one.wait()
    assert one.take().wait_ms > 100


@pytest.mark.parametrize("free", [False, True])
def test_steps_do_not_wait_if_updates_are_on_time_or_free(runner_of, gated, free):
  one, gate = runner_of(free), gated()
  if free:
    fall_behind(one, gate)
  else:
    gate.release(CONFIG.steps_per_update)
    one.launch(batches(), finished=0)
    one.wait()  # the update is finished before it is taken
    one.take()
  one.launch(batches(1), finished=0)
  one.wait_if_behind(0, 100)
  assert one.is_running
  gate.release(CONFIG.steps_per_update)


def test_step_does_not_wait_for_a_failed_update(runner_of, gated, monkeypatch):
  one = runner_of()
  fall_behind(one, gated())

  def fails(*arguments):
    raise RuntimeError("out of memory")

  monkeypatch.setattr(update, "take_slice", fails)
  one.launch(batches(1), finished=0)
  one.wait_if_behind(0, INTERVAL)
  with pytest.raises(RuntimeError, match="out of memory"):
    one.take()


def test_second_launch_is_refused(runner_of):
  one = runner_of()
  one.launch(batches(), finished=0)
  with pytest.raises(RuntimeError, match="in progress"):
    one.launch(batches(), finished=1)


def test_interleaved_slices_are_spread_until_the_update_is_due(runner_of, monkeypatch):
  threads, real = [], update.take_slice

  def noted(*arguments):
    threads.append(threading.current_thread())
    return real(*arguments)

  monkeypatch.setattr(update, "take_slice", noted)
  one = runner_of(in_background=False)
  one.wait_if_behind(0, 1)
  assert not threads and not one.due(100) and one.pending() is None
  one.launch((*batches(0), *batches(1), *batches(2)), finished=4)
  counts = []
  for finished in (4, 4, 5, 6, 6):
    one.wait_if_behind(finished, in_flight=8)  # `in_flight` does not matter here
    counts.append(len(threads))
  # Each call runs (slices left) / (requests left): 6/3, 4/3 (rounded up), 2/2, 1/1.
  assert counts == [2, 4, 5, 6, 6]
  assert set(threads) == {threading.current_thread()} and not one.is_running
  assert [one.due(n) for n in (6, 7)] == [False, True]


def test_free_interleaved_update_is_due_when_all_slices_have_run(runner_of):
  one = runner_of(free=True, in_background=False)
  one.launch(batches(), finished=0)
  assert not one.due(1000)
  one.wait_if_behind(0, 1)
  assert not one.due(1000)
  one.wait_if_behind(INTERVAL - 1, 1)
  assert one.due(0)


def test_failed_interleaved_slice_runs_again(runner_of, monkeypatch):
  one, before = runner_of(in_background=False), update.init_learner(CONFIG, params())
  one.launch(batches(), finished=0)
  one.wait_if_behind(0, 1)

  def fails(*arguments):
    raise RuntimeError("out of memory")

  with monkeypatch.context() as patch:
    patch.setattr(update, "take_slice", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
      one.take()
  expected, _ = update.update(MODEL, CONFIG, before, batches())
  assert_same_bits(one.take().learner, expected)


def kept_rows(made):
  """First prompt tokens of the buffered rows."""
  data = made.state()[0]["buffer"].data
  sources = np.asarray(data.source)[np.asarray(data.weight) > 0]
  return sorted(map(tuple, sources.tolist()))


def test_state_without_rows_restores_the_draft_alone(learner_of):
  one, other = learner_of(), learner_of()
  for number in range(2 * INTERVAL + 1):  # an update is in progress
    one.observe(row(number), 0.5)
  arrays, host = one.state(has_rows=False)
  assert one.runner.busy and arrays["pending"] is None
  assert "buffer" not in arrays
  shapes = jax.tree.map(jnp.shape, other.structure(host))
  assert shapes == jax.tree.map(jnp.shape, arrays)
  other.restore(arrays, json.loads(json.dumps(host)))
  assert_same_bits(other.serving, one.serving)
  assert other.finished == one.finished and kept_rows(other) == []
  for number in range(2 * INTERVAL):
    other.observe(row(number), 0.5)
  assert other.version > one.version
