"""An engine that mixes its draft with the n-gram cache of its answers."""

import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest
from compilations import Compilations
from decoding import harness
from engine import cases

from osd_jax import base, sharding
from osd_jax.costs import table
from osd_jax.decoding import ngrams
from osd_jax.engine import controller, engine
from osd_jax.engine.requests import AdaptiveConfig, SamplingConfig

SIZE = 1 << 14  # so large that salts rarely push out entries of each other
needs_devices = pytest.mark.skipif(
  len(jax.devices()) < 4, reason="conftest.py fakes four devices"
)


def cached(kind="far", rows=2, partitioner=None, **changes):
  """An engine with a cache and a draft of this kind."""
  config = cases.config_of(rows, cache_tokens=SIZE, **changes)
  target, draft = cases.target_params(), cases.draft_params(kind)
  if partitioner is not None:
    target = partitioner.place_params(cases.TARGET, target)
    draft = partitioner.place_draft(cases.TARGET, draft)
  return engine.Engine(config, cases.TARGET, target, cases.TARGET, draft, partitioner)


def calls(finished):
  return sum(done.target_calls for done in finished)


def absorb_all(other, finished):
  for done in sorted(finished, key=lambda done: done.number):
    other.absorb(done)


@pytest.mark.parametrize("kind", ["close", "far"])
def test_greedy_outputs_equal_the_targets_and_cost_fewer_calls_each_time(kind):
  decoder, spent = cached(kind), []
  for _ in range(4):
    found = decoder.run(cases.greedy_requests())
    assert cases.texts(found) == cases.expected()
    spent.append(calls(found))
  if kind == "far":
    assert spent[-1] < 0.8 * spent[0]
  assert spent[-1] <= spent[0]


COSTS = table.RoundCosts(tuple(1.0 + 0.1 * k for k in (0, 1, 3, 7, 16)))


def by_worth(rows=2, kind="far", **changes):
  """An engine whose rounds draft as many tokens as are worth it."""
  adaptive = AdaptiveConfig(candidates=(0, 1, 3, 7, 16), costs=(COSTS, COSTS))
  return cached(kind, rows, num_draft_tokens=16, adaptive=adaptive, **changes)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", ["close", "far"])
def test_greedy_outputs_equal_the_targets_however_much_is_drafted(rows, kind):
  decoder, spent = by_worth(rows, kind), []
  assert decoder.spec.widths == (1, 3, 7, 16)
  for _ in range(4):
    found = decoder.run(cases.greedy_requests())
    assert cases.texts(found) == cases.expected()
    spent.append(calls(found))
  assert spent[-1] < 0.65 * spent[0]


@needs_devices
def test_mesh_drafts_blocks_of_a_chosen_k():
  mesh = sharding.make(sharding.PartitionConfig(2, 1))
  decoder = by_worth(partitioner=mesh)
  assert decoder.spec.widths == ()
  assert cases.texts(decoder.run(cases.greedy_requests())) == cases.expected()


@needs_devices
@pytest.mark.parametrize(("data", "model"), [(2, 1), (1, 2), (2, 2)])
def test_mesh_gives_the_outputs_and_the_memory_of_one_device(data, model):
  alone, spread = (
    cached(),
    cached(partitioner=sharding.make(sharding.PartitionConfig(data, model))),
  )
  for _ in range(2):
    one, other = (x.run(cases.greedy_requests()) for x in (alone, spread))
    assert cases.texts(one) == cases.texts(other) == cases.expected()
  memories = (jax.device_get(x.state()[0]["memory"]) for x in (alone, spread))
  table, spread_table = (memory.table for memory in memories)
  assert table.end == spread_table.end > 0
  if data == 1:  # with more parts, answers finish in another order
    jax.tree.map(np.testing.assert_array_equal, table, spread_table)


def test_requests_that_must_not_be_remembered_leave_no_trace():
  one, other = cached(), cached()
  requests = [
    dataclasses.replace(request, remember=False) for request in cases.greedy_requests()
  ]
  before = jax.device_get(one.state()[0]["memory"])
  absorb_all(other, one.run(requests))
  for found in (one, other):
    jax.tree.map(np.testing.assert_array_equal, found.state()[0]["memory"], before)
  one.run(cases.greedy_requests())  # control
  assert int(one.state()[0]["memory"].table.end) > 0


def alone():
  """An engine whose draft is the cache."""
  model = ngrams.build(cases.TARGET, SIZE)
  answers = model.init(jax.random.key(0))
  return engine.Engine(
    cases.config_of(2), cases.TARGET, cases.target_params(), model, answers
  )


def salted(salt, seed=0):
  requests = cases.greedy_requests(seed)
  return [dataclasses.replace(request, cache_salt=salt) for request in requests]


def each_call(finished):
  return [done.target_calls for done in finished]


