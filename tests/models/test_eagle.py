"""EAGLE-3 heads: their files, what is refused, the draft vocabulary.

`test_models.py` runs a head through the matrix of all models, and `test_hf_eagle.py`
compares it with the code of speculators.
"""

import dataclasses
import json

import jax
import numpy as np
import pytest
import safetensors.numpy
import tiny_online
import tiny_pair
from models import cases
from models.cases import CLOSE

from osd_jax import base, convert, corpus, evaluate, pairs, testing
from osd_jax.engine.requests import DecodingConfig, SamplingConfig
from osd_jax.models import attached, eagle, families, weights
from osd_jax.models.convert import eagle as heads
from osd_jax.models.shapes import AttachedConfig, DraftServing, EagleConfig


@pytest.fixture(scope="module")
def files(tmp_path_factory):
  return tiny_online.save_lively_pair(tmp_path_factory.mktemp("pair"), "llama")


@pytest.fixture(scope="module")
def pair(files):
  """A target with a new head."""
  return pairs.load_pair(tiny_online.with_head(files))


def written(pair, folder, kind, **changes):
  """A folder with the head of a pair, in one of the formats."""
  path = pair.save_draft(folder / "head.safetensors", pair.draft_params, "made by hand")
  head = dataclasses.replace(attached.read(path), **changes)
  return heads.write(folder / kind, head, kind)


def edited(folder, fields=None, tensors=None):
  """Changes config.json and tensors of a folder; None removes one."""
  config = folder / "config.json"
  found = {**json.loads(config.read_text()), **(fields or {})}
  config.write_text(json.dumps({k: v for k, v in found.items() if v is not None}))
  file = folder / "model.safetensors"
  found = {**safetensors.numpy.load_file(file), **(tensors or {})}
  safetensors.numpy.save_file({k: v for k, v in found.items() if v is not None}, file)
  return folder


@pytest.mark.parametrize("kind", ["speculators", "specforge"])
def test_files_hold_every_bit_of_a_head(files, pair, tmp_path, kind):
  folder = written(pair, tmp_path, kind)
  again = pairs.load_pair(dataclasses.replace(files, draft=str(folder)))
  assert again.draft_config == pair.draft_config
  for one, other in zip(
    *(jax.tree.leaves(x.draft_params) for x in (pair, again)), strict=True
  ):
    np.testing.assert_array_equal(one, other)
  # What was loaded from a folder is saved as a file, and converted back.
  file = again.save_draft(tmp_path / "again.safetensors", again.draft_params, "learned")
  assert pairs.load_pair(dataclasses.replace(files, draft=str(file))).own.keys() == {
    "ids"
  }
  back = convert.ConvertConfig(str(file), str(tmp_path / "back"), output_kind=kind)
  convert.run(back)
  first, second = (
    safetensors.numpy.load_file(path / "model.safetensors")
    for path in (folder, tmp_path / "back")
  )
  assert first.keys() == second.keys() and "d2t" in first
  for name, tensor in first.items():
    np.testing.assert_array_equal(tensor, second[name], err_msg=name)
  assert json.loads((tmp_path / "back/config.json").read_text())["provenance"] == (
    "learned"
  )
  one = tmp_path / "one.safetensors"
  convert.run(convert.ConvertConfig(str(folder), str(one)))
  assert attached.read(one).config == pair.draft_config


def test_formats_count_layers_differently(files, pair, tmp_path):
  shape = pair.draft_config
  assert shape.state_layers == (0, 1, 2)
  ids = [1, 1, 2]
  folder = written(pair, tmp_path, "speculators")
  name = "eagle_aux_hidden_state_layer_ids"
  assert heads.shape_of(edited(folder, {name: ids})).state_layers == (1, 1, 2)
  folder = written(pair, tmp_path, "specforge")
  config = {name: [0, 0, 1], "use_aux_hidden_state": True}
  assert heads.shape_of(edited(folder, {"eagle_config": config})).state_layers == (
    1,
    1,
    2,
  )
  deep = dataclasses.replace(testing.TINY_LLAMA, num_layers=12)
  edited(folder, {"eagle_config": None})
  assert heads.shape_of(folder, deep).state_layers == (2, 6, 9)
  with pytest.raises(base.InputError, match=r"bind ConvertConfig\.model to"):
    heads.shape_of(folder)


