"""With a changing K, outputs, records and caches equal those of a fixed K."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import Compilations
from decoding import harness
from engine import cases

from osd_jax import sharding, testing
from osd_jax.base import StopReason
from osd_jax.costs.table import RoundCosts
from osd_jax.decoding import drafters
from osd_jax.decoding import state as state_lib
from osd_jax.engine import controller, engine, steps
from osd_jax.main import settings
from osd_jax.online import OnlineConfig

BUCKETS = cases.BUCKETS
KS = (0, 1, 3)
TABLE = RoundCosts((1.0, 1.3, 1.6), chunk_ms=0.3, prefill_ms=0.5)
POLICY = engine.AdaptiveConfig(candidates=KS, costs=(TABLE,) * len(BUCKETS))
CYCLE = (3, 0, 0, 1, 0, 3, 3, 0, 0, 0)
VOCAB = 8


def scheduled(monkeypatch, cycle=CYCLE):
  """Makes K follow a cycle; returns a list of (K, missing_ms) of all choices."""
  turns, noted = itertools.cycle(cycle), []

  def choose(candidates, costs, state, rows, missing_ms=0.0):
    noted.append((next(turns), missing_ms))
    return dataclasses.replace(state, num_draft_tokens=noted[-1][0])

  monkeypatch.setattr(controller, "ROUNDS_PER_CALL", 2)
  monkeypatch.setattr(controller, "choose", choose)
  return noted


def make(kind="close", rows=3, policy=POLICY, **changes):
  config = cases.config_of(rows, adaptive=policy, **changes)
  params = cases.target_params(), cases.draft_params(kind)
  return paired(cases.TARGET, params, config)


def paired(model, params, config):
  """An engine whose draft has the target's shape."""
  return engine.Engine(config, model, params[0], model, params[1])


# --- Outputs and records ------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3])
def test_greedy_outputs_and_records_equal_plain_decoding_with_any_k(monkeypatch, rows):
  """Prompts of different lengths, refills and swaps, and K = 0 in between."""
  noted, decoder = scheduled(monkeypatch), make(rows=rows)
  for request in cases.greedy_requests():
    decoder.submit(request)
  finished, kinds = [], ("far", "same", "close")
  while decoder.in_flight:
    finished += decoder.step()
    version = decoder.draft_version + 1
    decoder.swap(cases.draft_params(kinds[version % 3]), version)
  assert cases.by_tag(finished) == cases.expected()
  assert {k for k, _ in noted} == set(KS)
  assert any(k and missing for k, missing in noted)  # the draft caught up at least once
  for done in finished:
    cases.check_records(done)
    records = jax.tree.map(lambda leaf: np.asarray(leaf)[0], done.batch.records)
    count = len(done.tokens)
    assert done.drafted - done.accepted == records.error[:count].sum()
    assert 0 <= done.accepted + done.target_calls - count <= 1


def test_coupled_outputs_equal_plain_decoding_with_the_same_seed(monkeypatch):
  scheduled(monkeypatch)
  model = testing.tabular_model(VOCAB)
  tables = [jnp.asarray(testing.random_table(VOCAB, seed)) for seed in (0, 1)]
  config = cases.config_of(
    3, source_lengths=(4,), acceptance_rule="coupling", record_top_k=0
  )
  policy = dataclasses.replace(POLICY, costs=(TABLE,))
  found = paired(model, tables, dataclasses.replace(config, adaptive=policy)).run(
    cases.sampled_requests()
  )
  plain = engine.Engine(config, model, tables[0]).run(cases.sampled_requests())
  assert cases.texts(found) == cases.texts(plain)
  assert len(set(map(tuple, cases.texts(found)))) > len(found) // 2
  assert any(done.drafted for done in found)


def test_k_of_zero_drafts_nothing_and_marks_no_errors(monkeypatch):
  scheduled(monkeypatch, (0,))
  prefills = counted(monkeypatch, "prefill_draft")
  for done in make().run(cases.greedy_requests()):
    assert (done.drafted, done.target_calls) == (0, len(done.tokens))
    assert not np.asarray(done.batch.records.error).any()
  assert not prefills  # the draft did not even read a prompt


