"""Measurement of costs, with a clock that advances only during calls."""

import threading
import time

import jax
import numpy as np
import pytest

from osd_jax.costs import measure


class Clock:
  """A clock that advances only in `work`."""

  def __init__(self):
    self.now = 0.0

  def __call__(self):
    return self.now

  def work(self, ms):
    self.now += ms / 1e3
    return ms


def test_interleaved_alternates_between_calls():
  clock, order = Clock(), []

  def call(name):
    order.append(name)
    return clock.work(1.0)

  found = measure.interleaved(
    {name: lambda name=name: call(name) for name in "abc"}, 1.0, clock
  )
  assert found == {"a": 1.0, "b": 1.0, "c": 1.0}
  assert order[:6] == list("abcabc") and len(order) <= 3 * measure.MOST


@pytest.mark.parametrize("ms", [0.01, 1.0, 100.0, 700.0, 20_000.0])
def test_interleaved_stays_within_the_budget(ms):
  clock, calls = Clock(), {"one": lambda: clock.work(ms), "two": lambda: clock.work(ms)}
  measure.interleaved(calls, 5.0, clock)
  assert clock.now <= max(5.0, 2 * ms / 1e3) + 1e-9


def test_typical_time_ignores_outliers_in_a_third_of_the_calls():
  rng = np.random.default_rng(0)
  times = 20.0 * np.where(rng.random(60) < 0.33, rng.uniform(1, 9, 60), 1.0)
  assert measure.typical(times) == pytest.approx(20.0)
  assert np.mean(times) > 24.0  # negative control: the mean does change


class Machine:
  """A simulated machine that serves in steps while an update may run.

  Attributes:
    cores: with one core, every call of serving waits for one slice of the update.
  """

  def __init__(self, cores, step_ms=5.0, update_ms=100.0, slice_ms=20.0):
    self.clock, self.cores, self.step_ms = Clock(), cores, step_ms
    self.update_ms, self.slice_ms = update_ms, slice_ms
    self.left = 0.0

  def serve(self):
    if self.cores == 1 and self.left > 0:
      self._run(min(self.slice_ms, self.left))  # the call queues behind a slice
    before = self.clock.now
    self.clock.work(self.step_ms)
    if self.cores > 1:
      self.left -= (self.clock.now - before) * 1e3

  def update(self, step):
    self.left = self.update_ms
    while self.left > 0 and step():
      pass
    if self.left > 0:
      self._run(self.left)

  def _run(self, ms):
    self.clock.work(ms)
    self.left -= ms


@pytest.mark.parametrize(
  "cores, due, expected",
  [
    (1, 1000, 100.0),  # on one core, serving loses the whole update
    (2, 1000, 0.0),  # a second core runs the update in parallel
    (2, 10, 50.0),  # after 10 steps, serving waits for the other half of the update
  ],
)
def test_lost_time_is_the_delay_of_requests_in_flight(cores, due, expected):
  """Regression: subtracting a call without rounds hid slices that every call pays."""
  machine = Machine(cores)
  found = measure.lost_ms(machine.update, machine.serve, due, 2.0, machine.clock)
  assert found == pytest.approx(expected)
  assert machine.clock.now <= 2.0


def test_long_update_is_measured_once():
  machine = Machine(1, update_ms=5000.0)
  found = measure.lost_ms(machine.update, machine.serve, 10_000, 2.0, machine.clock)
  assert found == pytest.approx(5000.0) and machine.clock.now < 10.0


def test_time_of_compiling_counts_once_and_by_thread(monkeypatch):
  clock, noted = Clock(), measure._Compiling()
  monkeypatch.setattr(measure.time, "perf_counter", clock)
  clock.work(5000)
  noted.note("/jax/core/compile/jaxpr_trace_duration", 1.0)  # inside of the next one
  clock.work(1000)
  noted.note("/jax/core/compile/jaxpr_trace_duration", 3.0)
  clock.work(2000)
  noted.note("/jax/core/compile/backend_compile_duration", 2.0)
  noted.note("/jax/compilation_cache/cache_retrieval_time_sec", 2.0)
  assert noted.total == pytest.approx(5.0)
  totals = []
  other = threading.Thread(target=lambda: totals.append(noted.total))
  other.start()
  other.join()
  assert totals == [0.0]