def test_rows_of_a_head_in_another_order_are_sorted(files, pair, tmp_path):
  folder = written(pair, tmp_path, "speculators")
  tensors = safetensors.numpy.load_file(folder / "model.safetensors")
  order = np.random.default_rng(0).permutation(len(tensors["d2t"]))
  places = np.arange(len(order))
  shuffled = {
    "d2t": (tensors["d2t"] + places)[order] - places,
    "lm_head.weight": tensors["lm_head.weight"][order],
  }
  again = pairs.load_pair(
    dataclasses.replace(files, draft=str(edited(folder, tensors=shuffled)))
  )
  kernel = lambda params: params["decoder"]["logits_dense"]["kernel"]
  np.testing.assert_array_equal(kernel(again.draft_params), kernel(pair.draft_params))


def test_own_embedding_is_kept_and_a_copy_of_the_target_is_not(files, pair, tmp_path):
  folder = written(pair, tmp_path, "speculators")
  table = np.array(pair.target_params["token_embedder"]["embedding"], np.float32)
  for own, is_kept in ((table, False), (table[::-1].copy(), True)):
    edited(folder, tensors={"embed_tokens.weight": own})
    again = pairs.load_pair(dataclasses.replace(files, draft=str(folder)))
    assert ("embedding" in again.own) == is_kept
    np.testing.assert_array_equal(again.draft_params["target"]["embedding"], own)
  file = again.save_draft(tmp_path / "own.safetensors", again.draft_params, "")
  after = pairs.load_pair(dataclasses.replace(files, draft=str(file)))
  np.testing.assert_array_equal(after.draft_params["target"]["embedding"], own)


def absolute(folder):
  tensors = safetensors.numpy.load_file(folder / "model.safetensors")
  ids = tensors["d2t"] + np.arange(len(tensors["d2t"]))
  return edited(folder, tensors={"d2t": ids + 600})