def counted(monkeypatch, name, stand_in=None):
  """Records the calls of a function of `steps`, which `stand_in` may replace."""
  made, function = [], stand_in or getattr(steps, name)

  def call(*args):
    made.append(args)
    return function(*args)

  monkeypatch.setattr(engine, "steps", harness.Changed(steps, **{name: call}))
  return made


# --- Catching up --------------------------------------------------------------------


def accepted_shares(monkeypatch, **faults):
  """Accepted / drafted tokens of a draft equal to the target that pauses at times."""
  scheduled(monkeypatch, (0, 0, 3, 0, 3))
  for name, stand_in in faults.items():
    counted(monkeypatch, name, stand_in)
  found = make("same").run(cases.greedy_requests())
  assert cases.texts(found) == cases.expected()
  assert sum(done.drafted for done in found) > 10
  return sum(d.accepted for d in found) / sum(d.drafted for d in found)


def test_draft_equal_to_the_target_is_fully_accepted_after_pauses(monkeypatch):
  assert accepted_shares(monkeypatch) == 1.0


def test_skipped_draft_prefill_lowers_acceptance(monkeypatch):
  """Control: the draft attends to the prompt of an earlier request."""

  def pretend(spec, served, state, batch):
    cache = state.draft_cache
    found = cache.replace(length=cache.length.at[batch.slots[0]].set(0))
    return state.replace(draft_cache=found)

  assert accepted_shares(monkeypatch, prefill_draft=pretend) < 0.9


def behind(lengths, fed, limit):
  """Rows that emitted `lengths` tokens and whose draft has read `fed` inputs.

  Returns the rows, and the draft cache that is expected after catching up.
  """
  rows = len(lengths)
  source, mask = harness.reader_sources(rows, 6, 0)
  params, settings_ = cases.target_params(), harness.settings_of(rows, max_length=limit)
  state = harness.start(
    cases.TARGET, params, source, mask, settings_, limit, cases.TARGET, params
  )
  tokens = np.random.default_rng(0).integers(2, cases.VOCAB, state.tokens.shape)
  inputs = jnp.asarray(np.pad(tokens, ((0, 0), (1, 0)))[:, :-1], jnp.int32)
  wanted = jnp.asarray([max(length - 1, 0) for length in lengths], jnp.int32)
  complete = state.draft_cache.replace(tokens=inputs, length=wanted)
  unfed = jnp.arange(inputs.shape[1])[None] >= jnp.asarray(fed)[:, None]
  partial = complete.replace(
    tokens=jnp.where(unfed, 0, inputs), length=jnp.asarray(fed, jnp.int32)
  )
  state = state.replace(
    tokens=jnp.asarray(tokens, jnp.int32),
    length=jnp.asarray(lengths, jnp.int32),
    draft_cache=partial,
  )
  return state, complete


def differing(found, expected):
  """Indices of the rows whose lengths or valid entries differ."""
  return {
    row
    for row, length in enumerate(np.asarray(expected.length))
    if int(found.length[row]) != length
    or (found.tokens[row, :length] != expected.tokens[row, :length]).any()
  }


def caught_up(state):
  drafter = drafters.from_model(cases.TARGET)
  return drafter.catch_up(cases.target_params(), state.draft_cache, state)


def test_cache_after_catching_up_equals_a_complete_one():
  """Rows lag by several chunks or not at all, or end at the limit."""
  state, expected = behind([20, 20, 3, 0, 17, 9], [0, 18, 2, 0, 1, 7], limit=20)
  assert not differing(caught_up(state), expected)
  level = state.draft_cache.replace(length=expected.length)
  # Control: setting the lengths without feeding the inputs is not enough.
  assert differing(level, expected) == {0, 1, 4, 5}