def test_stopwatch_leaves_out_compiling():
  watch, started = measure.Stopwatch(), time.perf_counter()
  before = measure.compiling_ms()
  jax.jit(lambda x: x + 17.25)(np.zeros(3)).block_until_ready()
  compiled_ms = measure.compiling_ms() - before
  rest_ms, total_ms = watch.ms, (time.perf_counter() - started) * 1e3
  assert rest_ms == pytest.approx(total_ms - compiled_ms, abs=compiled_ms / 4)


# --- Costs that are learned from calls that serve ---

WIDTHS = (0, 3, 7)
COSTS = {0: 20.0, 3: 26.0, 7: 34.0}


def serve(costs, calls, ms=lambda k, rounds: COSTS[k] * rounds, tokens_per_round=1):
  """Makes calls as an engine does; returns what was timed, with the tokens before."""
  timed, tokens = [], 0
  for _ in range(calls):
    rounds = measure.TIMED_ROUNDS if costs.is_short else 16
    if costs.timed is not None:
      timed.append((tokens, costs.timed))
    k = 0 if costs.timed is None else costs.timed
    costs.observe(rounds, rounds * tokens_per_round, ms(k, rounds))
    tokens += rounds * tokens_per_round
  return timed


def test_tokens_are_dear_until_all_widths_were_timed():
  costs = measure.LearnedCosts(WIDTHS)
  np.testing.assert_allclose(costs.prices(rows=1), [measure.PRIOR] * 7, rtol=1e-6)
  np.testing.assert_allclose(costs.prices(rows=4), [4 * measure.PRIOR] * 7, rtol=1e-6)


def test_prices_follow_the_timed_calls():
  costs = measure.LearnedCosts(WIDTHS)
  serve(costs, 6)
  assert costs.timed is None
  np.testing.assert_allclose(costs.prices(rows=1), [0.115] * 7, rtol=1e-5)
  # A token that is emitted in half of the time makes the time of a draft worth more.
  serve(costs, 200, tokens_per_round=2)
  assert costs.timed is None
  np.testing.assert_allclose(costs.prices(rows=1), [0.23] * 7, rtol=0.1)


@pytest.mark.parametrize("width", WIDTHS)
def test_timed_call_drafts_exactly_this_width(width):
  costs = measure.LearnedCosts(WIDTHS)
  costs.timed = width
  assert (costs.prices(rows=1) == 0).tolist() == [i < width for i in range(7)]
  assert np.isinf(costs.prices(rows=1)[width:]).all()


def test_timing_takes_a_small_share_that_shrinks():
  timed = serve(measure.LearnedCosts(WIDTHS), 400)
  assert [k for _, k in timed] == list(WIDTHS) * (len(timed) // 3)
  tokens = [before for before, k in timed if k == WIDTHS[0]]
  gaps = np.diff(tokens)
  assert tokens[0] <= 2 and gaps[0] >= measure.FIRST_GAP
  assert (np.diff(gaps) > -measure.FIRST_GAP).all() and max(gaps) > 1000
  rounds = 400 * 16 * measure.TIMED_ROUNDS / 16
  assert len(timed) * measure.TIMED_ROUNDS < 0.05 * rounds * 16


def test_first_call_and_slow_calls_do_not_count():
  """The first may compile, and other work of the machine only adds to a time."""
  costs = measure.LearnedCosts(WIDTHS)
  calls = iter(range(10**6))

  def ms(k, rounds):
    call = next(calls)
    slow = 1e5 if call == 0 else 50.0 if call % 7 == 3 else 0.0
    return COSTS[k] * rounds + slow

  serve(costs, 300, ms)
  np.testing.assert_allclose(costs.prices(rows=1), [0.115] * 7, atol=0.05)
