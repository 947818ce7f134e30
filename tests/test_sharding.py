"""One device and four (data 2 x model 2) agree, and parameters are really split."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
from decoding import harness
from jax.sharding import NamedSharding, PartitionSpec

from osd_jax import native, sharding, testing
from osd_jax.decoding import accept, records
from osd_jax.distillation import update
from osd_jax.engine import engine, steps
from osd_jax.engine.requests import DecodingConfig, Request, SamplingConfig
from osd_tools import hlo

TARGET, DRAFT, VOCAB = harness.TARGET, harness.DRAFT, 64
FOUR = sharding.PartitionConfig(data=2, model=2)
ALL_SPLIT = (FOUR, 0)  # splits drafts of any size
DECODING = DecodingConfig(
  rows=2, num_draft_tokens=3, source_lengths=(8,), target_length=10, record_top_k=VOCAB
)

pytestmark = pytest.mark.skipif(
  len(jax.devices()) < 4, reason="needs four devices; conftest.py fakes them"
)


def placed(mesh):
  """A partitioner of a config or of (config, limit), and the placed parameters."""
  config, *limit = mesh if isinstance(mesh, tuple) else (mesh,)
  partitioner = sharding.make(config)
  for whole_draft in limit:
    partitioner = dataclasses.replace(partitioner, whole_draft=whole_draft)
  target, draft = map(harness.lively_params, (TARGET, DRAFT))
  return (
    partitioner,
    partitioner.place_params(TARGET, target),
    partitioner.place_draft(DRAFT, draft),
  )


@functools.cache
def served(config, rule="rejection", temperature=0.0):
  partitioner, target, draft = placed(config)
  decoding = dataclasses.replace(DECODING, acceptance_rule=rule)
  decoder = engine.Engine(decoding, TARGET, target, DRAFT, draft, partitioner)
  source, mask = testing.random_sources(5, 8, VOCAB, 0)
  sampling = SamplingConfig(temperature=temperature, seed=4)
  requests = [
    Request(row[keep], sampling.of_request(index))
    for index, (row, keep) in enumerate(zip(source, mask, strict=True))
  ]
  return decoder, decoder.run(requests)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("config", "rule", "temperature"),
  [
    (FOUR, "rejection", 0.0),
    (ALL_SPLIT, "rejection", 0.0),
    *((ALL_SPLIT, rule, 1.0) for rule in accept.RULES),
  ],
  ids=str,
)
def test_four_devices_emit_the_tokens_and_records_of_one(config, rule, temperature):
  with native.portable(True):  # drafts are drawn in another way on a single CPU
    _, one = served(sharding.PartitionConfig(), rule, temperature)
  _, four = served(config, rule, temperature)
  for single, split in zip(one, four, strict=True):
    assert single.tokens.tolist() == split.tokens.tolist()
    assert single.accepted == split.accepted
    count = len(single.tokens)

    def by_id(done, count=count):
      kept = jax.tree.map(lambda leaf: np.asarray(leaf)[0, :count], done.batch.records)
      order = np.argsort(kept.ids, axis=-1)
      return np.take_along_axis(kept.log_probs, order, axis=-1)

    np.testing.assert_allclose(by_id(single), by_id(split), atol=1e-5)
  assert len({tuple(done.tokens) for done in one}) > 1
  assert not temperature or 0 < sum(d.accepted for d in one) < sum(
    d.drafted for d in one
  )


def test_rows_in_flight_are_split_except_arrays_read_by_the_host():
  decoder, _ = served(FOUR)
  state = decoder.state()[0]["rows"]
  for leaf in jax.tree.leaves((state.records, state.target_cache.cross_mask)):
    assert {shard.data.shape[0] for shard in leaf.addressable_shards} == {1}
  read = (state.tokens, state.length, state.stop_reason, state.counters)
  lengths = (state.target_cache.length, state.draft_cache.length)
  assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves((read, lengths)))


def gathered(text: str) -> list[set[str]]:
  """Returns the sets of dimensions of all all-gather results in compiled text."""
  shapes = re.findall(r"\w+\[([\d,]+)\]\S* all-gather\(", text)
  return [set(shape.split(",")) for shape in shapes]


def test_caches_are_split_by_head_and_never_gathered():
  """Each device holds its own heads and rows, since caches grow with the model."""
  decoder, _ = served(FOUR)
  state = decoder.state()[0]["rows"]
  keys = state.target_cache.self_keys[0]
  rows, heads, *rest = keys.shape
  assert {shard.data.shape for shard in keys.addressable_shards} == {
    (rows // 2, heads // 2, *rest)
  }
  arguments = (decoder.spec, 3, decoder.served, np.int32(4), state)
  text = steps.advance.lower(*arguments).compile().as_text()
  assert "all-reduce" in text  # the program uses several devices
  of_a_cache = {str(size) for size in rest}  # positions, head size
  assert not [dims for dims in gathered(text) if of_a_cache <= dims]
  whole = NamedSharding(keys.sharding.mesh, PartitionSpec())
  control = jax.jit(lambda x: x, out_shardings=whole).lower(keys).compile()
  assert [dims for dims in gathered(control.as_text()) if of_a_cache <= dims]


@functools.cache
def rounds_of(config, record_top_k=8):
  """Returns the compiled program of a greedy call with three drafted tokens."""
  partitioner, target, draft = placed(config)
  decoding = dataclasses.replace(DECODING, record_top_k=record_top_k)
  decoder = engine.Engine(decoding, TARGET, target, DRAFT, draft, partitioner)
  state = decoder.state()[0]["rows"] if decoder.run([Request([5, 6, 1])]) else None
  arguments = (decoder.spec, 3, decoder.served, np.int32(4), state)
  text = steps.advance.lower(*arguments).compile().as_text()
  return hlo.HloProgram(text, branch=0)


def test_round_communicates_only_sums_and_few_candidates():
  """Logits are never gathered: each device reduces its part of the vocabulary."""
  program = rounds_of(FOUR)
  assert not program.of("all-to-all", "collective-permute")
  assert program.of("all-reduce")
  candidates = 4 * DECODING.rows * 2 * 8  # 4 tokens, 2 shards, top 8
  gathers = program.of("all-gather")
  assert gathers and max(found.bytes for found in gathers) <= 4 * candidates
  # Negative control: a record wider than a shard needs all logits on every device.
  control = rounds_of(FOUR, record_top_k=VOCAB)
  assert max(found.bytes for found in control.of("all-gather")) > 4 * candidates


def test_drafting_with_a_small_draft_does_not_communicate():
  """Draft steps form the inner loop, so communication there would cost most."""

  # Depth 2 is the loop over draft steps within the loop over rounds.
  def within_drafting(config):
    return [x for x in rounds_of(config).of(*hlo.COLLECTIVES) if x.depth == 2]

  assert not within_drafting(FOUR)
  assert within_drafting(ALL_SPLIT)


@functools.cache
def learning_batch():
  source, _ = testing.random_sources(4, 8, VOCAB, 1)
  tokens = np.random.default_rng(2).integers(2, VOCAB, (4, 6)).astype(np.int32)
  batch = records.teacher_forced(
    TARGET, harness.lively_params(TARGET), source, tokens, VOCAB
  )
  return jax.tree.map(np.asarray, batch)


@pytest.mark.parametrize("mesh", [(4, 1), (2, 2), (1, 4)], ids=str)
def test_loss_and_gradient_agree_with_one_device(mesh):
  batch = learning_batch()
  gradient = jax.jit(update.loss_and_grad, static_argnums=(0, 1))
  found = []
  for config in (sharding.PartitionConfig(), sharding.PartitionConfig(*mesh)):
    partitioner, _, draft = placed(config)
    rows = partitioner.place_rows(batch)
    found.append(gradient(DRAFT, update.UpdateConfig(), draft, rows))
  (one_loss, one_grads), (four_loss, four_grads) = found
  np.testing.assert_allclose(one_loss, four_loss, atol=1e-5)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), one_grads, four_grads
  )
  assert max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(one_grads)) > 1e-3


def test_parameters_are_split_by_the_rules():
  _, target, _ = placed(FOUR)
  axes = TARGET.logical_axes()
  split = 0

  def check(spec, leaf):
    nonlocal split
    expected = list(leaf.shape)
    for axis, name in enumerate(spec):
      if sharding.RULES.get(name) == "model":
        expected[axis] //= 2
        split += 1
    shapes = {shard.data.shape for shard in leaf.addressable_shards}
    assert shapes == {tuple(expected)} and len(leaf.addressable_shards) == 4

  jax.tree.map(
    check, axes, target, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
  )
  assert split > 10
  kernel = target["decoder"]["layers_0"]["self_attention"]["query"]["kernel"]
  assert kernel.addressable_shards[0].data.shape == (32, 16)


def test_dimensions_that_do_not_divide_are_not_split():
  partitioner = sharding.make(FOUR)
  odd = partitioner.place_rows(np.zeros((3, 4)))
  even = partitioner.place_rows(np.zeros((4, 4)))
  assert odd.addressable_shards[0].data.shape == (3, 4)
  assert even.addressable_shards[0].data.shape == (2, 4)
  table = testing.tabular_model(7)  # a vocabulary that does not divide
  whole = partitioner.place_params(table, np.zeros((7, 7, 7), np.float32))
  assert whole.addressable_shards[0].data.shape == (7, 7, 7)


@pytest.mark.parametrize("mesh", [(1, 1), (2, 2)])
@pytest.mark.parametrize("rows", [8, 3])
def test_placing_own_rows_equals_placing_all_rows(mesh, rows):
  """A single process owns all rows; test_hosts.py covers two."""
  partitioner = sharding.make(sharding.PartitionConfig(*mesh))
  whole = np.arange(rows * 2).reshape(rows, 2)
  own = partitioner.own_rows(rows)
  assert own.tolist() == list(range(rows))
  placed = partitioner.place_own_rows(rows, (whole[own],))[0]
  expected = partitioner.place_rows(whole)
  assert placed.sharding.is_equivalent_to(expected.sharding, 2)
  np.testing.assert_array_equal(placed, whole)


def test_single_heads_are_never_split():
  """Two heads of 16 entries on four devices: 32 entries would divide, heads do not."""
  partitioner = sharding.make(sharding.PartitionConfig(model=4))
  assert TARGET.head_dim > 1
  kernel = partitioner.params(TARGET)["decoder"]["layers_0"]["self_attention"]["query"]
  assert kernel["kernel"].is_fully_replicated
  message = partitioner.unsplit(TARGET)
  assert "its 2 heads" in message and "PartitionConfig.model = 4" in message
  assert not sharding.make(FOUR).unsplit(TARGET)


def test_mesh_that_cannot_exist_is_refused():
  with pytest.raises(ValueError, match=r"data=64, model=2, which needs 128 devices"):
    sharding.make(sharding.PartitionConfig(data=64, model=2))
  for field in ("data", "model"):
    with pytest.raises(ValueError, match=rf"PartitionConfig\.{field}: received 0"):
      sharding.PartitionConfig(**{field: 0})


@pytest.mark.parametrize("config", [FOUR, ALL_SPLIT], ids=["whole", "split"])
def test_update_keeps_all_shardings(config):
  """Otherwise serving and the next update would compile again."""
  _, _, draft = placed(config)
  learning = update.UpdateConfig(ema_decay=0.5)
  learner = update.init_learner(learning, draft)
  batch = learning_batch()
  after, _ = update.update(DRAFT, learning, learner, [batch, batch])
  known = update.take_slice._cache_size()
  again, _ = update.update(DRAFT, learning, after, [batch, batch])
  assert update.take_slice._cache_size() == known
  assert int(again.step) == 4

  def check(before, now):
    assert now.sharding == before.sharding and len(now.sharding.device_set) == 4

  jax.tree.map(check, learner, again)
