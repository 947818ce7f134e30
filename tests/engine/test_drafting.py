"""With a changing K, outputs, records and caches equal those of a fixed K."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import harness
from engine import cases

from osd_jax import base
from osd_jax.costs.table import RoundCosts
from osd_jax.decoding import drafters
from osd_jax.engine import engine
from osd_jax.engine.requests import AdaptiveConfig, Request, SamplingConfig

BUCKETS = cases.BUCKETS
KS = (0, 1, 3)
TABLE = RoundCosts((1.0, 1.3, 1.6), chunk_ms=0.3, prefill_ms=0.5)
POLICY = AdaptiveConfig(candidates=KS, costs=(TABLE,) * len(BUCKETS))
CYCLE = (3, 0, 0, 1, 0, 3, 3, 0, 0, 0)


def make(kind="close", rows=3, policy=POLICY, **changes):
  """An engine whose draft has the target's shape."""
  config = cases.config_of(rows, adaptive=policy, **changes)
  draft = cases.TARGET, cases.draft_params(kind)
  return engine.Engine(config, cases.TARGET, cases.target_params(), *draft)


# --- Outputs and records ------------------------------------------------------------


def warm_requests():
  """Sampled requests with the prompts of the greedy ones."""
  requests = zip(cases.sampled_requests(9), cases.prompts(), strict=True)
  return [
    dataclasses.replace(request, tokens=tokens, tag=tag)
    for tag, (request, tokens) in enumerate(requests)
  ]


@pytest.mark.parametrize(
  ("rows", "rule"), [(1, "rejection"), (3, "rejection"), (3, "coupling")]
)
def test_outputs_and_records_equal_plain_decoding_with_any_k(rows, rule):
  """Prompts of different lengths, refills and swaps, and K = 0 in between."""
  requests = warm_requests() if rule == "coupling" else cases.greedy_requests()
  decoder = make(rows=rows, acceptance_rule=rule)
  schedule = cases.Scheduled(decoder, CYCLE)
  for request in requests:
    decoder.submit(request)
  finished, kinds = [], ("far", "same", "close")
  while decoder.in_flight:
    finished += decoder.step()
    version = decoder.draft_version + 1
    decoder.swap(cases.draft_params(kinds[version % 3]), version)
  config = cases.config_of(rows, acceptance_rule=rule)
  plain = engine.Engine(config, cases.TARGET, cases.target_params()).run(requests)
  assert cases.by_tag(finished) == cases.by_tag(plain)
  assert len(set(map(tuple, cases.texts(plain)))) > len(plain) // 2
  if rule != "coupling":
    assert cases.by_tag(finished) == cases.expected()
  assert set(schedule.turns) == set(KS)
  for done in finished:
    cases.check_records(done)
    records = jax.tree.map(lambda leaf: np.asarray(leaf)[0], done.batch.records)
    count = len(done.tokens)
    assert done.drafted - done.accepted == records.error[:count].sum()
    assert 0 <= done.accepted + done.target_calls - count <= 1


# --- Catching up --------------------------------------------------------------------


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


def test_cache_after_catching_up_equals_a_complete_one():
  """Rows lag by several chunks or not at all, or end at the limit."""
  state, expected = behind([20, 20, 3, 0, 17, 9], [0, 18, 2, 0, 1, 7], limit=20)
  drafter = drafters.ModelDrafter(cases.TARGET)
  fed = drafter.catch_up(cases.target_params(), state.draft_cache, state)
  assert not differing(fed, expected)
  level = state.draft_cache.replace(length=expected.length)
  # Control: setting the lengths without feeding the inputs is not enough.
  assert differing(level, expected) == {0, 1, 4, 5}


def test_catching_up_ignores_stopped_rows():
  state, _ = behind([20, 5], [0, 4], limit=20)
  reasons = jnp.asarray([base.StopReason.EMPTY, base.StopReason.RUNNING], jnp.int32)
  state = state.replace(stop_reason=reasons)
  drafter = drafters.ModelDrafter(cases.TARGET)
  fed = drafter.catch_up(cases.target_params(), state.draft_cache, state)
  assert fed.length.tolist() == [0, 4]


# --- With the policy ----------------------------------------------------------------


def test_policy_drafts_with_a_good_draft_and_not_with_a_poor_one():
  policy = dataclasses.replace(
    POLICY, costs=(RoundCosts((1.0, 1.4, 2.2), 0.1, 0.1),) * 2
  )
  drafted = {}
  for kind in ("same", "unrelated"):
    answers = make(kind, policy=policy).run(3 * cases.greedy_requests())
    assert cases.texts(answers) == cases.expected() * 3
    drafted[kind] = np.mean([done.drafted / done.target_calls for done in answers[9:]])
  assert drafted["unrelated"] < 0.7 < 1.5 < drafted["same"]


def test_request_that_must_not_draft_leaves_the_others_alone():
  requests = cases.greedy_requests()
  whole = cases.decoder(3).run(requests)
  mixed = [
    dataclasses.replace(request, speculative=number % 3 > 0)
    for number, request in enumerate(requests)
  ]
  answers = cases.decoder(3).run(mixed)
  assert cases.texts(answers) == cases.expected()
  for request, done, free in zip(mixed, answers, whole, strict=True):
    counts = (free.target_calls, free.drafted, free.accepted)
    if not request.speculative:
      counts = (len(done.tokens), 0, 0)
    assert (done.target_calls, done.drafted, done.accepted) == counts


