"""Continuous batching: who shares the rows, and when one came, changes no output."""

import dataclasses
import functools
import itertools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import Compilations
from decoding import harness

from osd_jax import base, sharding, testing
from osd_jax.base import EOS_ID, StopReason
from osd_jax.engine import engine, steps
from osd_jax.models import families

VOCAB, LENGTH, K = 64, 12, 3
BUCKETS = (6, 10)
LIMITS = (None, 1, 7, None, 3, 12, None, 5, 2)
TARGET, DRAFT = harness.TARGET, harness.DRAFT
family = harness.family_fixture(globals(), autouse=True)


@functools.cache
def target_params():
  """Of a target some of whose outputs end before the limit."""
  params = harness.lively_params(TARGET)
  kernel = params["decoder"]["logits_dense"]["kernel"]
  raised = kernel.at[:, EOS_ID].multiply(2.5)
  return {
    **params,
    "decoder": {**params["decoder"], "logits_dense": {"kernel": raised}},
  }


@functools.cache
def draft_params(kind):
  """Three drafts of the target's shape: close to it, further away, the target."""
  scale = {"close": 0.1, "far": 0.5, "same": 0.0}[kind]
  return harness.perturbed(target_params(), scale)


def config_of(rows, **changes):
  config = engine.DecodingConfig(
    rows=rows,
    num_draft_tokens=K,
    source_lengths=BUCKETS,
    target_length=LENGTH,
    record_top_k=VOCAB,
    max_rounds=2,
  )
  return dataclasses.replace(config, **changes)


@functools.cache
def decoder(rows, kind="close"):
  """An engine that is empty again after each use."""
  return engine.Engine(
    config_of(rows), TARGET, target_params(), TARGET, draft_params(kind)
  )


def prompts(count=9, seed=0):
  """Ragged prompts of both buckets."""
  source, mask = testing.random_sources(count, BUCKETS[-1], VOCAB, seed, TARGET.pad_id)
  return [row[keep] for row, keep in zip(source, mask, strict=True)]


def greedy_requests(seed=0):
  return [
    engine.Request(tokens, max_length=limit, tag=index)
    for index, (tokens, limit) in enumerate(
      zip(prompts(seed=seed), LIMITS, strict=True)
    )
  ]


_score = jax.jit(lambda model, *args: model.score(*args), static_argnums=0)


def score(tokens, written):
  """Fresh teacher-forced logits [T, V] of the target for one prompt."""
  source = np.full((1, BUCKETS[-1]), TARGET.pad_id, np.int32)
  source[0, : len(tokens)] = tokens
  target = np.zeros((1, LENGTH), np.int32)
  target[0, : len(written)] = written
  return np.asarray(
    _score(TARGET, target_params(), source, TARGET.mask(source), target)
  )[0]


@functools.cache
def expected(seed=0):
  """What plain greedy decoding, one whole forward pass a token, writes."""
  found = []
  for request in greedy_requests(seed):
    written = []
    while len(written) < (request.max_length or LENGTH) and EOS_ID not in written:
      written.append(int(score(request.tokens, written)[len(written)].argmax()))
    found.append(written)
  return found


def texts(finished):
  return [done.tokens.tolist() for done in finished]


def by_tag(finished):
  return texts(sorted(finished, key=lambda done: done.request.tag))


def drained(decoder_):
  found = []
  while decoder_.in_flight:
    found += decoder_.step()
  return found


def test_the_prompts_are_worth_running():
  lengths = {len(tokens) <= BUCKETS[0] for tokens in prompts()}
  assert lengths == {True, False}
  assert len({tuple(tokens) for tokens in expected()}) > len(LIMITS) // 2
  assert any(text[-1] == EOS_ID for text in expected())


@pytest.mark.parametrize("rows", [1, 3])
def test_outputs_equal_single_plain_decoding_in_the_order_asked(rows):
  requests = greedy_requests()
  found = decoder(rows).run(requests)
  assert [done.request for done in found] == requests
  assert texts(found) == expected()
  for done, limit in zip(found, LIMITS, strict=True):
    ended = done.tokens[-1] == EOS_ID
    assert done.stop_reason == (StopReason.EOS if ended else StopReason.LENGTH)
    assert ended or len(done.tokens) == (limit or LENGTH)


