"""Continuous batching: neither batch mates nor the time of arrival change outputs."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from compilations import Compilations
from decoding import harness
from engine import cases

from osd_jax import base, native, sharding, testing
from osd_jax.base import EOS_ID, StopReason
from osd_jax.costs.table import RoundCosts
from osd_jax.engine import engine, steps
from osd_jax.engine.requests import AdaptiveConfig, Request, SamplingConfig
from osd_jax.models import families


@pytest.mark.parametrize("rows", [1, 3])
def test_outputs_equal_single_plain_decoding_in_request_order(rows):
  requests = cases.greedy_requests()
  found = cases.decoder(rows).run(requests)
  assert [done.request for done in found] == requests
  assert cases.texts(found) == cases.expected()
  for done, limit in zip(found, cases.LIMITS, strict=True):
    ended = done.tokens[-1] == EOS_ID
    assert done.stop_reason == (StopReason.EOS if ended else StopReason.LENGTH)
    assert ended or len(done.tokens) == (limit or cases.LENGTH)


def test_rows_that_are_all_greedy_have_a_program_of_their_own(forms, monkeypatch):
  """Not on a CPU, where branches cost less than compiling twice."""
  advance, programs = steps.advance, []

  def noted(spec, *arguments):
    programs.append(spec.all_greedy)
    return advance(spec, *arguments)

  monkeypatch.setattr(steps, "advance", noted)
  requests = cases.greedy_requests()
  assert cases.texts(cases.decoder(2).run(requests)) == cases.expected()
  assert set(programs) == {not native.forms()}
  penalty = SamplingConfig(repetition_penalty=1.5)
  for sampling in (SamplingConfig(temperature=1.0), penalty):
    programs.clear()
    others = [dataclasses.replace(one, sampling=sampling) for one in requests[3:6]]
    mixed = [requests[0], others[0], requests[4], *others[1:]]
    answers = cases.decoder(2).run(mixed)
    assert answers[0].tokens.tolist() == cases.expected()[0]
    assert not any(programs)


def test_warm_engine_compiles_nothing_for_greedy_or_sampled_requests(forms):
  config = cases.config_of(2, target_length=cases.LENGTH + 1)  # not yet compiled
  target, draft = cases.target_params(), cases.draft_params("close")
  decoder = engine.Engine(config, cases.TARGET, target, cases.TARGET, draft)
  decoder.warm_up()
  sampling = SamplingConfig(temperature=1.0)
  requests = cases.greedy_requests()
  requests += [dataclasses.replace(one, sampling=sampling) for one in requests[:3]]
  with Compilations() as compilations:
    assert len(decoder.run(requests)) == len(requests)
  assert compilations.count == 0


def test_engine_without_a_draft_gives_the_same_outputs_and_ignores_the_policy():
  policy = AdaptiveConfig((0, 1, 3), (RoundCosts((1.0, 1.0, 1.0)),) * 2)
  config = cases.config_of(3, record_top_k=0, adaptive=policy)
  plain = engine.Engine(config, cases.TARGET, cases.target_params())
  found = plain.run(cases.greedy_requests())
  assert cases.texts(found) == cases.expected()
  for done in found:
    assert (done.drafted, done.target_calls) == (0, len(done.tokens))
    assert done.batch.records is None


def test_requests_can_be_submitted_while_others_are_in_flight():
  busy = cases.decoder(3)
  finished, waiting = [], cases.greedy_requests()
  while waiting or busy.in_flight:
    for request in waiting[:2]:
      busy.submit(request)
    waiting = waiting[2:]
    before = busy.in_flight
    done = busy.step()
    assert busy.in_flight == before - len(done)
    finished += done
  assert cases.by_tag(finished) == cases.expected()


def test_counters_are_consistent_with_tokens_and_errors():
  found = cases.decoder(3).run(cases.greedy_requests())
  for done in found:
    count = len(done.tokens)
    assert done.accepted == sum(done.accepted_per_position) <= done.drafted
    assert done.drafted <= cases.K * done.target_calls
    # A call emits the accepted tokens and one more; only the last call may be cut.
    assert 0 <= done.accepted + done.target_calls - count <= 1
    errors = int(np.asarray(done.batch.records.error)[0, :count].sum())
    assert done.drafted - done.accepted == errors
    assert list(done.accepted_per_position[: cases.K]) == sorted(
      done.accepted_per_position[: cases.K], reverse=True
    )
    assert not any(done.accepted_per_position[cases.K :]) and done.milliseconds > 0
  assert 0 < sum(done.accepted for done in found) < sum(done.drafted for done in found)


def test_sampled_outputs_do_not_depend_on_the_number_of_rows():
  model = testing.tabular_model(8)
  tables = [jnp.asarray(testing.random_table(8, seed)) for seed in (0, 1)]

  def run(rows, requests):
    single = cases.config_of(rows, source_lengths=(4,), record_top_k=8)
    return cases.texts(
      engine.Engine(single, model, tables[0], model, tables[1]).run(requests)
    )

  one = run(1, cases.sampled_requests())
  assert run(3, cases.sampled_requests()) == one
  reseeded = [
    dataclasses.replace(
      request, sampling=dataclasses.replace(request.sampling, seed=99)
    )
    for request in cases.sampled_requests()
  ]
  changed = run(3, reseeded)
  assert changed != one  # seeds change sampled outputs
  assert changed[::3] == one[::3]  # but not greedy ones


def test_partitioner_of_one_device_shares_compiled_programs():
  config = cases.config_of(1)
  arguments = (
    config,
    cases.TARGET,
    cases.target_params(),
    cases.TARGET,
    cases.draft_params("close"),
  )
  engine.Engine(*arguments).warm_up()
  with Compilations() as again:
    engine.Engine(*arguments, sharding.make()).warm_up()
  assert again.count == 0


def test_prompts_of_other_lengths_do_not_wait_for_rows_in_flight():
  """A long prompt joins a short one at once; without it, rows are short again."""
  requests, serving = cases.greedy_requests(), cases.decoder(2)
  short = dataclasses.replace(requests[0], speculative=False)  # one token per round
  long = dataclasses.replace(requests[5], max_new_tokens=2)
  buckets, order = [], []
  for arrives in (short, long, short, *[None] * 20):
    if arrives is not None:
      serving.submit(arrives)
    answers = serving.step()
    order += [done.request.tag for done in answers]
    for done in answers:
      expected = cases.expected()[done.request.tag]
      assert done.tokens.tolist() == expected[: done.request.max_new_tokens]
    buckets.append(serving.state()[1]["bucket"])
  assert order == [5, 0, 0]
  assert buckets[:3] == [*cases.BUCKETS, cases.BUCKETS[0]]


def test_short_prompt_is_not_padded_like_a_long_one_in_flight(monkeypatch):
  """The arithmetic of a prefill grows with the length."""
  lengths, prefill = [], steps.prefill

  def noted(spec, served, batch, *caches):
    lengths.append(batch.source.shape[1])
    return prefill(spec, served, batch, *caches)

  monkeypatch.setattr(steps, "prefill", noted)
  requests, serving = cases.greedy_requests(), cases.decoder(2)
  short, long = requests[0], requests[5]
  serving.run([long, short, short])
  assert lengths == [cases.BUCKETS[1], cases.BUCKETS[0], cases.BUCKETS[0]]


@pytest.mark.parametrize("rounds", [1, 2, 9])
def test_watched_request_is_seen_after_max_rounds_or_four(rounds):
  """A caller that wants to end it waits no longer."""
  config, seen = cases.config_of(1, max_rounds=rounds), []
  plain = engine.Engine(config, cases.TARGET, cases.target_params())
  watched = lambda tokens: seen.append(len(tokens))
  (request, *_) = cases.greedy_requests()  # it has 12 tokens
  plain.run([dataclasses.replace(request, watch=watched)])
  assert seen == list(range(0, 13, min(rounds, 4)))[1:]


@pytest.mark.parametrize("drafts", ["never", "always", "now and then"])
def test_warm_engine_compiles_nothing_for_any_order_of_lengths(drafts):
  """Nor for other settings, new drafts, and a changing K."""
  config = cases.config_of(2, source_lengths=(4, 6, 10), target_length=9)
  pair = harness.TARGET, harness.lively_params(harness.TARGET)
  if drafts == "now and then":
    costs = (RoundCosts((1.0, 1.1)),) * 3
    policy = AdaptiveConfig(candidates=(0, 2), costs=costs)
    config = dataclasses.replace(config, adaptive=policy)
  serving = engine.Engine(config, *pair, *(() if drafts == "never" else pair))
  before = serving.state()[1]
  with Compilations() as cold:
    serving.warm_up()
  # The made-up requests change nothing.
  assert serving.state()[1] == {**before, "bucket": serving.state()[1]["bucket"]}
  if drafts == "now and then":
    cases.Scheduled(serving, (0, 2, 2))
  lengths = np.random.default_rng(0).permutation([4, 5, 10] * 4)
  with Compilations() as warm:
    for version, (n, request) in enumerate(zip(lengths, cases.sampled_requests())):
      tokens = np.full(n, 3, np.int32)
      limit = min(request.max_new_tokens or 9, 9)
      serving.submit(dataclasses.replace(request, tokens=tokens, max_new_tokens=limit))
      serving.step()
      if drafts != "never":
        serving.swap(pair[1], version)
    cases.drained(serving)
  assert cold.count > 0 and warm.count == 0


@pytest.mark.parametrize(
  ("tokens", "limit", "message"),
  [
    ([], None, r"prompt has 0 tokens, expected 1 to 10"),
    ([3] * (cases.BUCKETS[-1] + 1), None, r"prompt has 11 tokens, expected 1 to 10"),
    ([3, cases.VOCAB, 1], None, rf"ids from 1 to {cases.VOCAB}, expected 0\.\.15"),
    ([-1, 3], None, "ids from -1 to 3"),
    ([3.0, 1.0], None, "float64, expected token ids"),
    ([[3, 1]], None, r"array \(1, 2\)"),
    *(
      ([3, 1], limit, rf"max_new_tokens={limit}, expected an integer in 1\.\.12")
      for limit in (0, -3, cases.LENGTH + 1, 1.5)
    ),
  ],
)
def test_request_that_cannot_be_decoded_is_refused(tokens, limit, message):
  array = np.asarray(tokens, None if tokens else np.int32)
  with pytest.raises(base.InputError, match=message):
    cases.decoder(1).submit(Request(array, max_new_tokens=limit))
  assert cases.decoder(1).in_flight == 0


@pytest.mark.parametrize("salt", [-1, 2**64, 0.5, "tenant"])
def test_salt_that_is_no_64_bit_number_is_refused(salt):
  with pytest.raises(
    base.InputError, match=rf"cache_salt={salt!r}, expected an integer"
  ):
    cases.decoder(1).submit(Request(np.array([3, 1]), cache_salt=salt))


def test_watched_request_ends_at_the_returned_length():
  """The answer and its records are cut there, and other rows do not change."""
  requests, seen = cases.greedy_requests(), []

  def watch(tokens):
    seen.append(len(tokens))
    return 3 if len(tokens) >= 3 else None

  long = max(range(len(requests)), key=lambda index: len(cases.expected()[index]))
  requests[long] = dataclasses.replace(requests[long], watch=watch)
  answers = cases.decoder(3).run(requests)
  others = [index for index in range(len(requests)) if index != long]
  assert [cases.texts(answers)[i] for i in others] == [
    cases.expected()[i] for i in others
  ]
  assert answers[long].tokens.tolist() == cases.expected()[long][:3]
  assert answers[long].stop_reason == base.StopReason.STOP_STRING
  assert np.asarray(answers[long].batch.mask).sum() == 3
  assert seen == sorted(seen) and len(seen) >= 1
  assert cases.by_tag(cases.decoder(3).run(cases.greedy_requests())) == cases.expected()


def test_target_and_draft_share_the_vocabulary():
  other = families.build(
    dataclasses.replace(testing.TINY_DRAFT, vocab_size=48), "small"
  )
  with pytest.raises(ValueError, match="has 16 token ids.*'small' has 48 token ids"):
    engine.Engine(cases.config_of(1), cases.TARGET, cases.target_params(), other, None)
