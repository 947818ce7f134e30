"""An engine whose K changes: outputs, records and caches are those of a fixed K."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import Compilations
from decoding import harness
from engine import test_engine

from osd_jax import sharding, testing
from osd_jax.base import StopReason
from osd_jax.costs.table import RoundCosts
from osd_jax.decoding import state as state_lib
from osd_jax.engine import adaptive, catch_up, controller, engine
from osd_jax.engine import steps as calls
from osd_jax.main import settings
from osd_jax.online import OnlineConfig

BUCKETS = test_engine.BUCKETS
KS = (0, 1, 3)
TABLE = RoundCosts((1.0, 1.3, 1.6), chunk_ms=0.3, prefill_ms=0.5)
POLICY = adaptive.AdaptiveConfig(
  candidates=KS, rounds_per_call=2, costs=(TABLE,) * len(BUCKETS)
)
CYCLE = (3, 0, 0, 1, 0, 3, 3, 0, 0, 0)
VOCAB = 8

family = harness.family_fixture(vars(test_engine), autouse=True)


def scheduled(monkeypatch, cycle=CYCLE):
  """Makes K follow a cycle, and notes what was called with it."""
  turns, noted = itertools.cycle(cycle), []

  def choose(config, costs, state, rows, missing_ms=0.0):
    noted.append((next(turns), missing_ms))
    return dataclasses.replace(state, num_draft_tokens=noted[-1][0])

  changed = harness.Changed(adaptive, choose=choose)
  monkeypatch.setattr(controller, "adaptive", changed)
  return noted


def make(kind="close", rows=3, policy=POLICY, **changes):
  config = test_engine.config_of(rows, adaptive=policy, **changes)
  params = test_engine.target_params(), test_engine.draft_params(kind)
  return paired(test_engine.TARGET, params, config)


def paired(model, params, config):
  """An engine whose draft has the target's shape."""
  return engine.Engine(config, model, params[0], model, params[1])


# --- Outputs and records ------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3])
def test_greedy_outputs_and_records_equal_plain_whatever_k(monkeypatch, rows):
  """Ragged rows, refills and swaps in the middle; K = 0 between drafting."""
  noted, decoder = scheduled(monkeypatch), make(rows=rows)
  for request in test_engine.greedy_requests():
    decoder.submit(request)
  finished, kinds = [], ("far", "same", "close")
  while decoder.in_flight:
    finished += decoder.step()
    version = decoder.draft_version + 1
    decoder.swap(test_engine.draft_params(kinds[version % 3]), version)
  assert test_engine.by_tag(finished) == test_engine.expected()
  assert {k for k, _ in noted} == set(KS)
  assert any(k and missing for k, missing in noted)  # it did catch up
  for done in finished:
    test_engine.check_records(done)
    records = jax.tree.map(lambda leaf: np.asarray(leaf)[0], done.batch.records)
    count = len(done.tokens)
    assert done.drafted - done.accepted == records.error[:count].sum()
    assert 0 <= done.accepted + done.target_calls - count <= 1


def test_coupled_outputs_equal_plain_with_the_same_seed(monkeypatch):
  scheduled(monkeypatch)
  model = testing.tabular_model(VOCAB)
  tables = [jnp.asarray(testing.random_table(VOCAB, seed)) for seed in (0, 1)]
  config = test_engine.config_of(
    3, source_lengths=(4,), acceptance_rule="coupling", record_top_k=0
  )
  policy = dataclasses.replace(POLICY, costs=(TABLE,))
  found = paired(model, tables, dataclasses.replace(config, adaptive=policy)).run(
    test_engine.sampled_requests()
  )
  plain = engine.Engine(config, model, tables[0]).run(test_engine.sampled_requests())
  assert test_engine.texts(found) == test_engine.texts(plain)
  assert len(set(map(tuple, test_engine.texts(found)))) > len(found) // 2
  assert any(done.drafted for done in found)


def test_all_plain_writes_no_error_and_drafts_nothing(monkeypatch):
  scheduled(monkeypatch, (0,))
  prefills = counted(monkeypatch, "prefill_draft")
  for done in make().run(test_engine.greedy_requests()):
    assert (done.drafted, done.target_calls) == (0, len(done.tokens))
    assert not np.asarray(done.batch.records.error).any()
  assert not prefills  # the draft costs nothing at all


