"""Attached drafts: use of target states, frozen parameters, weights files."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import cases
from models.cases import CLOSE, ROWS, SOURCE, Runner

from osd_jax import base, pairs
from osd_jax.decoding import records
from osd_jax.distillation import losses, update
from osd_jax.models import attached, families, weights
from osd_jax.models.shapes import DraftServing, T5Config


@pytest.fixture(scope="module", params=["attached to t5", "attached to a first layer"])
def runner(request):
  return Runner(request.param)


def test_draft_depends_on_the_source_only_through_target_states(runner):
  computed = runner.score(target_states=None)
  if isinstance(runner.shape, T5Config):
    np.testing.assert_array_equal(runner.forced, computed)
  else:
    # Llama's prefill sums in another order, so bfloat16 rounds some values differently.
    np.testing.assert_allclose(runner.forced, computed, **runner.close)
    assert np.mean(np.abs(runner.forced - computed)) < 5e-3
  target_states = runner.target_states()
  assert target_states.dtype == jnp.bfloat16
  assert target_states.shape == (ROWS, SOURCE, runner.model.state_width)
  # Negative control: other states change the scores of every row.
  changed = runner.source.copy()
  changed[:, 0] = 3 + (changed[:, 0] + 5) % 40
  other = runner.score(target_states=runner.target_states(changed))
  assert np.all(np.max(np.abs(other - runner.forced), axis=(1, 2)) > 1e-2)


def test_scores_do_not_depend_on_the_scale_of_the_target_embedding(runner):
  """Embeddings of published models differ in scale by orders of magnitude."""
  frozen = runner.params["target"]
  # Negative control: scaling the head changes the scores.
  for name, equal in (("embedding", True), ("head", False)):
    changed = {**runner.params, "target": {**frozen, name: 100 * frozen[name]}}
    close = np.allclose(runner.score(params=changed), runner.forced, **CLOSE)
    assert close == equal, name


def test_target_returns_no_states_by_default(runner):
  alone = families.build(runner.shape, "alone")
  served = alone.prepare(runner.target_params)
  cache = cases.prefill(alone, served, runner.source, runner.mask, 4)
  assert cache.target_states is None


def test_frozen_parameters_are_shared_and_not_trained(runner):
  own, frozen = runner.model.split(runner.params)
  embedding = runner.target_params["token_embedder"]["embedding"]
  assert frozen["embedding"] is embedding
  assert jax.tree.structure(own) == jax.tree.structure(
    jax.eval_shape(runner.model.init, jax.random.key(0))
  )
  assert set(own) == {"inward", "decoder", "outward"}
  assert jax.tree.structure(own) == jax.tree.structure(
    runner.model.logical_axes(), is_leaf=lambda leaf: isinstance(leaf, tuple)
  )


def test_swap_reuses_the_quantized_target_head():
  """Quantizing the head again would dominate the time of a swap."""
  light = Runner("attached to t5", DraftServing(int8=True))
  moved = jax.tree.map(lambda leaf: leaf * 1.01, light.model.split(light.params)[0])
  swapped = light.model.prepare(light.model.join(moved, light.params[attached.FROZEN]))
  before, after = (
    jax.tree.leaves(served["draft_head"])
    for served in (light.model.prepare(light.params), swapped)
  )
  assert len(before) == 2 and all(a is b for a, b in zip(before, after, strict=True))
  short = Runner("attached to t5", DraftServing(int8=True, shortlist=4))
  # A shortlisted head is quantized at each swap, because its tokens may change.
  assert "draft_head" not in short.params[attached.FROZEN]


# ---- Drafts that read the states of tokens


@pytest.mark.parametrize("family", ["t5", "llama"])
def test_token_states_of_decoding_are_those_of_teacher_forcing(family):
  runner = Runner(f"reads the tokens of {family}")
  served = runner.target.prepare(runner.target_params)
  cache = cases.prefill(runner.target, served, runner.source, runner.mask, 10)
  for start, stop in ((0, 1), (1, 4), (4, 6)):
    _, cache = cases.decode(runner.target, served, runner.fed[:, start:stop], cache)
  found = np.asarray(cache.token_states[:, :6], np.float32)
  expected = np.asarray(runner.token_states, np.float32)
  np.testing.assert_allclose(found, expected, rtol=2e-2, atol=2e-2)
  assert not np.any(cache.token_states[:, 6:])


READERS = [name for name in cases.ATTACHED if name.startswith(("reads", "eagle"))]


@pytest.mark.parametrize("name", READERS)
def test_trained_steps_are_those_that_draft(name):
  """Step n at position t is what a draft computes n steps after it left the target."""
  runner = Runner(name)
  given = (runner.params, runner.source, runner.mask, runner.text)
  states = {"target_states": runner.target_states()}
  states["token_states"] = runner.token_states
  trained = np.asarray(jax.jit(runner.model.score_steps)(*given, **states))
  assert len(trained) == attached.STEPS > 1
  np.testing.assert_allclose(trained[0], runner.forced, **CLOSE)
  served, cache = runner.served(), runner.start()
  read = runner.states_at(slice(0, 2))
  logits, cache = cases.decode(runner.model, served, runner.fed[:, :2], cache, *read)
  own = cache.replace(token_states=cache.token_states[:, 1:])
  for step in range(1, attached.STEPS):
    at = 1 + step
    logits, own = cases.decode(runner.model, served, runner.fed[:, at : at + 1], own)
    np.testing.assert_allclose(logits[:, 0], trained[step, :, at], **CLOSE)
    # Negative control: a draft that read the target's state would say something else.
    assert np.max(np.abs(logits[:, 0] - trained[0, :, at])) > 1e-2


def test_scores_of_chosen_positions_and_tokens_are_those_of_all():
  runner = Runner("reads the tokens of t5")
  given = (runner.params, runner.source, runner.mask, runner.text)
  states = {"token_states": runner.token_states}
  positions, tokens = np.array([[5, 0], [2, 3], [1, 4]]), np.array([3, 60, 7])
  score_steps = jax.jit(runner.model.score_steps)
  part = score_steps(*given, positions, tokens, **states)
  whole = np.asarray(score_steps(*given, **states))
  rows = np.arange(ROWS)[:, None]
  np.testing.assert_allclose(part, whole[:, rows, positions][..., tokens], **CLOSE)


@pytest.mark.parametrize("subsampled", [False, True])
def test_loss_is_the_mean_over_the_steps_that_a_position_can_have(subsampled):
  runner = Runner("reads the tokens of t5")
  given = (runner.source, runner.mask, runner.text)
  logits = jax.jit(runner.target.score)(runner.target_params, *given)
  batch = base.DistillationBatch(
    source=runner.source,
    target=runner.text,
    mask=jnp.ones(runner.text.shape, bool),
    records=records.from_logits(logits, 8),
    weight=jnp.ones(ROWS),
    target_states=runner.target_states(),
    token_states=runner.token_states,
  )
  counts = (4, 20, 8) if subsampled else (0, 0, 0)
  loss = losses.LossConfig("forward_kl", 0.5, "all", *counts)
  own, frozen = runner.model.split(runner.params)
  gradient_of = jax.jit(update.loss_and_grad, static_argnums=(0, 1))
  config = update.UpdateConfig(loss=loss)
  value, gradient = gradient_of(runner.model, config, own, batch, frozen)
  assert all(np.any(leaf) for leaf in jax.tree.leaves(gradient["state_inward"]))
  score_steps = jax.jit(runner.model.score_steps)
  steps = score_steps(runner.params, *given, **runner.model.score_inputs(batch))
  positions = np.arange(runner.text.shape[1])
  masks = [batch.mask & (positions >= step)[None] for step in range(len(steps))]
  loss_of = jax.jit(losses.distillation_loss, static_argnums=0)
  expected = np.mean(
    [
      loss_of(loss, part, batch.replace(mask=mask))
      for part, mask in zip(steps, masks, strict=True)
    ]
  )
  # Four positions, and eight tokens for the others, estimate the loss of all.
  assert float(value) == pytest.approx(expected, rel=0.25 if subsampled else 1e-5)


def test_missing_token_states_are_reported():
  runner = Runner("reads the tokens of t5")
  with pytest.raises(base.InputError, match="token_states is missing"):
    runner.score(token_states=None)


# ---- Files


def written(runner, folder, **changes):
  """Saves the runner's draft; returns the path and the trained parameters."""
  own, _ = runner.model.split(runner.params)
  target = identity(runner, "big.safetensors")
  held = weights.AttachedWeights(
    cases.DRAFT, own, target.fingerprint, target.name, "notes"
  )
  path = folder / "draft.safetensors"
  return weights.save(path, dataclasses.replace(held, **changes)), own