BROKEN = {
  "ids instead of offsets": (absolute, "d2t holds offsets, not ids"),
  "no draft vocabulary": (
    lambda folder: edited(folder, tensors={"d2t": None}),
    r"tensor d2t: found nothing, expected \(900,\)",
  ),
  "a norm is missing": (
    lambda folder: edited(folder, tensors={"layers.0.hidden_norm.weight": None}),
    r"layers\.0\.hidden_norm\.weight: found nothing",
  ),
  "another kind of draft": (
    lambda folder: edited(folder, {"speculators_model_type": "dflash"}),
    "speculators_model_type: received 'dflash', expected 'eagle3'",
  ),
  "other layers": (
    lambda folder: edited(folder, {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}),
    r"layers \(1, 2, 9\) of 2",
  ),
  "layers that are no numbers": (
    lambda folder: edited(folder, {"eagle_aux_hidden_state_layer_ids": "abc"}),
    "received 'abc', expected 'a list of integers >= 0'",
  ),
  "offsets that are no integers": (
    lambda folder: edited(folder, tensors={"d2t": np.zeros(900, np.float32)}),
    "tensor d2t: found F32, expected integers",
  ),
  "two layers": (
    lambda folder: edited(folder, {"eagle_aux_hidden_state_layer_ids": [1, 2]}),
    "states of 2 layers, width 96 instead of 64. It was made for target.safetensors",
  ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_heads_that_do_not_fit_are_refused_in_one_line(files, pair, tmp_path, fault):
  change, match = BROKEN[fault]
  folder = change(written(pair, tmp_path, "speculators"))
  with pytest.raises(base.InputError, match=match) as caught:
    pairs.load_pair(dataclasses.replace(files, draft=str(folder)))
  assert str(caught.value).startswith("PairConfig.draft: ")
  assert "\n" not in str(caught.value)


def test_other_targets_and_files_are_refused(files, pair, tmp_path):
  folder = written(pair, tmp_path / "a", "speculators")
  (tmp_path / "t5").mkdir()
  t5 = tiny_pair.save_tiny_pair(tmp_path / "t5")
  with pytest.raises(base.InputError, match="the layers of a decoder-only target"):
    pairs.load_pair(dataclasses.replace(t5, draft=str(folder)))
  short = DraftServing(shortlist=700)
  with pytest.raises(
    base.InputError,
    match="draft_serving may have no shortlist: received 700, expected 0",
  ):
    pairs.load_pair(dataclasses.replace(files, draft=str(folder), draft_serving=short))
  (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
  with pytest.raises(base.InputError, match=r"pytorch_model\.bin, a pickle.*save it"):
    pairs.load_pair(dataclasses.replace(files, draft=str(folder)))
  folder = written(pair, tmp_path / "b", "speculators")
  for source, kind, match in (
    (files.target, "speculators", "holds no EAGLE-3 head"),
    (folder, "hugging_face", r"expected one of 'speculators', 'specforge', 'osd'"),
  ):
    output = str(tmp_path / f"{kind}_out")
    with pytest.raises(base.InputError, match=match):
      convert.run(convert.ConvertConfig(str(source), output, output_kind=kind))
  with pytest.raises(base.InputError, match="at most the vocabulary of the target"):
    EagleConfig(layers=testing.TINY_LLAMA, draft_vocab_size=10**6)


def test_head_is_no_target_and_its_width_is_checked(files, pair, tmp_path):
  folder = written(pair, tmp_path, "specforge")
  # Named by its architecture alone, as some files of SpecForge are.
  edited(folder, {"draft_vocab_size": None})
  with pytest.raises(base.InputError, match=r"holds an EAGLE-3 head.*draft, and"):
    pairs.load_pair(pairs.PairConfig(target=str(folder)))  # it has no vocabulary either
  shape = pair.draft_config
  wide = dataclasses.replace(shape, layers=dataclasses.replace(shape.layers, width=48))
  with pytest.raises(base.InputError, match=r"embedding of width 48 instead of 32"):
    pairs.load_pair(dataclasses.replace(tiny_online.with_head(files), attached=wide))
  for changes in ({"logit_cap": 2.0}, {"attention_bias": True}):
    with pytest.raises(base.InputError, match="EagleConfig.layers: .* Llama or Qwen3"):
      EagleConfig(layers=dataclasses.replace(shape.layers, **changes))


def test_drafts_with_other_own_parts_or_states_are_not_mixed(files, pair, tmp_path):
  file = pair.save_draft(tmp_path / "a.safetensors", pair.draft_params, "")
  other = dataclasses.replace(attached.read(file), own={"ids": np.arange(100, 1000)})
  path = weights.save(tmp_path / "b.safetensors", other)
  with pytest.raises(base.InputError, match="another embedding or draft vocabulary"):
    pair.load_draft(path)
  np.testing.assert_array_equal(pair.load_draft(file)["target"]["ids"], pair.own["ids"])
  config = tiny_online.with_head(files)
  shape = dataclasses.replace(config.attached, state_layers=(1, 1, 2))
  second = pairs.load_pair(dataclasses.replace(config, attached=shape))
  found = {"first": pair, "second": second, "none": pair.plain()}
  with pytest.raises(base.InputError, match=r"first: \(0, 1, 2\), second: \(1, 1, 2\)"):
    evaluate._serves_all(found)
  del found["second"]
  assert evaluate._serves_all(found) is pair
  made = [
    corpus._made_from(corpus.TextSource(), DecodingConfig(), SamplingConfig(), one, [])
    for one in (pair, second, pairs.load_pair(tiny_online.attached(files)))
  ]
  assert made[0] != made[1] and "layers" not in made[2]


def test_norm_of_a_gemma_is_not_copied_as_it_is_stored():
  target = dataclasses.replace(testing.TINY_LLAMA, unit_offset_norms=True)
  model = families.build(target)
  stored = weights.Weights(target, cases._noisy(model, 0))
  params = cases._noisy(attached.build(cases.HEAD, target), 1)
  begun = eagle.begun(cases.HEAD, stored, params, None)
  scale = stored.params["decoder"]["decoder_norm"]["scale"]
  np.testing.assert_allclose(begun["decoder"]["decoder_norm"]["scale"], 1 + scale)


def test_new_head_starts_from_the_head_of_the_target(pair):
  ids = np.asarray(pair.draft_params["target"]["ids"])
  np.testing.assert_array_equal(ids, np.arange(900))
  far = eagle.first_ids(dataclasses.replace(cases.HEAD, draft_vocab_size=9), (60,))
  assert far.tolist() == [*range(8), 60]  # without an end it could not end an answer
  whole = np.asarray(pair.target_params["decoder"]["logits_dense"]["kernel"])
  whole = whole if whole.shape[1] > whole.shape[0] else whole.T
  np.testing.assert_array_equal(
    pair.draft_params["decoder"]["logits_dense"]["kernel"], whole[:, ids]
  )


def test_tokens_outside_the_draft_vocabulary():
  """A served head never proposes them; a scored one is finite there, without effect."""
  shape = dataclasses.replace(cases.HEAD, draft_vocab_size=40)
  target = families.build(testing.TINY_LLAMA, states=shape.reads)
  target_params = cases._noisy(target, 0)
  model = attached.build(shape, testing.TINY_LLAMA)
  ids = np.sort(np.random.default_rng(0).choice(64, 40, replace=False))
  own = {"ids": ids}
  frozen = eagle.frozen_of(shape, testing.TINY_LLAMA, target_params, own)
  params = model.join(cases._noisy(model, 1), frozen)
  source, mask = testing.random_sources(3, 7, 64, 1, model.pad_id)
  text = np.random.default_rng(2).integers(2, 64, (3, 6)).astype(np.int32)
  states = model.encode_for_draft(params, source, mask)
  _, read = target.score_with_states(target_params, source, mask, text)
  given = {"target_states": states, "token_states": read}
  scores = np.asarray(model.score(params, source, mask, text, **given))
  cache = model.prefill(model.prepare(params), (source, states), mask, 12)
  first = np.asarray(target.starts(source))[:, None]
  nothing = np.zeros((3, 1, model.state_width), np.float32)
  logits, _ = model.decode(model.prepare(params), first, cache, nothing)
  outside = np.setdiff1d(np.arange(64), ids)
  assert np.all(np.isneginf(logits[..., outside]))
  np.testing.assert_allclose(logits[:, 0, ids], scores[:, 0, ids], **CLOSE)
  chances = np.asarray(jax.nn.softmax(scores))
  assert np.all(np.isfinite(scores)) and chances[..., outside].max() < 1e-12
  tokens = np.concatenate([ids[::4], outside[:2]])
  few = model.score_at(params, source, mask, text, None, tokens, **given)
  np.testing.assert_allclose(few[..., :-2], scores[..., tokens[:-2]], **CLOSE)
  only = model.score_at(params, source, mask, text, None, outside[:2], **given)
  assert np.all(np.isfinite(only))


def test_head_and_attached_draft_are_told_apart(files, pair, tmp_path):
  plain = pairs.load_pair(tiny_online.attached(files))
  assert isinstance(plain.draft_config, AttachedConfig)
  file = pair.save_draft(tmp_path / "head.safetensors", pair.draft_params, "")
  with pytest.raises(base.InputError, match="holds a draft of the shape Eagle"):
    plain.load_draft(file)
  assert weights.is_attached(file) and isinstance(weights.shape_of(file), EagleConfig)