def counted(monkeypatch, name, stand_in=None):
  """Notes the calls of a compiled call, or replaces it."""
  made, function = [], stand_in or getattr(calls, name)

  def call(*args):
    made.append(args)
    return function(*args)

  monkeypatch.setattr(controller, "calls", harness.Changed(calls, **{name: call}))
  return made


# --- Catching up --------------------------------------------------------------------


def accepted_shares(monkeypatch, **faults):
  """Accepted / drafted of a draft equal to the target that idles now and then."""
  scheduled(monkeypatch, (0, 0, 3, 0, 3))
  for name, stand_in in faults.items():
    counted(monkeypatch, name, stand_in)
  found = make("same").run(test_engine.greedy_requests())
  assert test_engine.texts(found) == test_engine.expected()
  assert sum(done.drafted for done in found) > 10
  return sum(d.accepted for d in found) / sum(d.drafted for d in found)


def test_a_draft_equal_to_the_target_accepts_everything_after_it_idled(monkeypatch):
  assert accepted_shares(monkeypatch) == 1.0


def test_without_catching_up_it_does_not(monkeypatch):
  """Control; the outputs are the same even so."""

  def pretend(program, served, state):
    length = state_lib.fed_to_draft(state.length)
    found = state.draft_cache.replace(length=length)
    return state.replace(draft_cache=found)

  assert accepted_shares(monkeypatch, catch_up=pretend) < 0.9


def test_without_the_prefill_it_does_not(monkeypatch):
  """Control: cross-attention to another prompt."""

  def pretend(program, served, state, batch):
    cache = state.draft_cache
    found = cache.replace(length=cache.length.at[batch.slots[0]].set(0))
    return state.replace(draft_cache=found)

  assert accepted_shares(monkeypatch, prefill_draft=pretend) < 0.9


def behind(lengths, fed, limit):
  """Rows that emitted `lengths` tokens; `fed` of their inputs reached the draft."""
  rows = len(lengths)
  source, mask = testing.random_sources(rows, 6, 64, 0)
  served = test_engine.TARGET.prepare(test_engine.target_params())
  settings_ = harness.settings_of(rows, max_length=limit)
  state = harness.start(
    test_engine.TARGET,
    served,
    source,
    mask,
    settings_,
    limit,
    test_engine.TARGET,
    served,
  )
  tokens = np.random.default_rng(0).integers(2, 64, state.tokens.shape)
  state = state.replace(
    tokens=jnp.asarray(tokens, jnp.int32), length=jnp.asarray(lengths, jnp.int32)
  )
  inputs = np.pad(tokens, ((0, 0), (1, 0)))[:, : state.tokens.shape[1]]
  decode = jax.jit(test_engine.TARGET.decode)

  def fresh(length):
    """One forward pass over the inputs; entries behind `length` are stale."""
    cache = state.draft_cache
    _, cache = decode(served, jnp.asarray(inputs, jnp.int32), cache)
    return cache.replace(length=jnp.asarray(length, jnp.int32))

  wanted = [max(length - 1, 0) for length in lengths]
  return served, state.replace(draft_cache=fresh(fed)), fresh(wanted)


def differing(found, expected):
  """Rows whose valid self keys or values differ."""
  wrong = set()
  for row, length in enumerate(np.asarray(expected.length)):
    pairs = zip(
      (*found.self_keys, *found.self_values),
      (*expected.self_keys, *expected.self_values),
      strict=True,
    )
    same = all(
      np.allclose(one[row, :, :length], other[row, :, :length], atol=1e-5)
      for one, other in pairs
    )
    if not same or int(found.length[row]) != length:
      wrong.add(row)
  return wrong


CAUGHT_UP = jax.jit(catch_up.catch_up, static_argnums=0, compiler_options=harness.QUICK)


