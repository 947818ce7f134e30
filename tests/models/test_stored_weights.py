"""Targets that are stored in bfloat16 compute as their float32 values do."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_pair

from osd_jax import certificate, native, pairs, sharding, testing
from osd_jax.distillation import update
from osd_jax.engine import server
from osd_jax.engine.requests import DecodingConfig, Request
from osd_jax.models import weights

DECODING = DecodingConfig(
  rows=2, source_lengths=(16,), target_length=12, num_draft_tokens=3
)
ALONE, MESH = sharding.PartitionConfig(), sharding.PartitionConfig(model=2)


def noise(leaf):
  """Values that bfloat16 holds, and that affect every logit."""
  wave = jnp.sin(jnp.arange(leaf.size, dtype=jnp.float32)).reshape(leaf.shape)
  return (leaf + 0.1 * wave).astype(jnp.bfloat16).astype(jnp.float32)


@pytest.fixture(scope="module", params=["t5", "llama"])
def configs(request, tmp_path_factory):
  """The same values in a file of bfloat16 and in a file of float32, by type."""
  found = {}
  for storage in ("bfloat16", "float32"):
    config = tiny_pair.save_tiny_pair(tmp_path_factory.mktemp(storage), request.param)
    target = weights.load(config.target)
    target = dataclasses.replace(target, params=jax.tree.map(noise, target.params))
    weights.save(config.target, target, storage)
    found[storage] = dataclasses.replace(config, draft="attached")
  return found


def load(config, partition=ALONE):
  return pairs.load_pair(config, sharding.make(partition))


def prompts(pair):
  pad_id = pair.target.pad_id
  return testing.random_sources(3, 16, tiny_pair.VOCAB_SIZE, 1, pad_id=pad_id)


def scored(pair):
  source, mask = prompts(pair)
  return jax.jit(pair.target.score)(pair.target_params, source, mask, source)


def logits_of(pair):
  """Target states of prefill, and logits of decoding and scoring."""
  source, mask = prompts(pair)
  served = pair.target.prepare(pair.target_params)
  cache = jax.jit(pair.target.prefill, static_argnums=3)(served, source, mask, 20)
  found, at = [cache.target_states], 0
  for count in (2, 11):  # the second has more columns than native products take
    part = source[:, at : at + count]
    logits, cache = jax.jit(pair.target.decode)(served, part, cache)
    found.append(logits)
    at += count
  return [*found, scored(pair)]


@pytest.mark.parametrize("partition", [ALONE, MESH])
def test_logits_have_the_bits_of_the_float32_values(configs, partition):
  stored, wide = (load(configs[storage], partition) for storage in configs)
  types = [leaf.dtype for leaf in jax.tree.leaves(stored.target_params)]
  assert set(types) == {jnp.dtype("bfloat16")}
  # On a mesh, XLA computes all products.
  with native.portable(True) if partition == MESH else contextlib.nullcontext():
    found, wanted = logits_of(stored), logits_of(wide)
  for got, expected in zip(found, wanted, strict=True):
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got, expected)
  # Negative control: a model that rounds its activations gives other logits.
  rounded = load(dataclasses.replace(configs["bfloat16"], dtype="bfloat16"))
  assert np.any(np.asarray(scored(rounded)) != found[-1])


def answered(pair):
  requests = [
    Request(np.arange(3 + seed, 12 + 2 * seed, dtype=np.int32)) for seed in range(4)
  ]
  return server.Server(pair, DECODING).run(requests)


def test_answers_are_exact_and_equal_those_of_the_float32_values(configs):
  stored, wide = (load(configs[storage]) for storage in configs)
  plain, fast = answered(stored.plain()), answered(stored)
  for got, expected in zip(fast, answered(wide), strict=True):
    np.testing.assert_array_equal(got.tokens, expected.tokens)
    # The draft reads the target's embedding, states and head.
    assert (got.drafted, got.accepted) == (expected.drafted, expected.accepted)
  certifier = certificate.Certifier(stored)
  verdict = certifier.judge(zip(plain, fast, strict=True))
  assert certifier.check == "token equality" and verdict.passed
  assert verdict.equal == len(plain)


def test_updates_of_an_attached_draft_equal_those_of_the_float32_values(configs):
  found = []
  for config in configs.values():
    pair = load(config)
    (done, *_) = answered(pair.plain())
    trained, frozen = pair.draft.split(pair.draft_params)
    settings = update.UpdateConfig(steps_per_update=1)
    learner = update.init_learner(settings, trained)
    learner, _ = update.update(pair.draft, settings, learner, [done.batch], frozen)
    found.append(learner.params)
  jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.parametrize("storage", ["bfloat16", "float32"])
def test_target_lies_in_memory_once(configs, storage):
  """Also the parts that an attached draft takes."""
  pair = load(configs[storage])
  held = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(pair.target_params)}
  _, frozen = pair.draft.split(pair.draft_params)
  for shared in (pair.target.prepare(pair.target_params), frozen):
    assert {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(shared)} <= held
  served = pair.draft.prepare(pair.draft_params)["target"]
  assert {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(served)} <= held


def test_target_can_be_trained_as_a_draft(configs):
  """Its kernels are kept for serving, whose products have no gradient."""
  pair = load(configs["float32"])
  source, mask = testing.random_sources(1, 8, 64, 1, pad_id=pair.target.pad_id)
  loss = lambda params: jnp.mean(pair.target.score(params, source, mask, source) ** 2)
  gradient = jax.jit(jax.grad(loss))(pair.target_params)
  assert all(np.any(leaf) for leaf in jax.tree.leaves(gradient))