@pytest.mark.parametrize("made", [alone, cached])
def test_answers_of_another_salt_save_no_call(made):
  """The scores of the mixture are set back: they are shared by all salts."""
  decoder, first = made(), (2**40 + 1, 2**40 + 2, 1, 0)
  cold = each_call(decoder.run(salted(first[0])))
  for salt in first[1:]:
    scores = decoder.spec.drafter.memory()
    decoder._serve_memory(scores.replace(table=decoder.memory.table))
    found = decoder.run(salted(salt))
    assert each_call(found) == cold and cases.texts(found) == cases.expected()
  # Control: each of them finds its own answers.
  for salt in first:
    assert sum(each_call(decoder.run(salted(salt)))) < sum(cold)


def test_answers_of_another_engine_keep_their_salt():
  one, other = alone(), alone()
  absorb_all(other, one.run(salted(5)))
  cold = each_call(alone().run(salted(6)))
  assert each_call(other.run(salted(6))) == cold
  assert sum(each_call(other.run(salted(5)))) < sum(cold)


def test_cache_alone_is_a_draft_model():
  model = ngrams.build(cases.TARGET, SIZE)
  answers = model.init(jax.random.key(0))
  decoder = engine.Engine(
    cases.config_of(2), cases.TARGET, cases.target_params(), model, answers
  )
  first = decoder.run(cases.greedy_requests())
  again = decoder.run(cases.greedy_requests())
  assert cases.texts(first) == cases.texts(again) == cases.expected()
  assert calls(again) < 0.6 * calls(first)
  assert int(answers.end) == 0  # another engine starts with an empty cache, too


def test_new_draft_and_warm_up_leave_the_cache_alone():
  decoder = cached()
  decoder.warm_up()
  assert int(decoder.state()[0]["memory"].table.end) == 0
  first = calls(decoder.run(cases.greedy_requests()))
  before = int(decoder.state()[0]["memory"].table.end)
  decoder.swap(cases.draft_params("far"), 1)
  decoder.warm_up()
  assert int(decoder.state()[0]["memory"].table.end) == before > 0
  assert calls(decoder.run(cases.greedy_requests())) < first


def test_cleared_engine_drafts_as_a_new_one():
  decoder = cached()
  before = jax.device_get(decoder.state()[0]["memory"])
  first, again = (calls(decoder.run(cases.greedy_requests())) for _ in range(2))
  assert again < first  # control
  counted = engine.steps.advance._cache_size()
  decoder.clear_memory()
  jax.tree.map(np.testing.assert_array_equal, decoder.state()[0]["memory"], before)
  assert calls(decoder.run(cases.greedy_requests())) == first
  assert engine.steps.advance._cache_size() == counted


def test_restored_engine_has_the_same_cache():
  one, other = cached(), cached()
  one.run(cases.greedy_requests())
  arrays, host = jax.tree.map(np.asarray, one.state()[0]), one.state()[1]
  shapes = jax.tree.map(lambda leaf: leaf.shape, other.structure(host))
  assert shapes == jax.tree.map(lambda leaf: leaf.shape, arrays)
  arrays = jax.tree.map(jax.numpy.asarray, arrays)
  other.restore(arrays, host, lambda tag: None, cases.draft_params("far"))
  ours, theirs = (x.run(cases.greedy_requests(seed=1)) for x in (one, other))
  assert [d.target_calls for d in ours] == [d.target_calls for d in theirs]
  jax.tree.map(
    np.testing.assert_array_equal, one.state()[0]["memory"], other.state()[0]["memory"]
  )


def test_answers_of_another_engine_are_drafted_from():
  one, other = cached(), cached()
  found = one.run(cases.greedy_requests())
  absorb_all(other, found)
  assert calls(other.run(cases.greedy_requests())) < calls(found)
  copied = cached()
  copied.copy_memory(one)
  one.run(cases.greedy_requests())  # donates its own arrays
  assert calls(copied.run(cases.greedy_requests())) < calls(found)


# --- The cache alone, while the draft rests -----------------------------------------

DEAR_MS = (1.0, 30.0, 50.0, 90.0, 200.0)


def with_cache_alone(draft_ms=COSTS.round_ms):
  """Costs of rounds with the draft, and of the cache alone."""
  return table.RoundCosts((((draft_ms,),), ((COSTS.round_ms,),)))


DEAR = with_cache_alone(DEAR_MS)


def priced(costs, rows=2, kind="far", **changes):
  """An engine that chooses between draft with cache, and the cache alone."""
  adaptive = AdaptiveConfig(candidates=(0, 1, 3, 7, 16), costs=(costs, costs))
  return cached(kind, rows, num_draft_tokens=16, adaptive=adaptive, **changes)


def modes(monkeypatch, cycle):
  """Makes the engine's calls follow a cycle of "draft" and "cache"; returns a list."""
  turns, noted = itertools.cycle(cycle), []

  def choose(costs, state, rows, missing_ms=0.0):
    noted.append(next(turns))
    count = costs.candidates[-1] if noted[-1] == "draft" else 0
    return dataclasses.replace(state, num_draft_tokens=count, probing=False)

  monkeypatch.setattr(controller, "ROUNDS_PER_CALL", 2)
  monkeypatch.setattr(controller, "choose", choose)
  return noted


CYCLES = [("cache",), ("cache", "draft"), ("draft", "draft", "cache", "cache", "cache")]