def test_a_cache_that_caught_up_equals_a_fresh_one():
  """Ragged lags, none, up to the limit; entries that were not fed are wiped before."""
  lengths, fed = [20, 20, 3, 0, 17, 9], [0, 18, 2, 0, 1, 7]
  served, state, expected = behind(lengths, fed, limit=20)
  wipe = lambda leaf: jnp.where(
    jnp.arange(leaf.shape[2])[None, None, :, None]
    < jnp.asarray(fed)[:, None, None, None],
    leaf,
    7.0,
  )
  cache = state.draft_cache
  cache = cache.replace(
    self_keys=tuple(map(wipe, cache.self_keys)),
    self_values=tuple(map(wipe, cache.self_values)),
  )
  found = CAUGHT_UP(test_engine.TARGET, served, state.replace(draft_cache=cache))
  assert not differing(found.draft_cache, expected)
  level = cache.replace(length=expected.length)
  assert differing(level, expected) == {0, 1, 4, 5}  # control: nothing fed


def test_stopped_rows_are_not_waited_for():
  served, state, _ = behind([20, 5], [0, 4], limit=20)
  reasons = jnp.asarray([StopReason.EMPTY, StopReason.RUNNING], jnp.int32)
  found = CAUGHT_UP(test_engine.TARGET, served, state.replace(stop_reason=reasons))
  assert found.draft_cache.length.tolist() == [0, 4]


def test_a_chunk_at_the_limit_stays_in_the_buffer():
  assert catch_up.CHUNK <= state_lib.buffer_length(0)


# --- With the policy ----------------------------------------------------------------


def test_a_draft_equal_to_the_target_is_used_in_full_and_a_poor_one_not():
  drafted = {}
  for kind in ("same", "far"):
    policy = dataclasses.replace(
      POLICY, costs=(RoundCosts((1.0, 1.4, 2.2), 0.1, 0.1),) * 2
    )
    requests = [r for _ in range(3) for r in test_engine.greedy_requests()]
    found = make(kind, policy=policy).run(requests)
    assert test_engine.texts(found) == test_engine.expected() * 3
    drafted[kind] = np.mean([done.drafted / done.target_calls for done in found[9:]])
  assert drafted["far"] < 0.7 < 1.5 < drafted["same"]


def test_a_run_with_given_costs_repeats():
  found = [
    [(done.target_calls, done.drafted) for done in make().run(requests)]
    for requests in (test_engine.greedy_requests(), test_engine.greedy_requests())
  ]
  assert found[0] == found[1]


@pytest.mark.parametrize("steps", [1, 3])
def test_rows_in_flight_continue_elsewhere(monkeypatch, steps):
  """After plain calls: the policy, and who lacks a prefill, come along as JSON."""
  scheduled(monkeypatch, (0,))
  first, requests = make(), test_engine.greedy_requests()
  for request in requests:
    first.submit(request)
  finished = sum((first.step() for _ in range(steps)), [])
  arrays, held = first.state()
  arrays = jax.tree.map(jnp.asarray, jax.tree.map(np.array, arrays))
  held, second = json.loads(json.dumps(held)), make(policy=measured_policy())
  second.restore(arrays, held, requests.__getitem__, test_engine.draft_params("close"))
  assert json.loads(json.dumps(second.state()[1])) == held
  assert steps == 1 or held["drafting"]["undrafted"]

  def rest(decoder):
    scheduled(monkeypatch, (0, 3, 1, 0))
    return test_engine.drained(decoder)

  here, there = rest(first), rest(second)
  assert test_engine.by_tag(finished + there) == test_engine.expected()
  for one, other in zip(here, there, strict=True):
    jax.tree.map(np.testing.assert_array_equal, one.batch, other.batch)
    assert (one.drafted, one.accepted) == (other.drafted, other.accepted)
  learnt, alike = (found.state()[1]["drafting"]["state"] for found in (first, second))
  assert learnt == alike


def measured_policy():
  return dataclasses.replace(POLICY, costs=())


def test_costs_are_measured_where_none_are_given():
  decoder = make(policy=measured_policy())
  assert test_engine.texts(decoder.run(test_engine.greedy_requests())) == (
    test_engine.expected()
  )
  tables = decoder.state()[1]["drafting"]["costs"]
  kinds = [(bucket, sampled) for bucket, sampled, _ in tables]
  assert sorted(kinds) == sorted(itertools.product(BUCKETS, (False, True)))
  for *_, table in tables:
    ms = list(table["round_ms"])
    assert len(ms) == len(KS) and ms == sorted(ms) and ms[0] > 0
    assert table["prefill_ms"] > 0 and table["chunk_ms"] >= 0


