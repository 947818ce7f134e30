"""Poisoned learning costs speed, raises an alarm, and changes no output.

A draft that learns nonsense is the worst case of online learning. Greedy outputs, and
sampled outputs under the coupling rule, must equal those of a draft that never learns.
"""

import contextlib
import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
import tiny_online
import tiny_pair

from experiments.poisoned_learning import run as poisons
from osd_jax import online, pairs, runs, sharding
from osd_jax.distillation import buffer, gate, losses
from osd_jax.engine.requests import SamplingConfig
from osd_jax.report import plots

pytestmark = pytest.mark.slow

PER_TASK = 20  # requests of each of the four topics: three alarm windows
RATE = 3e-3  # learning rate of the healthy run
SAMPLED = SamplingConfig(temperature=0.8, seed=3)


@dataclasses.dataclass(frozen=True)
class Run:
  """A finished run: outputs by query, log rows by kind, and the text of the report."""

  outputs: dict
  requests: list
  updates: list
  alarms: list
  page: str

  def accepted(self, part=slice(-20, None)):
    rows = self.requests[part]
    return sum(row["accepted"] for row in rows) / sum(row["drafted"] for row in rows)


@pytest.fixture(scope="module")
def twins(lively_pair):
  """A draft equal to its target, as one object, so that runs share compiled code."""
  pair = pairs.load_pair(lively_pair, sharding.make(sharding.PartitionConfig()))
  return dataclasses.replace(pair, draft=pair.target, draft_params=pair.target_params)


@pytest.fixture(scope="module")
def loaded(twins):
  """A draft that starts close to its target, so that poison can make it worse."""
  keys = iter(jax.random.split(jax.random.key(5), 99))

  def near(leaf):
    return leaf + 0.1 * jnp.std(leaf) * jax.random.normal(next(keys), leaf.shape)

  return dataclasses.replace(
    twins, draft_params=jax.tree.map(near, twins.target_params)
  )


def serve(loaded, folder, rule="rejection", rate=RATE, **changes):
  config = tiny_online.config(
    loaded,
    folder / "run",
    compare_every=0,
    keep_drafts=False,
    keep_outputs="ids",
    floor_metering=False,
    checkpoint_every=1000,
    **changes,
  )
  learning = config.learning
  optimizer = dataclasses.replace(learning.update.optimizer, learning_rate=rate)
  # A tiny draft learns quickly from all tokens.
  loss = losses.LossConfig("forward_kl", num_positions=0, num_tokens=0)
  config = dataclasses.replace(
    config,
    stream=dataclasses.replace(config.stream, requests_per_task=PER_TASK),
    decoding=dataclasses.replace(config.decoding, acceptance_rule=rule),
    learning=dataclasses.replace(
      learning,
      update=dataclasses.replace(learning.update, optimizer=optimizer, loss=loss),
    ),
  )
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(plots, "draw_plots", lambda *_: ([], ""))
    path = online.run(config).path
  rows = list(runs.read(path / "metrics.jsonl"))
  kinds = (
    [row for row in rows if row["kind"] == kind]
    for kind in ("request", "update", "alarm")
  )
  return Run(poisons.outputs_of(path), *kinds, (path / "report.html").read_text())


def nan_in_a_row():
  """Puts NaN into one row of the buffer; the row is drawn until it is overwritten."""
  real = buffer.append

  def append(ring, batch):
    broken = jnp.where(ring.added == 16, jnp.nan, 0.0)
    log_probs = batch.records.log_probs + broken
    records = batch.records.replace(log_probs=log_probs)
    return real(ring, batch.replace(records=records))

  return mock.patch.object(buffer, "append", append)


sound = contextlib.nullcontext
POISONS = {
  "shuffled": (lambda: poisons.shuffled_labels(tiny_pair.VOCAB_SIZE), RATE),
  "rate x 1000": (sound, 1000 * RATE),
  "nan": (nan_in_a_row, RATE),
}


@pytest.fixture(scope="module")
def make(loaded, tmp_path_factory):
  def run_with(poison=sound, **changes):
    with poison():
      return serve(loaded, tmp_path_factory.mktemp("run"), **changes)

  return run_with


@pytest.fixture(scope="module")
def frozen(make):
  """Runs of a draft that never learns: greedy, and sampled under each rule."""
  return {
    "greedy": make(learn=False),
    "coupling": make(learn=False, rule="coupling", sampling=SAMPLED),
    "rejection": make(learn=False, sampling=SAMPLED),
  }


