"""What a draft learns at a time, and how it is continued in between."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from osd_jax import base, testing
from osd_jax.distillation import buffer, costs, learner, schedule, update, worth
from osd_jax.models import families

SOURCE, TARGET, KEPT, SLICES, INTERVAL = 5, 6, 4, 8, 3
MODEL = families.build(testing.TINY_DRAFT)


def row(seed):
  """A finished request with made-up records."""
  rng = np.random.default_rng(seed)
  ids = np.stack([rng.choice(64, KEPT, replace=False) for _ in range(TARGET)])
  masses = -np.sort(-rng.dirichlet(np.ones(KEPT), TARGET))
  records = base.Records(
    log_probs=jnp.log(jnp.asarray(masses[None], jnp.float32)),
    ids=jnp.asarray(ids[None], jnp.uint16),
    tail=jnp.zeros((1, TARGET), jnp.float32),
    error=jnp.zeros((1, TARGET), bool),
  )
  return base.DistillationBatch(
    source=jnp.asarray(rng.integers(2, 64, (1, SOURCE)), jnp.int32),
    target=jnp.asarray(rng.integers(2, 64, (1, TARGET)), jnp.int32),
    mask=jnp.ones((1, TARGET), bool),
    records=records,
    weight=jnp.ones((1,), jnp.float32),
  )


def made(when=None, **changes):
  config = learner.LearningConfig(
    buffer=buffer.BufferConfig(capacity=16),
    update=update.UpdateConfig(steps_per_update=SLICES, num_new=2, num_replay=2),
    schedule=when
    or schedule.ScheduleConfig(
      update_interval=INTERVAL, resume_window=2, pause=False, **changes
    ),
  )
  params = MODEL.init(jax.random.key(0))
  return learner.Learner(MODEL, params, config, SOURCE, TARGET, KEPT)


def fed(one, overlaps):
  """Figures of the updates that come of requests of these overlaps."""
  outcomes = [one.observe(row(one.finished), overlap) for overlap in overlaps]
  outcomes.append(one.finish())
  return [outcome.figures() for outcome in outcomes if outcome is not None]


@pytest.mark.parametrize(
  "much, overlap, share",
  [(0.0, 0.99, 1.0), (0.4, 0.2, 1.0), (0.4, 0.9, 0.25), (0.4, 0.999, 0.0025)],
)
def test_an_update_is_as_long_as_there_is_something_to_gain(much, overlap, share):
  one = made(much_to_gain=much)
  (figures,) = fed(one, [overlap] * INTERVAL)
  one.close()
  assert figures["steps"] == max(1, math.ceil(SLICES * share))


def test_only_the_last_requests_say_what_is_to_be_gained():
  one = made(much_to_gain=0.4)
  (figures,) = fed(one, [0.1, 0.9, 0.9])
  one.close()
  assert figures["steps"] == SLICES // 4


@pytest.mark.parametrize("overlap", [0.2, 0.8])
def test_a_shorter_update_is_continued_as_it_was_begun(overlap):
  whole, broken = made(much_to_gain=0.4), made(much_to_gain=0.4)
  before, after = [overlap] * INTERVAL, [overlap] * (INTERVAL + 1)
  for one in (whole, broken):
    for value in before:
      assert one.observe(row(one.finished), value) is None
  arrays, host = broken.state()
  continued = made(much_to_gain=0.4)
  shapes = continued.structure(host)
  jax.tree.map(lambda a, b: np.testing.assert_equal(a.shape, b.shape), arrays, shapes)
  assert len(arrays["pending"]) == (SLICES if overlap < 0.5 else SLICES // 2)
  continued.restore(jax.tree.map(jnp.array, arrays), host)
  assert fed(continued, after)[0]["loss"] == fed(whole, after)[0]["loss"]
  jax.tree.map(np.testing.assert_array_equal, continued.serving, whole.serving)
  for one in (whole, broken, continued):
    one.close()


def test_a_schedule_by_costs_is_told_how_many_tokens_a_request_has():
  """Those that were emitted, not the room that an answer had."""
  prices = costs.UpdateCosts(round_ms=(11.0,), update_ms=1e9)
  one = made(worth.WorthConfig(costs=prices))
  short = row(0).replace(mask=jnp.arange(TARGET)[None] < 2)
  one.observe(short, 0.5)
  assert one.state()[1]["schedule"]["tokens"] == 2.0
  one.observe(row(1), 0.5)
  assert one.state()[1]["schedule"]["tokens"] == 2.0 + (TARGET - 2.0) / 20
  one.close()


def test_a_negative_lack_is_refused():
  with pytest.raises(base.InputError, match="much_to_gain: received -0.1"):
    schedule.ScheduleConfig(much_to_gain=-0.1)
