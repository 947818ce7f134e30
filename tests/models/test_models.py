"""Every family and draft form: cached decoding equals teacher forcing."""

import re

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import cases
from models.cases import CLOSE, ROWS, SOURCE, TARGET, Runner

from osd_jax import base, native
from osd_jax.base import NO_TOKEN
from osd_jax.models import families, layers, llama, served
from osd_jax.models.shapes import DraftServing

EMBEDDING = ("token_embedder", "embedding")


@pytest.fixture(scope="module", params=cases.CASES)
def runner(request):
  return Runner(request.param)


@pytest.fixture
def name(runner, request):
  return request.node.callspec.params["runner"]


@pytest.mark.parametrize("stride", [1, 4])  # calls of 1, and of 4 and 2 tokens
def test_decoding_equals_teacher_forcing(runner, stride):
  logits, cache = runner.feed(stride)
  np.testing.assert_allclose(logits, runner.forced, **CLOSE)
  np.testing.assert_array_equal(cache.length, [TARGET] * ROWS)
  assert logits.dtype == runner.forced.dtype == np.float32
  assert np.max(np.abs(logits)) <= (runner.shape.logit_cap or np.inf)


def test_shifted_inputs_change_the_logits(runner):
  """Negative control: every row changes if inputs are shifted by one position."""
  logits, _ = runner.feed(1, fed=runner.text)
  apart = np.max(np.abs(logits - runner.forced), axis=2)
  assert np.mean(apart > 0.1) > 0.9


@pytest.mark.parametrize("is_split", [False, True])
def test_code_for_other_backends_decodes_equally(runner, name, is_split):
  with native.portable(is_split):
    portable, _ = Runner(name).feed(3)  # two calls of one program
  np.testing.assert_allclose(portable, runner.forced, **runner.close)


def test_target_that_is_kept_with_joined_kernels_scores_equally(runner):
  """`pairs.load_pair` keeps it so on an accelerator."""
  copy = flax.traverse_util.flatten_dict(runner.target_params)
  copy = flax.traverse_util.unflatten_dict(dict(copy))  # `taken` empties it
  joined = served.taken(copy, "float32", base.Layout.PACKED)
  assert "query_key_value" in str(jax.tree.structure(joined))
  model = families.build(runner.shape, kept=base.Layout.PACKED)
  positions = np.array([[0, 3], [1, 2], [2, 5]], np.int32)
  arguments = (runner.source, runner.mask, runner.text, positions)
  expected = cases.score_at(runner.target, runner.target_params, *arguments)
  with native.portable(is_split=False):
    found = cases.score_at(model, joined, *arguments)
  np.testing.assert_allclose(found, expected, **CLOSE)


def test_bfloat16_is_close_to_float32(runner, name):
  half = Runner(name, dtype="bfloat16")
  logits, cache = half.feed(3)
  assert logits.dtype == np.float32
  assert {x.dtype for x in cache.self_keys + cache.cross_values} == {jnp.bfloat16.dtype}
  apart = np.mean(np.abs(logits - runner.forced))
  assert 1e-4 < apart < 0.1 * np.std(runner.forced)


def test_rewound_rows_continue_at_their_own_offsets(runner):
  _, cache = runner.feed(1)
  length = np.array([1, 4, 3], np.int32)
  # Entries at and after the length are stale, and never read.
  slots = np.arange(cache.self_keys[0].shape[2])
  stale = (slots >= length[:, None]) & (slots < cache.slots)
  overwrite = lambda entries: tuple(
    jnp.where(stale[:, None, :, None], 1e3, entry) for entry in entries
  )
  rewound = cache.replace(
    self_keys=overwrite(cache.self_keys),
    self_values=overwrite(cache.self_values),
    length=jnp.asarray(length),
  )
  rows, at = np.arange(ROWS)[:, None], length[:, None] + np.arange(2)
  served = runner.served()
  given = (runner.model, served, runner.fed[rows, at])
  states = runner.states_at(at, rows)
  logits, after = cases.decode(*given, rewound, *states)
  np.testing.assert_allclose(logits, runner.forced[rows, at], **CLOSE)
  np.testing.assert_array_equal(after.length, length + 2)
  # Negative control: the same tokens one position later get other logits.
  late = cache.replace(length=jnp.asarray(length + 1))
  other, _ = cases.decode(*given, late, *states)
  assert np.all(np.max(np.abs(other - logits), axis=(1, 2)) > 1e-3)