def test_plain_slots_write_the_same():
  plain = engine.Engine(config_of(3, record_top_k=0), TARGET, target_params())
  found = plain.run(greedy_requests())
  assert texts(found) == expected()
  for done in found:
    assert (done.drafted, done.target_calls) == (0, len(done.tokens))
    assert done.batch.records is None


def test_requests_may_come_while_others_are_in_flight():
  busy = decoder(3)
  finished, waiting = [], greedy_requests()
  while waiting or busy.in_flight:
    for request in waiting[:2]:
      busy.submit(request)
    waiting = waiting[2:]
    before = busy.in_flight
    done = busy.step()
    assert busy.in_flight == before - len(done)
    finished += done
  assert by_tag(finished) == expected()


def test_a_reused_decoder_equals_a_fresh_one():
  """Longer and sampled requests, other drafts: nothing of them is left behind."""
  sampled = [
    dataclasses.replace(request, sampling=engine.SamplingConfig(1.0, seed=index))
    for index, request in enumerate(greedy_requests())
  ]
  reused, fresh = (
    engine.Engine(config_of(3), TARGET, target_params(), TARGET, draft_params("close"))
    for _ in range(2)
  )
  others = [engine.Request(tokens) for tokens in prompts(seed=5)]
  reused.swap(draft_params("far"), 1)
  assert len(set(map(tuple, texts(reused.run(others))))) > 1
  reused.swap(draft_params("close"), 0)
  found, alike = reused.run(sampled), fresh.run(sampled)
  assert texts(found) == texts(alike)
  assert texts(found) != expected()  # sampling changes what is written
  for one, other in zip(found, alike, strict=True):
    jax.tree.map(np.testing.assert_array_equal, one.batch, other.batch)
    assert one.accepted == other.accepted


def test_swaps_change_no_greedy_output():
  swapped = engine.Engine(
    config_of(3), TARGET, target_params(), TARGET, draft_params("close")
  )
  for request in greedy_requests():
    swapped.submit(request)
  finished, kinds, crossed = [], ("far", "same", "close"), 0
  while swapped.in_flight:
    finished += swapped.step()
    crossed += any(tag is not None for tag in swapped.state()[1]["tags"])
    version = swapped.draft_version + 1
    swapped.swap(draft_params(kinds[version % 3]), version)
  assert by_tag(finished) == expected()
  assert crossed  # drafts were swapped within requests


@pytest.mark.parametrize("rows", [1, 3])
def test_records_equal_a_fresh_forward_pass(rows):
  for done in decoder(rows).run(greedy_requests(seed=1)):
    check_records(done)


def check_records(done):
  """The row for the loss holds the texts, and fresh distributions of the target."""
  count = len(done.tokens)
  source = np.asarray(done.batch.source)[0]
  assert source[: len(done.request.tokens)].tolist() == done.request.tokens.tolist()
  assert (source[len(done.request.tokens) :] == TARGET.pad_id).all()
  target = np.asarray(done.batch.target)[0]
  assert target[:count].tolist() == done.tokens.tolist()
  assert (target[count:] == TARGET.pad_id).all()
  assert np.asarray(done.batch.mask)[0].tolist() == [t < count for t in range(LENGTH)]
  logits = score(done.request.tokens, done.tokens)[:count]
  log_probs = np.asarray(jax.nn.log_softmax(logits))
  records = jax.tree.map(lambda leaf: np.asarray(leaf)[0], done.batch.records)
  records = jax.tree.map(operator.itemgetter(slice(count)), records)
  kept = np.take_along_axis(log_probs, records.ids.astype(int), axis=-1)
  np.testing.assert_allclose(records.log_probs, kept, atol=2e-4)
  np.testing.assert_array_equal(
    np.sort(records.ids), np.broadcast_to(np.arange(VOCAB), records.ids.shape)
  )
  np.testing.assert_allclose(records.tail, 0, atol=1e-6)