def test_plain_slots_ignore_the_policy():
  config = test_engine.config_of(3, adaptive=POLICY)
  plain = engine.Engine(config, test_engine.TARGET, test_engine.target_params())
  assert test_engine.texts(plain.run(test_engine.greedy_requests())) == (
    test_engine.expected()
  )
  assert plain.state()[1]["drafting"] is None


# --- Compilation, devices, settings -------------------------------------------------


def test_after_warm_up_nothing_compiles_whatever_k(monkeypatch, family):
  model = testing.tabular_model(VOCAB, f"compiled here alone, beside {family}")
  tables = [jnp.asarray(testing.random_table(VOCAB, seed)) for seed in (0, 1, 2)]
  config = test_engine.config_of(2, record_top_k=4, adaptive=POLICY)
  ready = paired(model, tables, config)
  with Compilations() as warming:
    ready.warm_up()
  assert warming.count > 0 and ready.in_flight == 0 and ready.state()[0] is None
  fresh = paired(model, tables, config).state()[1]["drafting"]["state"]
  assert (
    ready.state()[1]["drafting"]["state"] == fresh
  )  # made-up requests taught nothing
  noted = scheduled(monkeypatch)
  with Compilations() as serving:
    requests = zip(test_engine.sampled_requests(), test_engine.prompts(12), strict=True)
    for version, (request, tokens) in enumerate(requests):
      ready.submit(dataclasses.replace(request, tokens=tokens % VOCAB))
      ready.step()
      ready.swap(tables[1 + version % 2], version)
    test_engine.drained(ready)
  assert serving.count == 0
  assert {k for k, _ in noted} == set(KS) and any(k and ms for k, ms in noted)
  other = dataclasses.replace(
    config, adaptive=dataclasses.replace(POLICY, candidates=(0, 2, 3))
  )
  scheduled(monkeypatch, (2,))
  with Compilations() as more:  # control: another K does compile
    paired(model, tables, other).run([engine.Request(np.array([3, 1], np.int32))])
  assert more.count > 0


def test_rows_split_over_devices_write_the_same(monkeypatch):
  scheduled(monkeypatch)
  partitioner = sharding.make(sharding.PartitionConfig(data=2))
  model = testing.tabular_model(VOCAB)
  tables = [jnp.asarray(testing.random_table(VOCAB, seed)) for seed in (0, 1)]
  policy = dataclasses.replace(POLICY, costs=(TABLE,))
  config = test_engine.config_of(
    2, source_lengths=(4,), record_top_k=4, adaptive=policy
  )
  greedy = [
    dataclasses.replace(request, sampling=engine.SamplingConfig())
    for request in test_engine.sampled_requests()
  ]
  placed = [partitioner.place_params(model, table) for table in tables]
  split = engine.Engine(config, model, placed[0], model, placed[1], partitioner)
  whole = engine.Engine(config, model, tables[0])
  assert test_engine.texts(split.run(greedy)) == test_engine.texts(whole.run(greedy))


def test_gin_makes_the_same_policy():
  found, _ = settings.load(OnlineConfig, ["testing/tiny_online.gin"], BINDINGS)
  table = RoundCosts((1.0, 1.5, 2.0, 2.5, 3.0), chunk_ms=0.5)
  expected = adaptive.AdaptiveConfig(rounds_per_call=16, costs=(table,))
  assert found.decoding.adaptive == expected


BINDINGS = (
  "PairConfig.target = 't'",
  "PairConfig.draft = 'd'",
  "DecodingConfig.adaptive = @AdaptiveConfig()",
  "DecodingConfig.num_draft_tokens = 7",
  "AdaptiveConfig.rounds_per_call = 16",
  "AdaptiveConfig.costs = [@RoundCosts()]",
  "RoundCosts.round_ms = [1.0, 1.5, 2.0, 2.5, 3.0]",
  "RoundCosts.chunk_ms = 0.5",
)


@pytest.mark.parametrize(
  ("policy", "largest"),
  [
    (dataclasses.replace(POLICY, candidates=(0, 4, 5)), 3),
    (dataclasses.replace(POLICY, costs=(TABLE,) * 3), 3),
  ],
)
def test_a_policy_must_fit_the_shapes(policy, largest):
  with pytest.raises(ValueError, match=r"DecodingConfig\.adaptive: received"):
    test_engine.config_of(1, num_draft_tokens=largest, adaptive=policy)