def test_padding_on_either_side_does_not_change_logits(runner, name):
  """T5 uses absolute positions in the encoder, so only the end may be padded."""
  pad = runner.model.pad_id
  padded = [np.pad(runner.source, ((0, 0), (0, 5)), constant_values=pad)]
  if name in cases.LLAMAS:
    padded.append(np.full((ROWS, SOURCE + 5), pad, np.int32))
    for row, keep in enumerate(runner.mask):
      prompt = runner.source[row][keep]
      padded[-1][row, 2 : 2 + len(prompt)] = prompt
  for source in padded:
    np.testing.assert_allclose(runner.score(source), runner.forced, **runner.close)
    np.testing.assert_allclose(runner.feed(3, source)[0], runner.forced, **runner.close)
  # Negative control: another prompt changes the scores of every row.
  other = np.where(runner.mask, 3 + (runner.source + 7) % 60, pad).astype(np.int32)
  apart = np.abs(runner.score(other) - runner.forced)
  assert np.all(np.max(apart, axis=(1, 2)) > 1e-2)


def test_inputs_without_a_token_stay_zero_in_every_layer(runner, name):
  """The native products skip them. The other rows and positions do not change."""
  is_token = np.ones((ROWS, TARGET), bool)
  is_token[1], is_token[2, 3:] = False, False
  logits, _ = runner.feed(4, fed=np.where(is_token, runner.fed, NO_TOKEN))
  whole, _ = runner.feed(4)
  np.testing.assert_allclose(logits[is_token], whole[is_token], rtol=1e-5, atol=1e-5)
  # The logits of zeros are zero, unless a projection adds a bias to each output.
  assert np.any(logits[~is_token]) == (name == "qwen3")
  assert np.all(np.any(whole[~is_token] != 0, axis=-1))


@pytest.mark.parametrize("case", [*cases.ALONE, "attached to t5"])
def test_token_whose_embedding_is_zero_is_a_token(case):
  """A model may have such rows, for example of tokens that were never trained."""
  runner = Runner(case)
  table = ("target", "embedding") if runner.is_attached else EMBEDDING
  leaves = flax.traverse_util.flatten_dict(runner.params)
  leaves[table] = leaves[table].at[runner.fed[:, 2]].set(0.0)
  runner.params = flax.traverse_util.unflatten_dict(leaves)
  found, _ = runner.feed(4)
  np.testing.assert_allclose(found, runner.score(), **runner.close)
  assert np.all(np.any(found[:, 2] != 0, axis=-1))


def test_padding_of_a_prompt_stays_zero_in_every_layer(runner, name):
  """Of a Llama, whose prompts the native products compute."""
  if name not in cases.LLAMAS:
    pytest.skip("its encoder is computed as trained")
  target = families.build(runner.shape, states="prompt")
  served = target.prepare(runner.params)
  read = cases.prefill(target, served, runner.source, runner.mask, 4)
  states = np.asarray(read.target_states, np.float32)
  assert np.all(np.any(states[runner.mask] != 0, axis=-1))
  assert np.any(states[~runner.mask]) == (name == "qwen3")


def test_logits_do_not_depend_on_later_tokens_or_other_rows(runner):
  text = runner.text.copy()
  text[1:, 3] = 3 + (text[1:, 3] + 7) % 50
  changed = runner.score(text=text)
  np.testing.assert_allclose(changed[:, :4], runner.forced[:, :4], **CLOSE)
  np.testing.assert_allclose(changed[0], runner.forced[0], **CLOSE)
  apart = np.max(np.abs(changed - runner.forced)[1:, 4], axis=-1)
  assert np.all(apart > 1e-3)


def test_score_at_selects_from_score(runner):
  positions, tokens = jnp.asarray([[5, 0], [2, 3], [1, 1]]), jnp.asarray([60, 1, 7])
  part = runner.score(at=(positions, tokens))
  whole = runner.forced[np.arange(ROWS)[:, None], positions][..., tokens]
  np.testing.assert_allclose(part, whole, **CLOSE)


SERVINGS = {
  "int8": DraftServing(int8=True),
  "shortlist": DraftServing(shortlist=4),
  "both": DraftServing(int8=True, shortlist=4),
}