def test_counters_add_up():
  found = decoder(3).run(greedy_requests())
  for done in found:
    count = len(done.tokens)
    assert done.accepted == sum(done.accepted_per_position) <= done.drafted
    assert done.drafted <= K * done.target_calls
    # Every call emits what it accepted and one more, but for a cut in the last.
    assert 0 <= done.accepted + done.target_calls - count <= 1
    errors = int(np.asarray(done.batch.records.error)[0, :count].sum())
    assert done.drafted - done.accepted == errors
    assert list(done.accepted_per_position[:K]) == sorted(
      done.accepted_per_position[:K], reverse=True
    )
    assert not any(done.accepted_per_position[K:]) and done.milliseconds > 0
  assert 0 < sum(done.accepted for done in found) < sum(done.drafted for done in found)


def test_a_draft_equal_to_the_target_accepts_everything():
  for done in decoder(1, "same").run(greedy_requests()):
    assert done.accepted == done.drafted
    assert done.target_calls == -(-len(done.tokens) // (K + 1))


def sampled_requests(count=12):
  return [
    engine.Request(
      np.array([3, EOS_ID], np.int32),
      engine.SamplingConfig((0.0, 0.7, 1.0)[i % 3], (0, 3)[i % 2], 0.9, seed=i),
      max_length=LIMITS[i % len(LIMITS)],
    )
    for i in range(count)
  ]


def test_sampled_outputs_do_not_depend_on_the_number_of_rows():
  model = testing.tabular_model(8)
  tables = [jnp.asarray(testing.random_table(8, seed)) for seed in (0, 1)]

  def run(rows, requests):
    single = config_of(rows, source_lengths=(4,), record_top_k=8)
    return texts(
      engine.Engine(single, model, tables[0], model, tables[1]).run(requests)
    )

  one = run(1, sampled_requests())
  assert run(3, sampled_requests()) == one
  reseeded = [
    dataclasses.replace(
      request, sampling=dataclasses.replace(request.sampling, seed=99)
    )
    for request in sampled_requests()
  ]
  changed = run(3, reseeded)
  assert changed != one  # seeds matter,
  assert changed[::3] == one[::3]  # but not to greedy requests


def test_rows_in_flight_continue_elsewhere():
  make = functools.partial(
    engine.Engine, config_of(3), TARGET, target_params(), TARGET, draft_params("close")
  )
  first, requests = make(), greedy_requests()
  for request in requests:
    first.submit(request)
  finished = first.step()
  arrays, held = first.state()
  arrays, second = jax.tree.map(np.array, arrays), make()
  shapes = second.structure(held)
  jax.tree.map(lambda a, b: np.testing.assert_equal(a.shape, b.shape), arrays, shapes)
  arrays = jax.tree.map(jnp.asarray, arrays)
  second.restore(arrays, held, requests.__getitem__, draft_params("close"))
  assert second.in_flight == first.in_flight == len(requests) - len(finished)
  assert by_tag(finished + drained(second)) == expected()


def test_after_warm_up_nothing_compiles(family):
  model = testing.tabular_model(8, f"tabular, beside {family}")  # compiled anew
  tables = [jnp.asarray(testing.random_table(8, seed)) for seed in (0, 1, 2)]
  config = config_of(2, record_top_k=4)
  ready = engine.Engine(config, model, tables[0], model, tables[1])
  with Compilations() as warming:
    ready.warm_up()
  assert warming.count > 0
  assert ready.in_flight == 0 and ready.state()[0] is None
  mixed = [
    dataclasses.replace(request, tokens=tokens % 8)
    for request, tokens in zip(sampled_requests(), prompts(12), strict=True)
  ]
  with Compilations() as serving:
    for version, request in enumerate(mixed):
      ready.submit(request)
      ready.step()
      ready.swap(tables[1 + version % 2], version)
    drained(ready)
  assert serving.count == 0
  longer = dataclasses.replace(config, target_length=LENGTH + 1)
  with Compilations() as other:  # negative control: another shape does compile
    engine.Engine(longer, model, tables[0], model, tables[1]).run(mixed[:1])
  assert other.count > 0


def light_draft(**left_out):
  """The target as its own draft, served with something left out."""
  model = harness.lighter(TARGET, **left_out)
  return engine.Engine(config_of(2), TARGET, target_params(), model, target_params())


@pytest.mark.parametrize(
  "left_out", [{"int8": True}, {"shortlist": 5}, {"int8": True, "shortlist": 20}]
)
def test_what_a_served_draft_leaves_out_changes_no_output(left_out):
  found = light_draft(**left_out).run(greedy_requests())
  assert by_tag(found) == expected()


def test_a_shortlist_accepts_what_it_covers():
  """All is accepted while the outputs are covered, less where they are not."""
  covered = np.unique(np.concatenate([*expected(), [EOS_ID]]))
  size, others = len(covered), np.setdiff1d(np.arange(VOCAB), covered)
  assert size <= len(others)
  decoder_ = light_draft(shortlist=size)
  rates = []
  for chosen in (covered, others[:size]):
    decoder_.swap(target_params(), 1, chosen)
    found = decoder_.run(greedy_requests())
    assert by_tag(found) == expected()
    accepted, drafted = (
      sum(getattr(done, name) for done in found) for name in ("accepted", "drafted")
    )
    rates.append(accepted / drafted)
  assert rates[0] == 1.0 and rates[1] < 0.2


def test_a_swap_without_a_shortlist_keeps_it():
  covered = np.unique(np.concatenate([*expected(), [EOS_ID]]))
  decoder_ = light_draft(shortlist=len(covered))
  decoder_.swap(target_params(), 1, covered)
  decoder_.swap(target_params(), 2)
  found = decoder_.run(greedy_requests())
  assert sum(d.accepted for d in found) == sum(d.drafted for d in found) > 0


def test_a_shortlist_of_another_length_is_refused():
  with pytest.raises(ValueError, match="shortlist of 3 tokens, expected 8"):
    light_draft(shortlist=8).swap(target_params(), 1, np.arange(3))


def test_new_shortlists_compile_nothing_after_warm_up():
  decoder_ = light_draft(shortlist=8)
  decoder_.warm_up()
  with Compilations() as found:
    decoder_.swap(target_params(), 1, np.arange(8, 16))
    decoder_.run(greedy_requests())
  assert not found.count


def test_a_partitioner_of_one_device_compiles_nothing_of_its_own():
  config = config_of(1)
  arguments = (config, TARGET, target_params(), TARGET, draft_params("close"))
  engine.Engine(*arguments).warm_up()
  with Compilations() as again:
    engine.Engine(*arguments, sharding.make()).warm_up()
  assert again.count == 0


@pytest.mark.parametrize(("rows", "made"), [(1, 2), (2, 4)])
def test_a_row_is_made_once_for_a_bucket(monkeypatch, rows, made):
  """Several are made anew: those of all buckets at once would fill a memory."""
  short, long = (np.full(length, 7, np.int32) for length in BUCKETS)
  alone = [decoder(rows).run([engine.Request(p)])[0].tokens for p in (short, long)]
  decoder(rows).clear()
  kept, buckets = steps.empty, []
  monkeypatch.setattr(steps, "empty", lambda *a: buckets.append(a[2]) or kept(*a))
  for index in (0, 1, 0, 1):
    (done,) = decoder(rows).run([engine.Request((short, long)[index])])
    np.testing.assert_array_equal(done.tokens, alone[index])
  assert buckets == [*BUCKETS, *BUCKETS][:made]


def test_a_prompt_must_fit_the_largest_bucket():
  waiting = decoder(1)
  for count in (0, BUCKETS[-1] + 1):
    with pytest.raises(ValueError, match=rf"prompt has {count} tokens.*1 to 10"):
      waiting.submit(engine.Request(np.full(count, 3, np.int32)))
  assert waiting.in_flight == 0


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("temperature", -0.1),
    ("temperature", float("nan")),
    ("top_k", -1),
    ("top_p", 0.0),
    ("top_p", 1.5),
    ("top_p", 1e-50),  # would be no mass at all in float32
    ("temperature", 1e-50),  # would be greedy
    ("top_k", 2.0),
    ("seed", -1),
    ("seed", 2**32),
    ("seed", 1.5),
  ],
)
def test_sampling_values_out_of_range_are_named(field, value):
  with pytest.raises(base.InputError, match=rf"SamplingConfig\.{field}: received"):
    engine.SamplingConfig(**{field: value})


