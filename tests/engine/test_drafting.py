"""With a changing K, outputs, records and caches equal those of a fixed K."""

import dataclasses
import itertools
import json
from typing import NamedTuple

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
from osd_jax.engine import controller, engine, measurement, steps
from osd_jax.engine.requests import AdaptiveConfig, Request, SamplingConfig

BUCKETS = cases.BUCKETS
KS = (0, 1, 3)
TABLE = RoundCosts((1.0, 1.3, 1.6), chunk_ms=0.3, prefill_ms=0.5)
POLICY = AdaptiveConfig(candidates=KS, costs=(TABLE,) * len(BUCKETS))
CYCLE = (3, 0, 0, 1, 0, 3, 3, 0, 0, 0)
VOCAB = 8


def scheduled(monkeypatch, cycle=CYCLE):
  """Makes K follow a cycle; returns a list of (K, missing_ms) of all choices."""
  turns, noted = itertools.cycle(cycle), []

  def choose(costs, state, rows, missing_ms=0.0):
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
  drafter = drafters.ModelDrafter(cases.TARGET)
  return drafter.catch_up(cases.target_params(), state.draft_cache, state)


def test_cache_after_catching_up_equals_a_complete_one():
  """Rows lag by several chunks or not at all, or end at the limit."""
  state, expected = behind([20, 20, 3, 0, 17, 9], [0, 18, 2, 0, 1, 7], limit=20)
  assert not differing(caught_up(state), expected)
  level = state.draft_cache.replace(length=expected.length)
  # Control: setting the lengths without feeding the inputs is not enough.
  assert differing(level, expected) == {0, 1, 4, 5}


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


def test_request_that_must_not_draft_leaves_the_others_alone():
  requests = cases.greedy_requests()
  whole = cases.decoder(3).run(requests)
  mixed = [
    dataclasses.replace(request, speculative=number % 3 > 0)
    for number, request in enumerate(requests)
  ]
  found = cases.decoder(3).run(mixed)
  assert cases.texts(found) == cases.expected()
  for request, done, free in zip(mixed, found, whole, strict=True):
    counts = (free.target_calls, free.drafted, free.accepted)
    if not request.speculative:
      counts = (len(done.tokens), 0, 0)
    assert (done.target_calls, done.drafted, done.accepted) == counts


def test_policy_does_not_draft_for_requests_that_must_not(monkeypatch):
  chosen, advance = [], steps.advance

  def noted(spec, num_draft_tokens, *arguments):
    chosen.append(num_draft_tokens)
    return advance(spec, num_draft_tokens, *arguments)

  compiled = harness.Changed(steps, advance=noted)
  monkeypatch.setattr(engine, "steps", compiled)
  table = RoundCosts((1.0, 1.4, 2.2), 0.1, 0.1)
  decoder = make("same", policy=dataclasses.replace(POLICY, costs=(table,) * 2))
  requests = cases.greedy_requests()
  mute = [dataclasses.replace(request, speculative=False) for request in requests]
  shares = []
  for asked in (requests, mute * 2, requests):
    chosen.clear()
    assert cases.texts(decoder.run(asked))[:9] == cases.expected()
    shares.append(np.mean(np.asarray(chosen) > 0))
  assert shares[1] == 0 < 0.8 < min(shares[0], shares[2])
  assert controller.acceptance(decoder.controller.state, 0) > 0.9


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
  shapes = second.structure(held)
  jax.tree.map(lambda a, b: np.testing.assert_equal(a.shape, b.shape), arrays, shapes)
  second.restore(arrays, held, requests.__getitem__, cases.draft_params("close"))
  assert json.loads(json.dumps(second.state()[1])) == held
  assert any(slot["lacks_draft"] for slot in held["slots"] if slot)

  def rest(decoder):
    scheduled(monkeypatch, (0, 3, 1, 0))
    observed, observe = [], decoder.controller.observe
    monkeypatch.setattr(
      decoder.controller,
      "observe",
      lambda call: (observed.append(call), observe(call)),
    )
    return cases.drained(decoder), observed

  (here, observed), (there, alike) = rest(first), rest(second)
  assert observed == alike  # the tokens of the saved rows are not counted again
  assert cases.by_tag(finished + there) == cases.expected()
  for one, other in zip(here, there, strict=True):
    jax.tree.map(np.testing.assert_array_equal, one.batch, other.batch)
    assert (one.drafted, one.accepted) == (other.drafted, other.accepted)
  learnt, alike = (found.state()[1]["controller"]["state"] for found in (first, second))
  assert learnt == alike