@pytest.mark.parametrize("cycle", CYCLES, ids="-".join)
@pytest.mark.parametrize("rows", [1, 3])
def test_greedy_outputs_equal_the_targets_whenever_the_draft_rests(
  monkeypatch, rows, cycle
):
  decoder = priced(with_cache_alone(), rows, "close")
  noted, spent = modes(monkeypatch, cycle), []
  for _ in range(2):
    found = decoder.run(cases.greedy_requests())
    assert cases.texts(found) == cases.expected()
    spent.append(calls(found))
  assert set(noted) == set(cycle)
  assert spent[1] < spent[0] < sum(map(len, cases.expected()))


def test_coupled_outputs_do_not_depend_on_when_the_draft_rests(monkeypatch):
  warm = [
    dataclasses.replace(
      request, sampling=SamplingConfig(temperature=1.0, seed=request.tag)
    )
    for request in cases.greedy_requests()
  ]
  rule = {"acceptance_rule": "coupling"}
  config = cases.config_of(2, **rule)
  plain = engine.Engine(config, cases.TARGET, cases.target_params())
  expected = cases.texts(plain.run(warm))
  costs = with_cache_alone()
  modes(monkeypatch, CYCLES[2])
  for decoder in (priced(costs, 3, "close", **rule), priced(costs, 1, **rule)):
    assert cases.texts(decoder.run(warm)) == expected


def test_draft_that_does_not_pay_rests_and_the_cache_goes_on():
  decoder, plain = priced(DEAR), sum(map(len, cases.expected()))
  for _ in range(3):
    found = decoder.run(cases.greedy_requests())
    assert cases.texts(found) == cases.expected()
  assert not decoder.state()[1]["controller"]["state"]["num_draft_tokens"]
  assert calls(found) < 0.6 * plain
  assert all(done.drafted == done.drafted_by_cache for done in found)
  # Control: without a price for the cache alone, both rest.
  silent = priced(table.RoundCosts(DEAR_MS))
  for _ in range(3):
    found = silent.run(cases.greedy_requests())
  assert calls(found) == plain


def share_of_draft(monkeypatch):
  """Accepted / drafted tokens of a draft equal to the target that rests at times."""
  decoder = priced(with_cache_alone(), 1, "same")
  modes(monkeypatch, ("cache", "cache", "draft", "cache", "draft"))
  found = decoder.run(cases.greedy_requests())
  assert cases.texts(found) == cases.expected()
  by_draft = sum(done.drafted - done.drafted_by_cache for done in found)
  assert by_draft > 10
  return sum(done.accepted - done.accepted_by_cache for done in found) / by_draft


def test_draft_that_has_rested_proposes_as_if_it_had_not(monkeypatch):
  assert share_of_draft(monkeypatch) == 1.0
  # Control: the draft attends to the prompt of an earlier request.
  skipped = harness.Changed(engine.steps, prefill_draft=lambda *given: given[2])
  monkeypatch.setattr(engine, "steps", skipped)
  assert share_of_draft(monkeypatch) < 0.9


def test_rest_compiles_nothing_after_the_warm_up():
  decoder = priced(DEAR)
  decoder.warm_up()
  with Compilations() as compilations:
    decoder.run(cases.greedy_requests())
    assert not decoder.state()[1]["controller"]["state"]["num_draft_tokens"]
  assert compilations.count == 0


def test_rest_continues_from_a_checkpoint():
  one, other = priced(DEAR), priced(DEAR)
  for request in cases.greedy_requests():
    one.submit(request)
  before = [done for _ in range(3) for done in one.step()]
  arrays, host = jax.tree.map(np.asarray, one.state()[0]), one.state()[1]
  other.restore(
    jax.tree.map(jax.numpy.asarray, arrays),
    json.loads(json.dumps(host)),
    cases.greedy_requests().__getitem__,
    cases.draft_params("far"),
  )
  here, there = cases.drained(one), cases.drained(other)
  assert cases.by_tag(before + there) == cases.expected()
  assert [d.target_calls for d in here] == [d.target_calls for d in there]
  assert one.state()[1]["controller"] == other.state()[1]["controller"]


@needs_devices
def test_plain_steps_are_not_scored_for_the_draft_of_an_earlier_request(monkeypatch):
  """On a mesh both sources rest."""
  costs = (table.RoundCosts((1.0, 100.0)),) * 2
  adaptive = AdaptiveConfig(candidates=(0, 16), costs=costs)
  mesh = sharding.make(sharding.PartitionConfig(2, 1))
  decoder = cached(adaptive=adaptive, num_draft_tokens=16, partitioner=mesh)
  scored = []
  for mode in ("draft", "plain"):
    modes(monkeypatch, (mode,))
    if mode == "plain":  # from the first request on
      state = decoder.controller.state
      decoder.controller.state = dataclasses.replace(state, num_draft_tokens=0)
    decoder.run(cases.greedy_requests())
    scored.append(jax.device_get(decoder.state()[0]["memory"].scored))
  np.testing.assert_array_equal(*scored)