def test_the_largest_seed_has_a_successor():
  last = engine.SamplingConfig(seed=2**32 - 3)
  assert [last.of_request(i).seed for i in (0, 2, 3)] == [2**32 - 3, 2**32 - 1, 0]


@pytest.mark.parametrize(
  ("tokens", "said"),
  [
    ([3, VOCAB, 1], rf"ids from 1 to {VOCAB}, expected 0\.\.{VOCAB - 1}"),
    ([-1, 3], "ids from -1 to 3"),
    ([3.0, 1.0], "float64, expected token ids"),
    ([[3, 1]], r"array \(1, 2\)"),
  ],
)
def test_what_are_no_token_ids_is_refused(tokens, said):
  with pytest.raises(base.InputError, match=said):
    decoder(1).submit(engine.Request(np.asarray(tokens)))
  assert decoder(1).in_flight == 0


def test_a_refused_request_leaves_nothing_behind():
  good = engine.Request(np.array([3, 1], np.int32), tag=0)
  bad = engine.Request(np.zeros(0, np.int32), tag=1)
  with pytest.raises(base.InputError, match="0 tokens"):
    decoder(1).run([good, bad])
  assert decoder(1).in_flight == 0
  assert [done.request for done in decoder(1).run([good])] == [good]


def test_turns_take_no_more_requests_than_there_are_rows():
  taken = []

  def endless():
    for index in itertools.count():
      taken.append(index)
      yield engine.Request(np.array([3 + index % 9, 1], np.int32), tag=index)

  reused, finished = decoder(3), []
  for turn in reused.turns(endless()):
    finished += [done.request.tag for done in turn]
    assert len(taken) <= len(finished) + 3
    if len(finished) > 5:
      break
  assert reused.in_flight
  reused.clear()
  assert reused.in_flight == 0
  assert by_tag(reused.run(greedy_requests())) == expected()


