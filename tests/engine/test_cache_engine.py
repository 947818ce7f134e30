"""An engine that mixes its draft with the n-gram cache of its answers."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from compilations import Compilations
from engine import cases

from osd_jax import sharding
from osd_jax.costs import table
from osd_jax.decoding import ngrams, sampling
from osd_jax.engine import engine, steps
from osd_jax.engine.requests import AdaptiveConfig, SamplingConfig

SIZE = 1 << 14  # so large that salts rarely push out entries of each other
needs_devices = pytest.mark.skipif(
  len(jax.devices()) < 4, reason="conftest.py fakes four devices"
)


def cached(kind="far", rows=2, partitioner=None, **changes):
  """An engine with a cache and a draft of this kind."""
  config = config_of(rows, cache_tokens=SIZE, **changes)
  target, draft = cases.target_params(), cases.draft_params(kind)
  if partitioner is not None:
    target = partitioner.place_params(cases.TARGET, target)
    draft = partitioner.place_draft(cases.TARGET, draft)
  return engine.Engine(config, cases.TARGET, target, cases.TARGET, draft, partitioner)


def config_of(rows, **changes):
  """One bucket, so that less is compiled."""
  return cases.config_of(rows, **{"source_lengths": cases.BUCKETS[1:], **changes})


# Milliseconds of rounds that draft 0, 1, 3 and 7 tokens.
KS, DRAFT_MS, DEAR_MS = (0, 1, 3, 7), (1.0, 1.1, 1.3, 1.7), (1.0, 30.0, 50.0, 90.0)


def priced(draft_ms=DRAFT_MS, *args, has_cache_alone=True, **changes):
  """An engine whose rounds draft as many tokens as are worth it."""
  costs = table.RoundCosts(draft_ms)
  if has_cache_alone:
    costs = table.RoundCosts((((draft_ms,),), ((DRAFT_MS,),)))
  adaptive = AdaptiveConfig(candidates=KS, costs=(costs,))
  return cached(*args, num_draft_tokens=7, adaptive=adaptive, **changes)


def alone():
  """An engine whose draft is the cache."""
  model = ngrams.build(cases.TARGET, SIZE)
  answers = model.init(jax.random.key(0))
  return engine.Engine(
    config_of(2), cases.TARGET, cases.target_params(), model, answers
  )


def calls(finished):
  return sum(done.target_calls for done in finished)


def memory(decoder):
  return jax.device_get(decoder.memory)


def absorb_all(other, finished):
  for done in sorted(finished, key=lambda done: done.number):
    other.absorb(done)


# First, because other tests would compile for it.
def test_draft_that_does_not_pay_rests_and_the_cache_goes_on():
  decoder, plain = priced(DEAR_MS), sum(map(len, cases.expected()))
  decoder.warm_up()
  with Compilations() as compilations:
    for _ in range(3):
      answers = decoder.run(cases.greedy_requests())
      assert cases.texts(answers) == cases.expected()
  assert compilations.count == 0
  assert not decoder.controller.state.num_draft_tokens
  assert calls(answers) < 0.6 * plain
  assert all(done.drafted == done.drafted_by_cache for done in answers)
  # Control: without a price for the cache alone, both rest.
  silent = priced(DEAR_MS, has_cache_alone=False)
  for _ in range(3):
    answers = silent.run(cases.greedy_requests())
  assert calls(answers) == plain


# --- Outputs ------------------------------------------------------------------------

MAKERS = {
  "blocks, close": (lambda: cached("close"), None),
  "blocks, far, two buckets": (lambda: cached(source_lengths=cases.BUCKETS), None),
  "cache alone": (alone, None),
  "by worth, close": (lambda: priced(DRAFT_MS, "close"), None),
  "draft rests, 1 row": (lambda: priced(rows=1, has_cache_alone=False), (0,)),
  "draft rests": (lambda: priced(DRAFT_MS, "close"), (7, 7, 0, 0, 0)),
}


@pytest.mark.parametrize(("make", "cycle"), MAKERS.values(), ids=MAKERS)
def test_outputs_equal_the_targets_and_cost_fewer_calls_each_time(make, cycle):
  decoder, spent = make(), []
  if cycle is not None:
    cases.Scheduled(decoder, cycle)
  for _ in range(4):
    answers = decoder.run(cases.greedy_requests())
    assert cases.texts(answers) == cases.expected()
    spent.append(calls(answers))
  assert spent[-1] <= 0.85 * spent[0] and spent[0] < sum(map(len, cases.expected()))


def test_coupled_outputs_do_not_depend_on_when_the_draft_rests():
  warm = [
    dataclasses.replace(
      request, sampling=SamplingConfig(temperature=1.0, seed=request.tag)
    )
    for request in cases.greedy_requests()
  ]
  rule = {"acceptance_rule": "coupling"}
  config = config_of(2, **rule)
  plain = engine.Engine(config, cases.TARGET, cases.target_params())
  expected = cases.texts(plain.run(warm))
  decoder = priced(DRAFT_MS, "close", **rule)
  cases.Scheduled(decoder, (7, 7, 0, 0, 0))
  assert cases.texts(decoder.run(warm)) == expected


@needs_devices
@pytest.mark.parametrize(("data", "model"), [(2, 1), (1, 2), (2, 2)])
def test_mesh_gives_the_outputs_and_the_memory_of_one_device(data, model):
  mesh = sharding.make(sharding.PartitionConfig(data, model))
  single, spread = cached(), cached(partitioner=mesh)
  for _ in range(2):
    one, other = (x.run(cases.greedy_requests()) for x in (single, spread))
    assert cases.texts(one) == cases.texts(other) == cases.expected()
  ours, theirs = memory(single).table, memory(spread).table
  assert ours.end == theirs.end > 0
  if data == 1:  # with more parts, answers finish in another order
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


# --- What the cache holds -----------------------------------------------------------


def test_requests_that_must_not_be_remembered_leave_no_trace():
  one, other = cached(), cached()
  requests = [
    dataclasses.replace(request, remember=False) for request in cases.greedy_requests()
  ]
  before = memory(one)
  absorb_all(other, one.run(requests))
  for decoder in (one, other):
    jax.tree.map(np.testing.assert_array_equal, memory(decoder), before)
  one.run(cases.greedy_requests())  # control
  assert memory(one).table.end > 0


def salted(salt, seed=0):
  requests = cases.greedy_requests(seed)
  return [dataclasses.replace(request, cache_salt=salt) for request in requests]


def each_call(finished):
  return [done.target_calls for done in finished]


@pytest.mark.parametrize("make", [alone, cached])
def test_answers_of_another_salt_save_no_call(make):
  """The scores of the mixture are set back: they are shared by all salts."""
  decoder, first = make(), (2**40 + 1, 2**40 + 2, 1, 0)
  cold = each_call(decoder.run(salted(first[0])))
  for salt in first[1:]:
    scores = decoder.spec.drafter.memory()
    decoder.memory = scores.replace(table=decoder.memory.table)
    answers = decoder.run(salted(salt))
    assert each_call(answers) == cold and cases.texts(answers) == cases.expected()
  # Control: each of them finds its own answers.
  for salt in first:
    assert sum(each_call(decoder.run(salted(salt)))) < sum(cold)


def test_answers_of_another_engine_keep_their_salt():
  one, other = alone(), alone()
  absorb_all(other, one.run(salted(5)))
  cold = each_call(alone().run(salted(6)))
  assert each_call(other.run(salted(6))) == cold
  assert sum(each_call(other.run(salted(5)))) < sum(cold)


def test_new_draft_and_warm_up_leave_the_cache_alone():
  decoder = cached(source_lengths=cases.BUCKETS)
  decoder.warm_up()
  assert memory(decoder).table.end == 0
  first = calls(decoder.run(cases.greedy_requests()))
  before = memory(decoder).table.end
  decoder.swap(cases.draft_params("far"), 1)
  decoder.warm_up()
  assert memory(decoder).table.end == before > 0
  assert calls(decoder.run(cases.greedy_requests())) < first


def test_prompts_of_a_longer_bucket_are_padded_with_no_token():
  """Else the n-gram cache would know a repeated token 0 from every prompt."""
  decoder = cached(rows=1, source_lengths=cases.BUCKETS)
  spec, served, buckets = decoder.spec, decoder.served, decoder.config.source_lengths
  settings = sampling.make_settings(1, max_length=decoder.config.target_length)
  rows = []
  for bucket in buckets:
    source = np.full((1, bucket), spec.target.pad_id, np.int32)
    source[:, : buckets[0]] = 7
    prompt = steps.PaddedPrompt(source, settings)
    (batch,) = steps.prefill_batches({0: prompt}, bucket, 1, 1)
    rows.append(steps.insert(spec, served, steps.empty(spec, served, bucket), batch))
  resized = steps.resize(spec, served, rows[0], buckets[1])
  for leaf, right in zip(jax.tree.leaves(resized), jax.tree.leaves(rows[1])):
    if np.issubdtype(leaf.dtype, np.integer):
      np.testing.assert_array_equal(leaf, right)


def test_cleared_engine_drafts_as_a_new_one():
  decoder = cached()
  before = memory(decoder)
  first, again = (calls(decoder.run(cases.greedy_requests())) for _ in range(2))
  assert again < first  # control
  with Compilations() as compilations:
    decoder.clear_memory()
    jax.tree.map(np.testing.assert_array_equal, memory(decoder), before)
    assert calls(decoder.run(cases.greedy_requests())) == first
  assert compilations.count == 0


def test_answers_of_another_engine_are_drafted_from():
  one, other, copied = cached(), cached(), cached()
  answers = one.run(cases.greedy_requests())
  absorb_all(other, answers)
  assert calls(other.run(cases.greedy_requests())) < calls(answers)
  copied.copy_memory(one)
  one.run(cases.greedy_requests())  # donates its own arrays
  assert calls(copied.run(cases.greedy_requests())) < calls(answers)


# --- The cache alone, while the draft rests -----------------------------------------


def test_rest_and_memory_continue_from_a_checkpoint():
  one, other = priced(DEAR_MS), priced(DEAR_MS)
  for request in cases.greedy_requests():
    one.submit(request)
  before = [done for _ in range(3) for done in one.step()]
  arrays, host = jax.tree.map(np.asarray, one.state()[0]), one.state()[1]
  shapes = jax.tree.map(lambda leaf: leaf.shape, other.structure(host))
  assert shapes == jax.tree.map(lambda leaf: leaf.shape, arrays)
  other.restore(
    jax.tree.map(jax.numpy.asarray, arrays),
    json.loads(json.dumps(host)),
    cases.greedy_requests().__getitem__,
    cases.draft_params("far"),
  )
  here, there = cases.drained(one), cases.drained(other)
  assert cases.by_tag(before + there) == cases.expected()
  assert each_call(here) == each_call(there)
  assert one.state()[1]["controller"] == other.state()[1]["controller"]
  jax.tree.map(np.testing.assert_array_equal, memory(one), memory(other))


@needs_devices
def test_plain_steps_are_not_scored_for_the_draft_of_an_earlier_request():
  """On a mesh both sources rest."""
  costs = (table.RoundCosts((1.0, 100.0)),)
  adaptive = AdaptiveConfig(candidates=(0, 3), costs=costs)
  mesh = sharding.make(sharding.PartitionConfig(2, 1))
  decoder = cached(adaptive=adaptive, partitioner=mesh)
  assert decoder.spec.widths == ()  # rounds draft blocks of a chosen K
  scored = []
  for k in (3, 0):
    cases.Scheduled(decoder, (k,))
    if not k:  # from the first request on
      state = decoder.controller.state
      decoder.controller.state = dataclasses.replace(state, num_draft_tokens=0)
    assert cases.texts(decoder.run(cases.greedy_requests())) == cases.expected()
    scored.append(memory(decoder).scored)
  np.testing.assert_array_equal(*scored)