@contextlib.contextmanager
def unguarded():
  """Lets every new draft serve."""
  with mock.patch.multiple(gate, LEAST_SHARE=-1.0, wanted=lambda *_: ()):
    yield


@pytest.fixture(scope="module")
def poisoned(make):
  with unguarded():
    return {name: make(poison, rate=rate) for name, (poison, rate) in POISONS.items()}


@pytest.fixture(scope="module")
def healthy(make):
  return make()


@pytest.mark.parametrize("name", POISONS)
def test_poison_changes_no_greedy_output(frozen, poisoned, name):
  run = poisoned[name]
  assert run.updates and run.requests[-1]["draft_version"] > 0
  assert run.outputs == frozen["greedy"].outputs
  assert len(run.outputs) == 4 * PER_TASK


@pytest.mark.parametrize("is_attached", [False, True])
def test_poison_changes_no_coupled_output(
  frozen, loaded, lively_pair, tmp_path, is_attached
):
  pair = pairs.load_pair(tiny_online.attached(lively_pair)) if is_attached else loaded
  with POISONS["shuffled"][0](), unguarded():
    run = serve(pair, tmp_path, "coupling", 10 * RATE, sampling=SAMPLED)
  assert run.requests[-1]["draft_version"] > 0
  assert run.outputs == frozen["coupling"].outputs


def tokens_per_call(ran):
  rows = ran.requests
  return sum(r["output_tokens"] for r in rows) / sum(r["target_calls"] for r in rows)


@pytest.mark.parametrize("strict", [None, gate.GateConfig()])
@pytest.mark.parametrize("name", POISONS)
def test_poison_keeps_the_speed_of_the_frozen_draft(
  frozen, poisoned, make, name, strict
):
  poison, rate = POISONS[name]
  run = make(poison, rate=rate, gate=strict)
  assert run.outputs == frozen["greedy"].outputs
  assert tokens_per_call(run) >= 0.95 * tokens_per_call(frozen["greedy"])
  if strict:
    assert run.updates and "Gate: the first draft served all requests." in run.page
  # Negative control: if every new draft serves, poison costs speed. Rows with NaN do
  # not, since their steps are skipped.
  if name != "nan":
    assert tokens_per_call(poisoned[name]) < 0.8 * tokens_per_call(frozen["greedy"])


def test_outputs_under_rejection_change_with_the_draft(frozen, make):
  """Negative control: rejection keeps the distribution, but not the tokens."""
  poison, rate = POISONS["shuffled"]
  run = make(poison, rate=rate, sampling=SAMPLED)
  assert run.outputs != frozen["rejection"].outputs
  assert frozen["rejection"].outputs != frozen["coupling"].outputs


def test_healthy_run_accepts_more_and_raises_no_poison_alarms(healthy, poisoned):
  """Negative control: the poisons have an effect."""
  assert healthy.accepted() > 0.3
  for name in ("shuffled", "rate x 1000"):
    assert poisoned[name].accepted() < healthy.accepted() / 2, name
  assert not {"acceptance_pinned_at_0", "update_not_finite"} & set(names_of(healthy))


def names_of(ran, active=True):
  return [row["alarm"] for row in ran.alarms if row["active"] is active]


def test_nan_raises_an_alarm_and_learning_continues(poisoned):
  run = poisoned["nan"]
  skipped = [row for row in run.updates if row["skipped"]]
  assert skipped and len(skipped) < len(run.updates)
  assert "update_not_finite" in names_of(run)
  started = next(row for row in run.alarms if row["alarm"] == "update_not_finite")
  assert started["finished"] == skipped[0]["finished"]
  assert "Alarms: " in run.page and "update not finite from request" in run.page


def test_draft_that_is_never_accepted_raises_an_alarm(poisoned):
  run = poisoned["rate x 1000"]
  assert "acceptance_pinned_at_0" in names_of(run)
  assert "acceptance pinned at 0 from request" in run.page


def test_draft_equal_to_the_target_raises_an_alarm(twins, tmp_path):
  run = serve(twins, tmp_path, learn=False)
  assert run.accepted(slice(None)) == 1.0
  at = [row for row in run.alarms if row["alarm"] == "acceptance_pinned_at_1"]
  # At the end of the first window of 25 requests, and only once.
  assert [row["finished"] for row in at] == [25]