@pytest.mark.parametrize("serving", SERVINGS)
@pytest.mark.parametrize("case", ["t5 1.1", "t5 1.0", "qwen2", "attached to t5"])
def test_approximate_serving_is_close_to_exact_scores(case, serving):
  """A shortlist is exact on its tokens; int8 is close, and never equal."""
  serving = SERVINGS[serving]
  light = Runner(case, serving)
  tokens, expected = np.arange(64), Runner(case).forced
  shortlist = ()
  if serving.shortlist:
    tokens = np.array([1, 9, 33, 63])
    shortlist = (jnp.asarray(tokens),)
  logits, _ = light.feed(1, served=light.served(*shortlist))
  apart = np.abs(logits - expected)[..., tokens]
  assert np.all(np.isneginf(np.delete(logits, tokens, axis=-1)))
  if serving.int8:
    assert 0 < np.mean(apart) < 0.15 * np.std(expected)
  else:
    np.testing.assert_allclose(logits[..., tokens], expected[..., tokens], **CLOSE)
  # Only the served copy is approximate.
  np.testing.assert_array_equal(light.forced, expected)


@pytest.mark.parametrize("name", [*cases.LLAMAS, "attached to a first layer"])
def test_chunked_prefill_equals_whole_prefill(name, monkeypatch):
  whole, cache = Runner(name).feed(4)
  monkeypatch.setattr(llama, "CHUNK", 3)
  # Another `max_positions` gives another model, so the new CHUNK is traced.
  other = Runner(name, max_positions=100)
  arguments = (other.target.prepare(other.target_params), other.source, other.mask, 13)
  text = cases.prefill.lower(other.target, *arguments).as_text()
  # Chunks run in a loop, and no tensor has the size of all attention weights.
  assert "while" in text and f"x{SOURCE}x{SOURCE}xf32" not in text
  by_chunks, kept = other.feed(3)
  np.testing.assert_allclose(by_chunks, whole, **other.close)
  np.testing.assert_array_equal(kept.cross_mask, cache.cross_mask)


@pytest.mark.parametrize("name", [*cases.LLAMAS, "reads the tokens of llama"])
def test_chunks_fill_the_cache_like_prefill(name):
  """The last chunk overlaps; the control leaves the second one out."""
  runner, room = Runner(name), TARGET + cases.ROOM
  model, served = runner.target, runner.target.prepare(runner.target_params)
  prompts = runner.source, runner.mask
  whole = cases.prefill(model, served, *prompts, room)
  extend = jax.jit(model.extend, static_argnums=5)

  def differences(starts):
    cache = jax.tree.map(jnp.zeros_like, whole)
    for start in starts:
      cache = extend(served, *prompts, cache, np.int32(start), 3)
    pairs = zip(jax.tree.leaves(whole), jax.tree.leaves(cache), strict=True)
    return [np.max(np.abs(np.subtract(*map(np.float32, pair)))) for pair in pairs]

  assert max(differences([0, 3, SOURCE - 3])) < 1e-5
  assert max(differences([0, SOURCE - 3])) > 0.1


@pytest.mark.parametrize("name", [*cases.T5S, "t5gemma", "gemma"])
def test_queries_in_blocks_attend_like_all_at_once(name, monkeypatch):
  """This covers the last block, which overlaps, and in Gemma the scores of a text."""

  def has_all_weights(runner):
    served = runner.target.prepare(runner.target_params)
    arguments = (served, runner.source, runner.mask, 13)
    text = cases.prefill.lower(runner.target, *arguments).as_text()
    # A mask has one head.
    return bool(re.search(rf"x[2-9]x{SOURCE}x{SOURCE}xf32", text))

  whole = Runner(name)
  logits, forced = whole.feed(4)[0], whole.forced
  assert has_all_weights(whole)
  monkeypatch.setattr(layers, "BLOCK", 3)
  # Another `embedding_std` gives another model, so the new BLOCK is traced.
  other = Runner(name, embedding_std=2.0)
  assert not has_all_weights(other)
  np.testing.assert_allclose(other.feed(4)[0], logits, **CLOSE)
  np.testing.assert_allclose(other.forced, forced, **CLOSE)


@pytest.mark.parametrize("case", cases.ALONE)
def test_init_draws_parameters_that_match_the_logical_axes(case):
  model = Runner(case).model
  params = jax.jit(model.init)(jax.random.key(0))
  again = jax.jit(model.init)(jax.random.key(1))
  embedding = lambda tree: tree["token_embedder"]["embedding"]
  assert np.std(embedding(params)) == pytest.approx(1.0, rel=0.1)
  assert not np.array_equal(embedding(params), embedding(again))
  jax.tree.map(
    lambda param, names: np.testing.assert_equal(len(names), np.ndim(param)),
    params,
    model.logical_axes(),
  )