def test_rows_in_flight_continue_in_another_engine():
  """The saved JSON holds the policy, and which rows still lack the draft prefill."""
  first, requests = make(), cases.greedy_requests()
  cases.Scheduled(first, (0,))
  for request in reversed(requests):  # the longest one is admitted last
    first.submit(request)
  finished = first.step()  # the controller drafts until its first choice
  while not any(slot and slot["lacks_draft"] for slot in first.state()[1]["slots"]):
    finished += first.step()
  arrays, held = first.state()
  arrays = jax.tree.map(jnp.asarray, jax.tree.map(np.array, arrays))
  held = json.loads(json.dumps(held))
  second = make(policy=dataclasses.replace(POLICY, costs=()))
  shapes = second.structure(held)
  jax.tree.map(lambda a, b: np.testing.assert_equal(a.shape, b.shape), arrays, shapes)
  second.restore(arrays, held, requests.__getitem__, cases.draft_params("close"))
  assert json.loads(json.dumps(second.state()[1])) == held
  schedules = [cases.Scheduled(each, (0, 3, 1, 0)) for each in (first, second)]
  here, there = cases.drained(first), cases.drained(second)
  # The tokens of the saved rows are not counted again.
  assert schedules[0].results == schedules[1].results
  assert schedules[0].reported == schedules[1].reported
  assert cases.by_tag(finished + there) == cases.expected()
  for one, other in zip(here, there, strict=True):
    jax.tree.map(np.testing.assert_array_equal, one.batch, other.batch)
    assert (one.drafted, one.accepted) == (other.drafted, other.accepted)


def test_greedy_and_sampled_rounds_are_measured_if_no_costs_are_given():
  decoder = make(policy=dataclasses.replace(POLICY, costs=()))
  assert cases.texts(decoder.run(cases.greedy_requests())) == cases.expected()
  assert sorted(decoder.measured) == sorted(BUCKETS)
  for costs in decoder.measured.values():
    assert costs.ms.shape[1:] == (2, 2, len(KS))  # sampled, rows, K
    assert (np.diff(costs.ms) >= 0).all() and (costs.ms > 0).all()
    assert costs.prefill_ms > 0 and costs.chunk_ms >= 0


@pytest.mark.parametrize("first", ["greedy", "sampled"])
def test_sampled_batches_use_the_sampled_cost_table(first):
  """Drafting pays for all-greedy batches alone; mixed batches use the sampled table."""
  pays, never = ((1.0, ms, ms) for ms in (1.01, 1e3))
  costs = RoundCosts(((pays,), (never,)))  # greedy, sampled
  policy = dataclasses.replace(POLICY, costs=(costs,) * len(BUCKETS))
  decoder = make("same", rows=2, policy=policy)
  greedy = [dataclasses.replace(r, tag=None) for r in cases.greedy_requests()]
  warm = SamplingConfig(temperature=1.0)
  sampled = [dataclasses.replace(r, sampling=warm, tag="sampled") for r in greedy]
  batches = {"greedy": greedy, "sampled": sampled, "mixed": [*greedy, *sampled]}
  shares = {}
  for kind in (first, *batches):  # the table is chosen in the first calls of a batch
    answers = decoder.run(batches[kind])
    if kind == "mixed":
      answers = [done for done in answers if done.request.tag]
    calls_made = sum(done.target_calls for done in answers)
    shares[kind] = sum(done.drafted for done in answers) / calls_made
  assert shares["greedy"] > 1.5 and max(shares["sampled"], shares["mixed"]) < 0.5


# --- What the controller is told ------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3])
def test_controller_is_told_what_the_draft_needs_and_what_rows_emit(rows):
  decoder = make(rows=rows)
  requests = [Request(tokens) for tokens in cases.prompts()]
  schedule = cases.Scheduled(decoder, (0, 0, 0, 1, 1))
  answers = decoder.run(requests)
  assert [chunks for chunks, _ in schedule.reported] == schedule.needed
  assert {(0, 0), (1, 1)} <= set(schedule.reported)  # nothing, or both are missing
  prefills = sum(prefills for _, prefills in schedule.reported)
  assert prefills == len(schedule.late) == len(set(schedule.late)) > 0
  assert prefills + schedule.charged <= len(requests)
  totals = {
    name: sum(sum(getattr(result, name)) for result in schedule.results)
    for name in ("emitted", "judged", "accepted")
  }
  assert totals == {
    "emitted": sum(len(done.tokens) for done in answers),
    "judged": sum(done.drafted for done in answers),
    "accepted": sum(done.accepted for done in answers),
  }
  assert min(totals.values()) > 0


def test_requests_after_a_probe_are_not_prefilled_for_the_draft():
  """Requests of one token; every second one is decoded plainly, after a probe."""
  decoder = make(rows=1)
  schedule = cases.Scheduled(decoder, (-1, 0))
  decoder.run([Request(tokens, max_new_tokens=1) for tokens in cases.prompts(6)])
  assert schedule.charged == 1  # of the first request, because engines begin drafting
  assert schedule.reported == [(0, 0), (0, 1), (0, 1)]
