"""Updates under way: taken when promised, bit for bit what `update` computes."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from osd_jax import testing
from osd_jax.decoding import records
from osd_jax.distillation import learner as learner_lib
from osd_jax.distillation import optimizers, update

VOCAB, LENGTH, INTERVAL = 8, 6, 3
MODEL = testing.tabular_model(VOCAB)
CONFIG = update.UpdateConfig(
  optimizer=optimizers.OptimizerConfig(learning_rate=0.05), steps_per_update=2
)


def params():
  return jnp.asarray(testing.random_table(VOCAB, 1)).at[:, :, 1].set(-3.0)


def batches(seed=0):
  """Two micro-batches of a target's records."""
  table = jnp.asarray(testing.random_table(VOCAB, 7)).at[:, :, 1].set(-3.0)
  rng = np.random.default_rng(seed)
  tokens = rng.integers(2, VOCAB, (2, 4, LENGTH)).astype(np.int32)
  source = np.full((4, 2), 3, np.int32)
  return tuple(
    records.teacher_forced(MODEL, table, source, part, VOCAB) for part in tokens
  )


@pytest.fixture
def learner():
  made = []

  def make(free=False):
    start = update.init_learner(CONFIG, params())
    made.append(learner_lib.BackgroundRunner(MODEL, CONFIG, start, INTERVAL, free))
    return made[-1]

  yield make
  for one in made:
    one.close()


def assert_same_bits(found, wanted):
  jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_an_update_is_taken_an_interval_after_its_launch(learner):
  one = learner()
  assert not one.busy and not one.due(100) and one.pending() is None
  one.launch(batches(), finished=4)
  one._future.result()  # ready long before it may be taken
  assert one.busy and [one.due(n) for n in (4, 5, 6, 7, 8)] == [False] * 3 + [True] * 2
  outcome = one.take()
  assert outcome.launched == 4 and not one.busy and not one.due(100)
  assert outcome.learner is one.learner


def test_it_equals_the_update_run_directly_bit_by_bit(learner):
  one, direct = learner(), update.init_learner(CONFIG, params())
  for seed in range(3):
    one.launch(batches(seed), finished=seed)
    outcome = one.take()
    direct, report = update.update(MODEL, CONFIG, direct, batches(seed))
    assert_same_bits(outcome.learner, direct)
    assert outcome.losses == np.asarray(report.loss).tolist()
    assert outcome.grad_norms == np.asarray(report.grad_norm).tolist()
    assert outcome.skipped == 0 and int(outcome.learner.version) == seed + 1
  assert not np.array_equal(direct.params, params())
  other, _ = update.update(MODEL, CONFIG, direct, batches(9))
  assert not np.array_equal(other.params, direct.params)  # the batches matter


def test_serving_parameters_stay(learner):
  one = learner()
  serving = one.learner.params
  before = np.array(serving)
  one.launch(batches(), finished=0)
  assert one.learner.params is serving  # until it is taken
  one.take()
  np.testing.assert_array_equal(serving, before)
  assert one.learner.params is not serving


def test_free_mode_takes_it_when_ready(learner, monkeypatch):
  gate, real = threading.Event(), update.take_slice

  def slow(*arguments):
    assert gate.wait(30)
    return real(*arguments)

  monkeypatch.setattr(update, "take_slice", slow)
  one = learner(free=True)
  one.launch(batches(), finished=0)
  assert not one.due(1000)  # however many requests have finished
  gate.set()
  one._future.result()
  assert one.due(0)
  assert int(one.take().learner.version) == 1


def test_waiting_is_counted(learner, monkeypatch):
  gate, real = threading.Event(), update.take_slice
  wait_first = lambda *arguments: (gate.wait(30), real(*arguments))[1]
  monkeypatch.setattr(update, "take_slice", wait_first)
  one = learner()
  one.launch(batches(), finished=0)
  threading.Timer(0.2, gate.set).start()
  outcome = one.take()
  assert outcome.wait_ms > 100 and outcome.update_ms > 100


@pytest.fixture
def gated(monkeypatch):
  """A slice is computed at each `release` of what is returned."""
  gate, real = threading.Semaphore(0), update.take_slice

  def slow(*arguments):
    assert gate.acquire(timeout=30)
    return real(*arguments)

  def close():
    monkeypatch.setattr(update, "take_slice", slow)
    return gate

  return close


def fall_behind(one, gate):
  """An update that takes .1 s, and is taken at once: learning is behind."""
  one.launch(batches(), finished=0)
  threading.Timer(0.1, gate.release, [CONFIG.steps_per_update]).start()
  one.take()


def test_where_learning_is_behind_a_step_waits_for_one_slice(learner, gated):
  one, gate = learner(), gated()
  fall_behind(one, gate)
  before = one.learner
  one.launch(batches(1), finished=0)
  one.wait_if_behind(
    0, INTERVAL - 1
  )  # this step finishes no interval: waits for nothing
  timer = threading.Timer(0.2, gate.release)
  timer.start()
  one.wait_if_behind(0, INTERVAL)
  timer.join()
  assert not one._future.done()  # one of two slices
  gate.release()
  one.wait_if_behind(0, INTERVAL)
  one.wait_if_behind(0, INTERVAL)  # none is left
  outcome = one.take()
  assert outcome.wait_ms > 100
  gate.release(CONFIG.steps_per_update)
  wanted, _ = update.update(MODEL, CONFIG, before, batches(1))
  assert_same_bits(outcome.learner, wanted)