def identity(runner, name="target", dtype="float32", **changes):
  shape = dataclasses.replace(runner.shape, dtype=dtype)
  params = {**runner.target_params, **changes}
  return weights.identity(weights.Weights(shape, params), name)


def test_file_contains_only_trained_parameters(runner, tmp_path):
  path, own = written(runner, tmp_path)
  held = attached.load(path, identity(runner))
  jax.tree.map(np.testing.assert_array_equal, held.params, own)
  assert (held.config, held.notes) == (cases.DRAFT, "notes")
  assert weights.is_attached(path) and not weights.is_attached(tmp_path / "none")
  count = sum(leaf.size for leaf in jax.tree.leaves(own))
  # 4,000 bytes of header leave no room for the target's embedding.
  assert path.stat().st_size < 4 * count + 4000


def test_loading_with_another_target_is_refused(runner, tmp_path):
  path, _ = written(runner, tmp_path)
  embedding = {"embedding": 1 + runner.target_params["token_embedder"]["embedding"]}
  other = identity(runner, "other.x", token_embedder=embedding)
  with pytest.raises(base.InputError, match=r"big\.safetensors .*received other\.x"):
    attached.load(path, other)
  # The dtype is not part of the identity.
  same = identity(runner, dtype="bfloat16")
  assert attached.load(path, same).config == cases.DRAFT