def test_catching_up_ignores_stopped_rows():
  state, _ = behind([20, 5], [0, 4], limit=20)
  reasons = jnp.asarray([StopReason.EMPTY, StopReason.RUNNING], jnp.int32)
  assert caught_up(state.replace(stop_reason=reasons)).length.tolist() == [0, 4]


def test_buffer_has_room_for_a_chunk_at_the_limit():
  assert drafters.CHUNK <= state_lib.buffer_length(0)


# --- With the policy ----------------------------------------------------------------


def test_policy_drafts_with_a_good_draft_and_not_with_a_poor_one():
  drafted = {}
  for kind in ("same", "unrelated"):
    policy = dataclasses.replace(
      POLICY, costs=(RoundCosts((1.0, 1.4, 2.2), 0.1, 0.1),) * 2
    )
    requests = [r for _ in range(3) for r in cases.greedy_requests()]
    found = make(kind, policy=policy).run(requests)
    assert cases.texts(found) == cases.expected() * 3
    drafted[kind] = np.mean([done.drafted / done.target_calls for done in found[9:]])
  assert drafted["unrelated"] < 0.7 < 1.5 < drafted["same"]


def test_run_with_given_costs_is_repeatable():
  found = [
    [(done.target_calls, done.drafted) for done in make().run(requests)]
    for requests in (cases.greedy_requests(), cases.greedy_requests())
  ]
  assert found[0] == found[1]


def test_rows_in_flight_continue_in_another_engine(monkeypatch):
  """The saved JSON holds the policy, and which rows still lack the draft prefill."""
  scheduled(monkeypatch, (0,))
  first, requests = make(), cases.greedy_requests()
  for request in reversed(requests):  # the longest one is admitted last
    first.submit(request)
  finished = first.step()  # the controller drafts until its first choice
  for _ in range(len(requests)):
    if any(slot["lacks_draft"] for slot in first.state()[1]["slots"] if slot):
      break
    finished += first.step()
  arrays, held = first.state()
  arrays = jax.tree.map(jnp.asarray, jax.tree.map(np.array, arrays))
  held, second = json.loads(json.dumps(held)), make(policy=measured_policy())
  second.restore(arrays, held, requests.__getitem__, cases.draft_params("close"))
  assert json.loads(json.dumps(second.state()[1])) == held
  assert any(slot["lacks_draft"] for slot in held["slots"] if slot)

  def rest(decoder):
    scheduled(monkeypatch, (0, 3, 1, 0))
    return cases.drained(decoder)

  here, there = rest(first), rest(second)
  assert cases.by_tag(finished + there) == cases.expected()
  for one, other in zip(here, there, strict=True):
    jax.tree.map(np.testing.assert_array_equal, one.batch, other.batch)
    assert (one.drafted, one.accepted) == (other.drafted, other.accepted)
  learnt, alike = (found.state()[1]["controller"]["state"] for found in (first, second))
  assert learnt == alike


def measured_policy():
  return dataclasses.replace(POLICY, costs=())


def test_costs_are_measured_if_none_are_given():
  decoder = make(policy=measured_policy())
  assert cases.texts(decoder.run(cases.greedy_requests())) == (cases.expected())
  tables = decoder.state()[1]["controller"]["costs"]
  kinds = [(bucket, sampled) for bucket, sampled, _ in tables]
  assert sorted(kinds) == sorted(itertools.product(BUCKETS, (False, True)))
  for *_, table in tables:
    ms = list(table["round_ms"])
    assert len(ms) == len(KS) and ms == sorted(ms) and ms[0] > 0
    assert table["prefill_ms"] > 0 and table["chunk_ms"] >= 0


def test_engine_without_a_draft_ignores_the_policy():
  config = cases.config_of(3, adaptive=POLICY)
  plain = engine.Engine(config, cases.TARGET, cases.target_params())
  assert cases.texts(plain.run(cases.greedy_requests())) == (cases.expected())
  assert not any(done.drafted for done in plain.run(cases.greedy_requests()))