def test_late_updates_in_a_row_are_all_waited_for_slice_by_slice(learner, gated):
  """What steps have waited for is no time that serving took."""
  one, gate = learner(), gated()
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
def test_no_step_waits_where_learning_keeps_up_or_is_free(learner, gated, free):
  one, gate = learner(free), gated()
  if free:
    fall_behind(one, gate)
  else:
    gate.release(CONFIG.steps_per_update)
    one.launch(batches(), finished=0)
    one.wait()  # serving has taken longer than the update
    one.take()
  one.launch(batches(1), finished=0)
  one.wait_if_behind(0, 100)
  assert not one._future.done()
  gate.release(CONFIG.steps_per_update)


def test_an_update_that_fails_keeps_no_step_waiting(learner, gated, monkeypatch):
  one = learner()
  fall_behind(one, gated())

  def fails(*arguments):
    raise RuntimeError("out of memory")

  monkeypatch.setattr(update, "take_slice", fails)
  one.launch(batches(1), finished=0)
  one.wait_if_behind(0, INTERVAL)
  with pytest.raises(RuntimeError, match="out of memory"):
    one.take()


def test_a_checkpoint_gets_the_inputs(learner):
  one, again = learner(), learner()
  one.launch(batches(), finished=5)
  launched, inputs = one.pending()
  assert launched == 5
  again.launch(inputs, launched)
  assert_same_bits(again.take().learner, one.take().learner)


def test_one_update_at_a_time(learner):
  one = learner()
  one.launch(batches(), finished=0)
  with pytest.raises(RuntimeError, match="in progress"):
    one.launch(batches(), finished=1)


def test_steps_that_are_not_finite_are_skipped_and_counted(learner):
  one = learner()
  bad, good = batches()
  broken = bad.records.replace(log_probs=bad.records.log_probs * jnp.nan)
  spoilt = bad.replace(records=broken)
  one.launch((spoilt, good), finished=0)
  outcome = one.take()
  assert outcome.skipped == 1 and int(outcome.learner.version) == 1
  one.launch((spoilt, spoilt), finished=1)
  after = one.take()
  assert after.skipped == 2 and int(after.learner.version) == 1
  assert_same_bits(after.learner.params, outcome.learner.params)


def test_an_error_in_the_thread_reaches_serving(learner):
  one = learner()
  one.launch([batches()[0].replace(target=None)], finished=0)
  with pytest.raises(Exception, match="NoneType"):
    one.take()


@pytest.fixture
def interleaved(monkeypatch):
  """Made by `make(free)`, with the list of the threads that slices were taken by."""
  taken, real = [], update.take_slice

  def noted(*arguments):
    taken.append(threading.current_thread())
    return real(*arguments)

  monkeypatch.setattr(update, "take_slice", noted)

  def make(free=False):
    start = update.init_learner(CONFIG, params())
    return learner_lib.InterleavedRunner(MODEL, CONFIG, start, INTERVAL, free), taken

  return make


def test_between_calls_slices_are_spread_over_the_requests_until_it_is_due(interleaved):
  one, taken = interleaved()
  one.wait_if_behind(0, 1)
  assert not taken and not one.due(100) and one.pending() is None
  one.launch((*batches(0), *batches(1), *batches(2)), finished=4)
  counts = []
  for finished in (4, 4, 5, 6, 6):
    one.wait_if_behind(finished, in_flight=8)  # how many may finish does not matter
    counts.append(len(taken))
  # Six over three requests, then four over three, two over two, one over one.
  assert counts == [2, 4, 5, 6, 6]
  assert set(taken) == {threading.current_thread()} and not one.is_running
  assert [one.due(n) for n in (6, 7)] == [False, True]


def test_between_calls_it_computes_the_same_bits_however_far_it_came(interleaved):
  for calls in range(3):
    one, taken = interleaved()
    del taken[:]
    before = one.learner
    one.launch(batches(), finished=0)
    for _ in range(calls):
      one.wait_if_behind(0, 1)
    assert one.learner is before and one.pending()[0] == 0
    outcome = one.take()
    assert len(taken) == CONFIG.steps_per_update
    wanted, report = update.update(MODEL, CONFIG, before, batches())
    assert_same_bits(outcome.learner, wanted)
    assert outcome.losses == np.asarray(report.loss).tolist()
    assert outcome.version == 1 and outcome.wait_ms == outcome.update_ms > 0
    assert not one.busy and one.pending() is None


def test_between_calls_a_free_one_is_due_when_all_slices_are_taken(interleaved):
  one, _ = interleaved(free=True)
  one.launch(batches(), finished=0)
  assert not one.due(1000)
  one.wait_if_behind(0, 1)
  assert not one.due(1000)
  one.wait_if_behind(INTERVAL - 1, 1)
  assert one.due(0)


def test_between_calls_a_slice_that_failed_is_taken_again(interleaved, monkeypatch):
  one, _ = interleaved()
  before, real = one.learner, update.take_slice
  one.launch(batches(), finished=0)
  one.wait_if_behind(0, 1)

  def fails(*arguments):
    raise RuntimeError("out of memory")

  monkeypatch.setattr(update, "take_slice", fails)
  with pytest.raises(RuntimeError, match="out of memory"):
    one.take()
  monkeypatch.setattr(update, "take_slice", real)
  wanted, _ = update.update(MODEL, CONFIG, before, batches())
  assert_same_bits(one.take().learner, wanted)