def test_a_watched_request_ends_where_it_is_told_to():
  """Behind as many tokens as asked, its records too; its mates do not notice."""
  requests, seen = greedy_requests(), []

  def watch(tokens):
    seen.append(len(tokens))
    return 3 if len(tokens) >= 3 else None

  long = max(range(len(requests)), key=lambda index: len(expected()[index]))
  requests[long] = dataclasses.replace(requests[long], watch=watch)
  answers = decoder(3).run(requests)
  others = [index for index in range(len(requests)) if index != long]
  assert [texts(answers)[i] for i in others] == [expected()[i] for i in others]
  assert answers[long].tokens.tolist() == expected()[long][:3]
  assert answers[long].stop_reason == base.StopReason.STOP_STRING
  assert np.asarray(answers[long].batch.mask).sum() == 3
  assert seen == sorted(seen) and len(seen) >= 1
  assert by_tag(decoder(3).run(greedy_requests())) == expected()


@pytest.mark.parametrize("limit", [0, -3])
def test_a_length_limit_is_at_least_one(limit):
  request = engine.Request(np.array([3, 1], np.int32), max_length=limit)
  with pytest.raises(ValueError, match=r"received max_length="):
    decoder(1).submit(request)
  assert decoder(1).in_flight == 0


def test_target_and_draft_share_the_vocabulary():
  other = families.build(
    dataclasses.replace(testing.TINY_DRAFT, vocab_size=48), "small"
  )
  with pytest.raises(ValueError, match="'small' has 48 token ids.*64"):
    engine.Engine(config_of(1), TARGET, target_params(), other, None)


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("rows", 0),
    ("rows", 1.5),
    ("num_draft_tokens", 9),
    ("num_draft_tokens", 0),
    ("source_lengths", ()),
    ("source_lengths", (1, 8)),
    ("target_length", 0),
    ("record_top_k", -1),
    ("max_rounds", 0),
  ],
)
def test_shapes_out_of_range_are_named(field, value):
  with pytest.raises(ValueError, match=rf"DecodingConfig\.{field}: received"):
    engine.DecodingConfig(**{field: value})


def test_an_empty_decoder_does_nothing():
  assert decoder(3).step() == [] and decoder(3).run([]) == []
  assert base.StopReason.EMPTY.message