# --- Compilation, devices, settings -------------------------------------------------


def test_no_k_compiles_anything_after_warm_up(monkeypatch):
  model = testing.tabular_model(VOCAB, "compiled here alone")
  tables = [jnp.asarray(testing.random_table(VOCAB, seed)) for seed in (0, 1, 2)]
  config = cases.config_of(2, record_top_k=4, adaptive=POLICY)
  ready = paired(model, tables, config)
  with Compilations() as warming:
    ready.warm_up()
  assert warming.count > 0 and ready.in_flight == 0 and ready.state()[0] is None
  fresh = paired(model, tables, config).state()[1]["controller"]["state"]
  # The warm-up requests do not change the state of the policy.
  assert ready.state()[1]["controller"]["state"] == fresh
  noted = scheduled(monkeypatch)
  with Compilations() as serving:
    requests = zip(cases.sampled_requests(), cases.prompts(12), strict=True)
    for version, (request, tokens) in enumerate(requests):
      ready.submit(dataclasses.replace(request, tokens=tokens % VOCAB))
      ready.step()
      ready.swap(tables[1 + version % 2], version)
    cases.drained(ready)
  assert serving.count == 0
  assert {k for k, _ in noted} == set(KS) and any(k and ms for k, ms in noted)
  other = dataclasses.replace(
    config, adaptive=dataclasses.replace(POLICY, candidates=(0, 2, 3))
  )
  scheduled(monkeypatch, (2,))
  with Compilations() as more:  # control: another K does compile
    paired(model, tables, other).run([engine.Request(np.array([3, 1], np.int32))])
  assert more.count > 0


def test_rows_split_over_devices_give_the_same_outputs(monkeypatch):
  scheduled(monkeypatch)
  partitioner = sharding.make(sharding.PartitionConfig(data=2))
  model = testing.tabular_model(VOCAB)
  tables = [jnp.asarray(testing.random_table(VOCAB, seed)) for seed in (0, 1)]
  policy = dataclasses.replace(POLICY, costs=(TABLE,))
  config = cases.config_of(2, source_lengths=(4,), record_top_k=4, adaptive=policy)
  greedy = [
    dataclasses.replace(request, sampling=engine.SamplingConfig())
    for request in cases.sampled_requests()
  ]
  placed = [partitioner.place_params(model, table) for table in tables]
  split = engine.Engine(config, model, placed[0], model, placed[1], partitioner)
  whole = engine.Engine(config, model, tables[0])
  assert cases.texts(split.run(greedy)) == cases.texts(whole.run(greedy))


def test_gin_builds_the_same_policy():
  found, _ = settings.load(OnlineConfig, ["testing/tiny_online.gin"], BINDINGS)
  table = RoundCosts((1.0, 1.5, 2.0), chunk_ms=0.5)
  expected = engine.AdaptiveConfig(candidates=(0, 2, 5), costs=(table,))
  assert found.decoding.adaptive == expected


BINDINGS = (
  "PairConfig.target = 't'",
  "PairConfig.draft = 'd'",
  "DecodingConfig.adaptive = @AdaptiveConfig()",
  "DecodingConfig.num_draft_tokens = 7",
  "AdaptiveConfig.candidates = (0, 2, 5)",
  "AdaptiveConfig.costs = [@RoundCosts()]",
  "RoundCosts.round_ms = [1.0, 1.5, 2.0]",
  "RoundCosts.chunk_ms = 0.5",
)


@pytest.mark.parametrize(
  ("policy", "largest"),
  [
    (dataclasses.replace(POLICY, candidates=(0, 4, 5)), 3),
    (dataclasses.replace(POLICY, costs=(TABLE,) * 3), 3),
  ],
)
def test_policy_must_fit_the_decoding_shapes(policy, largest):
  with pytest.raises(ValueError, match=r"DecodingConfig\.adaptive: received"):
    cases.config_of(1, num_draft_tokens=largest, adaptive=policy)