def measured_policy():
  return dataclasses.replace(POLICY, costs=())


def test_greedy_and_sampled_rounds_are_measured_if_no_costs_are_given(monkeypatch):
  decoder, temperatures = make(policy=measured_policy()), []

  def advance(spec, num_draft_tokens, served, rounds, state, prices=None):
    temperatures.append(tuple(np.asarray(state.settings.temperature).tolist()))
    return steps.advance(spec, num_draft_tokens, served, rounds, state, prices)

  monkeypatch.setattr(measurement, "steps", harness.Changed(steps, advance=advance))
  assert cases.texts(decoder.run(cases.greedy_requests())) == cases.expected()
  counts = {t: temperatures.count(t) for t in set(temperatures)}
  assert set(counts) == {(0.0,) * 3, (1.0,) * 3} and min(counts.values()) >= len(KS)
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
    found = decoder.run(batches[kind])
    if kind == "mixed":
      found = [done for done in found if done.request.tag]
    calls_made = sum(done.target_calls for done in found)
    shares[kind] = sum(done.drafted for done in found) / calls_made
  assert shares["greedy"] > 1.5 and max(shares["sampled"], shares["mixed"]) < 0.5


# --- Compilation, devices, settings -------------------------------------------------


@pytest.mark.parametrize("policy", [None, POLICY], ids=["fixed", "adaptive"])
def test_serving_compiles_nothing_after_warm_up(monkeypatch, policy):
  model = testing.tabular_model(VOCAB, f"compiled here alone, {policy}")
  tables = [jnp.asarray(testing.random_table(VOCAB, seed)) for seed in (0, 1, 2)]
  config = cases.config_of(2, record_top_k=4, adaptive=policy)
  ready = paired(model, tables, config)
  with Compilations() as warming:
    ready.warm_up()
  assert warming.count > 0 and ready.in_flight == 0 and ready.state()[0]["rows"] is None
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
  if policy:
    assert {k for k, _ in noted} == set(KS) and any(k and ms for k, ms in noted)
  longer = dataclasses.replace(config, target_length=cases.LENGTH + 1)
  with Compilations() as more:  # control: another shape does compile
    paired(model, tables, longer).run([Request(np.array([3, 1], np.int32))])
  assert more.count > 0


def test_rows_split_over_devices_give_the_same_outputs(monkeypatch):
  scheduled(monkeypatch)
  partitioner = sharding.make(sharding.PartitionConfig(data=2))
  model = testing.tabular_model(VOCAB)
  tables = [jnp.asarray(testing.random_table(VOCAB, seed)) for seed in (0, 1)]
  policy = dataclasses.replace(POLICY, costs=(TABLE,))
  config = cases.config_of(2, source_lengths=(4,), record_top_k=4, adaptive=policy)
  greedy = [
    dataclasses.replace(request, sampling=SamplingConfig())
    for request in cases.sampled_requests()
  ]
  placed = [partitioner.place_params(model, table) for table in tables]
  split = engine.Engine(config, model, placed[0], model, placed[1], partitioner)
  whole = engine.Engine(config, model, tables[0])
  assert cases.texts(split.run(greedy)) == cases.texts(whole.run(greedy))


# --- What the policy is told ----------------------------------------------------------


class Record(NamedTuple):
  """What the engine did and reported in one run.

  Attributes:
    missing: `missing_ms` as passed to `choose` before each call that drafted.
    done: milliseconds of late prefills and chunks before each call that drafted.
    prompts: prompts that the draft read, on insertion or later.
    chunks: number of chunks fed to the draft, by call.
    calls: what was passed to `observe`.
  """

  missing: list[float]
  done: list[float]
  prompts: list[tuple[int, ...]]
  chunks: list[int]
  calls: list[controller.RoundResult]


