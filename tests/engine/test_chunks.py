"""Prompts that are read in chunks, between two calls of rounds."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from compilations import Compilations
from decoding import harness
from engine import cases

from osd_jax import base, sharding
from osd_jax.costs.table import RoundCosts
from osd_jax.decoding import ngrams, sampling
from osd_jax.engine import engine, steps
from osd_jax.engine.requests import (
  AdaptiveConfig,
  DecodingConfig,
  Request,
  SamplingConfig,
)
from osd_jax.models import attached, families
from osd_jax.models.shapes import AttachedConfig

LENGTH, CHUNK, LENGTHS = 10, 4, (6, 12)
CONFIG = DecodingConfig(
  rows=3,
  num_draft_tokens=3,
  source_lengths=LENGTHS,
  target_length=LENGTH,
  record_top_k=64,
  max_rounds=2,
  prefill_chunk=CHUNK,
)
SHAPE = AttachedConfig(width=16, num_heads=2, head_dim=8, mlp_dim=24)
COSTS = RoundCosts((((1.0, 1.3),), ((1.0, 1.2),)))
WORTH = AdaptiveConfig(candidates=(0, 3), costs=(COSTS,) * 2)


def requests(warm=()):
  """Prompts of 3 to 12 tokens; those in `warm` are sampled."""
  random = np.random.default_rng(0)
  counts, limits = (12, 3, 9, 5, 11, 4, 12, 7), (10, 7, 1, 10, 5, 10, 3, 8)
  return [
    Request(
      random.integers(2, 64, count).astype(np.int32),
      SamplingConfig(temperature=float(index in warm), seed=index),
      max_new_tokens=limit,
      tag=index,
    )
    for index, (count, limit) in enumerate(zip(counts, limits, strict=True))
  ]


@functools.cache
def of_states(reads, target=harness.LLAMA):
  """A Llama that returns its states, and a draft attached to it."""
  shape = harness.SHAPES[target]
  model = families.build(shape, states=reads)
  params = harness.lively_params(target)
  draft = attached.build(dataclasses.replace(SHAPE, reads=reads), shape)
  frozen = attached.frozen_of(shape, params)
  return model, params, draft, draft.join(draft.init(jax.random.key(1)), frozen)


def pair_of(kind):
  """Target and draft, with their parameters, as the arguments of an engine."""
  if kind.startswith("attached"):
    return of_states("tokens" if "tokens" in kind else "prompt")
  target = harness.GEMMA if "gemma" in kind else harness.LLAMA
  own = target, harness.lively_params(target)
  if kind.startswith("none"):
    return own
  draft = ngrams.build(target, 256) if kind == "cache" else harness.LLAMA_DRAFT
  is_cache = draft.absorb is not None
  params = draft.init(jax.random.key(0)) if is_cache else harness.lively_params(draft)
  return *own, draft, params


def engine_of(kind, partitioner=None, **changes):
  config = dataclasses.replace(CONFIG, **changes)
  if "mixture" in kind:
    config = dataclasses.replace(config, cache_tokens=256, adaptive=WORTH)
  return engine.Engine(config, *pair_of(kind), partitioner=partitioner)


KINDS = ["none", "none, gemma", "independent", "attached", "attached, tokens"]


@pytest.mark.parametrize("kind", [*KINDS, "cache", "mixture", "mixture, rests"])
def test_chunks_change_no_output_state_or_record(kind):
  """Half of the rows are sampled, coupled where a cache learns from answers."""
  rule = "rejection" if kind in KINDS else "coupling"
  answers = []
  for chunk in (0, CHUNK):
    decoder = engine_of(kind, prefill_chunk=chunk, acceptance_rule=rule)
    if "rests" in kind:  # the draft reads prompts later
      cases.Scheduled(decoder, (3, 0, 0))
      state = decoder.controller.state
      decoder.controller.state = dataclasses.replace(state, num_draft_tokens=0)
    answers.append(decoder.run(requests(range(0, 8, 2))))
  whole, parts = answers
  assert cases.texts(parts) == cases.texts(whole)
  assert len({tuple(done.tokens) for done in parts}) > 4
  if kind in KINDS:  # the draft has read the same
    assert [done.accepted for done in parts] == [done.accepted for done in whole]
  for one, other in zip(whole, parts):
    for name in ("log_probs", "tail"):
      pair = (
        getattr(done.batch.records, name)[0, : len(one.tokens)] for done in (one, other)
      )
      np.testing.assert_allclose(*pair, atol=1e-4)
    count = len(one.request.tokens)
    for name, states in one.batch.states.items():
      size = count if name == "target_states" else len(one.tokens)
      pair = (
        x[0, :size].astype(np.float32) for x in (states, other.batch.states[name])
      )
      np.testing.assert_allclose(*pair, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", ["attached", "independent"])
@pytest.mark.skipif(len(jax.devices()) < 4, reason="conftest.py fakes four devices")
def test_mesh_reads_chunks_like_one_device(kind):
  mesh = sharding.make(sharding.PartitionConfig(2, 2))
  spread = engine_of(kind, mesh, rows=4).run(requests())
  assert cases.texts(spread) == cases.texts(engine_of(kind, rows=4).run(requests()))


def test_prompts_of_one_call_are_read_in_chunks_together():
  together = engine_of("independent", rows=4, prefill_rows=2).run(requests())
  assert cases.texts(together) == cases.texts(engine_of("none").run(requests()))


# --- Turns ----------------------------------------------------------------------------


def turns(monkeypatch, **changes):
  """Tokens that each call of rounds waited for while rows decoded, and its answers."""
  decoder, waits = engine_of("independent", **changes), [0]

  def watched(name, tokens_of):
    call = getattr(steps, name)

    def noted(*arguments):
      waits[-1] += tokens_of(*arguments) if decoder._occupied() else 0
      return call(*arguments)

    monkeypatch.setattr(steps, name, noted)

  watched("read_chunk", lambda *arguments: CHUNK)
  is_whole = lambda caches: not any(caches)
  watched(
    "prefill",
    lambda spec, served, batch, *caches: batch.source.shape[1] * is_whole(caches),
  )
  advance = steps.advance
  monkeypatch.setattr(
    steps, "advance", lambda *arguments: (waits.append(0), advance(*arguments))[1]
  )
  answers = decoder.run(requests())
  monkeypatch.undo()
  return waits, cases.texts(answers)


def test_rows_that_decode_wait_for_one_chunk_at_most(monkeypatch):
  """Prompts that are shorter than a chunk share it; the control reads whole prompts."""
  waits, answers = turns(monkeypatch)
  assert max(waits) == CHUNK and sum(waits) > 4 * CHUNK
  whole, same = turns(monkeypatch, prefill_chunk=0)
  assert max(whole) >= LENGTHS[1] and same == answers
  short, _ = turns(monkeypatch, prefill_chunk=LENGTHS[1], source_lengths=(6, 12))
  assert max(short) == LENGTHS[1]  # two prompts of the short bucket, or a long one


def test_padding_is_not_read():
  spec = engine_of("none").spec
  source = np.full((2, 12), base.NO_TOKEN, np.int32)
  source[0, :3], source[1, :5] = 7, 7
  assert steps.chunk_starts(spec, source) == [0, 4]
  assert steps.chunk_starts(spec, np.full((1, 11), 7)) == [0, 4, 7]
  assert steps.chunk_starts(spec, np.full((1, 4), 7)) == []


@pytest.mark.parametrize("kind", ["none", "independent", "mixture"])
def test_warm_engine_compiles_nothing_for_chunks(kind):
  decoder = engine_of(kind)
  decoder.warm_up()
  with Compilations() as warm:
    decoder.run(requests())
  assert warm.count == 0


@pytest.mark.parametrize("kind", ["independent", "attached"])
def test_prompt_that_was_read_in_part_continues_from_a_checkpoint(kind):
  one, other, asked = engine_of(kind), engine_of(kind), requests(range(8))
  for request in asked:
    one.submit(request)
  before = []
  while not (one.state()[0]["prompts"] and before):
    before += one.step()
  arrays, host = jax.tree.map(np.asarray, one.state()[0]), one.state()[1]
  shapes = jax.tree.map(lambda leaf: leaf.shape, other.structure(host))
  assert shapes == jax.tree.map(lambda leaf: leaf.shape, arrays)
  given = jax.tree.map(jax.numpy.asarray, arrays), json.loads(json.dumps(host))
  other.restore(*given, requests(range(8)).__getitem__, pair_of(kind)[3])
  here, there = cases.drained(one), cases.drained(other)
  assert [(done.number, done.target_calls) for done in here] == [
    (done.number, done.target_calls) for done in there
  ]
  assert cases.texts(here) == cases.texts(there)


def test_draft_that_joins_while_a_prompt_is_read_numbers_its_noise():
  """The draft may have learned from earlier answers; see `sampling.numbered_seed`."""
  decoder, asked = engine_of("independent"), requests(range(8))
  for request in asked:
    decoder.submit(request)
  while not decoder.state()[0]["prompts"]:
    decoder.step()
  (reading,) = decoder._reading().values()
  decoder.swap(harness.lively_params(harness.LLAMA_DRAFT), 1)
  (done,) = (x for x in cases.drained(decoder) if x.number == reading.number)
  seed = sampling.numbered_seed(done.request.sampling.seed, done.number)
  assert int(done.settings.seed[0]) == seed != done.request.sampling.seed


@pytest.mark.parametrize("target", [harness.TARGET, harness.T5GEMMA])
def test_encoder_is_refused(target):
  with pytest.raises(base.InputError, match="prefill_chunk: received 4, expected 0"):
    engine.Engine(CONFIG, target, harness.lively_params(target))