def test_draft_fits_a_target_with_further_end_tokens(tmp_path):
  runner = Runner("attached to llama")
  path, _ = written(runner, tmp_path)
  ends = (*runner.shape.eos_ids, 7)
  held = weights.Weights(
    dataclasses.replace(runner.shape, eos_ids=ends), runner.target_params
  )
  target = weights.identity(held, "other")
  assert attached.load(path, target).target == target.fingerprint
  held = dataclasses.replace(
    held, config=dataclasses.replace(held.config, eos_ids=ends[::-1])
  )
  with pytest.raises(base.InputError, match="is attached to the target"):
    attached.load(path, weights.identity(held, "other"))


def test_draft_of_a_sibling_is_accepted_where_asked(runner, tmp_path):
  """A target of another shape is refused even then."""
  path, own = written(runner, tmp_path, target_sizes=identity(runner).sizes)
  embedding = {"embedding": 1 + runner.target_params["token_embedder"]["embedding"]}
  other = identity(runner, token_embedder=embedding)
  held = attached.load(path, other, sibling=True)
  jax.tree.map(np.testing.assert_array_equal, held.params, own)
  assert held.target != other.fingerprint  # so that the report can say it
  # Copies may differ in what does not concern a draft.
  config = dataclasses.replace(
    runner.shape, tied_head=not runner.shape.tied_head, dtype="bfloat16"
  )
  attached.load(path, dataclasses.replace(other, config=config), sibling=True)
  size = runner.shape.vocab_size
  longer = dataclasses.replace(
    other, config=dataclasses.replace(runner.shape, vocab_size=size + 1)
  )
  said = rf"vocab_size={size},.*vocab_size={size + 1},.*neither is a copy"
  with pytest.raises(base.InputError, match=said):
    attached.load(path, longer, sibling=True)


def test_attached_draft_file_is_refused_as_t5_weights(runner, tmp_path):
  path, _ = written(runner, tmp_path)
  with pytest.raises(base.InputError, match="osd_jax.attached.*cannot be exported"):
    weights.load(path)


def test_new_attached_draft_needs_only_a_target():
  """The random draft of the shipped target has the same parameters every time."""
  config = pairs.PairConfig(draft="attached")
  one, same = pairs.load_pair(config), pairs.load_pair(config)
  own, frozen = one.draft.split(one.draft_params)
  assert sum(leaf.size for leaf in jax.tree.leaves(own)) == 377_472
  jax.tree.map(
    np.testing.assert_array_equal, own, same.draft.split(same.draft_params)[0]
  )
  assert one.target.vocab_size == frozen["head"].shape[0]