def recording(monkeypatch, cycle):
  """Makes K follow a cycle, negative for probes; returns the record of a run."""
  right = controller.observe
  record, turns = Record([], [], [], [], []), itertools.cycle(cycle)

  def choose(costs, state, rows, missing_ms):
    turn = next(turns)
    if turn:
      record.missing.append(missing_ms)
      record.done.append(0.0)
    return dataclasses.replace(state, num_draft_tokens=abs(turn), probing=turn < 0)

  def observe(costs, state, result):
    record.calls.append(result)
    return right(costs, state, result)

  def insert(spec, served, state, batch):
    record.prompts.append(tuple(batch.source[0]))
    return steps.insert(spec, served, state, batch)

  def prefill_draft(spec, served, state, batch):
    record.prompts.append(tuple(batch.source[0]))
    record.done[-1] += TABLE.prefill_ms
    return steps.prefill_draft(spec, served, state, batch)

  def catching_up(spec, served, state):
    running = np.asarray(state.stop_reason) == StopReason.RUNNING
    lag = state_lib.fed_to_draft(state.length) - state.draft_cache.length
    record.chunks.append(-(-int(max(lag[running])) // drafters.CHUNK))
    record.done[-1] += TABLE.chunk_ms * record.chunks[-1]
    return steps.catch_up(spec, served, state)

  monkeypatch.setattr(controller, "ROUNDS_PER_CALL", 2)
  monkeypatch.setattr(controller, "choose", choose)
  monkeypatch.setattr(controller, "observe", observe)
  compiled = harness.Changed(
    steps, insert=insert, prefill_draft=prefill_draft, catch_up=catching_up
  )
  monkeypatch.setattr(engine, "steps", compiled)
  return record


@pytest.mark.parametrize("rows", [1, 3])
def test_choose_receives_the_cost_of_catching_up(monkeypatch, rows):
  record = recording(monkeypatch, CYCLE)
  make(rows=rows).run(cases.greedy_requests())
  assert record.missing == pytest.approx(record.done)
  late = [ms for ms in record.done if ms >= TABLE.prefill_ms]
  assert 0.0 in record.done and late
  # With several rows, some calls need both a prefill and a chunk.
  assert rows == 1 or any(ms % TABLE.prefill_ms > 0.1 for ms in late)


def test_observe_receives_the_cost_of_all_draft_work(monkeypatch):
  record = recording(monkeypatch, CYCLE)
  make().run(cases.greedy_requests())
  prefills_ms = TABLE.prefill_ms * len(record.prompts)
  chunks_ms = TABLE.chunk_ms * sum(record.chunks)
  assert min(prefills_ms, chunks_ms) > 0
  spent = sum(call.catch_up_ms for call in record.calls)
  assert spent == pytest.approx(prefills_ms + chunks_ms)


def test_requests_after_a_probe_are_not_prefilled_for_the_draft(monkeypatch):
  """Requests of one token; every second one is decoded plainly, after a probe."""
  record = recording(monkeypatch, (-1, 0))
  requests = [Request(tokens, max_new_tokens=1) for tokens in cases.prompts(6)]
  make(rows=1).run(requests)
  assert [call.catch_up_ms for call in record.calls] == [TABLE.prefill_ms, 0.0] * 3


@pytest.mark.parametrize("rows", [1, 3])
def test_observe_counts_every_token_once(monkeypatch, rows):
  record = recording(monkeypatch, CYCLE)
  found = make(rows=rows).run(cases.greedy_requests())
  totals = {
    name: sum(sum(getattr(call, name)) for call in record.calls)
    for name in ("emitted", "judged", "accepted")
  }
  assert totals == {
    "emitted": sum(len(done.tokens) for done in found),
    "judged": sum(done.drafted for done in found),
    "accepted": sum(done.accepted for done in found),
  }
  assert min(totals.values()) > 0
