"""Loading pairs from files and folders, and errors for files that do not match."""

import dataclasses
import errno
import os
import re
import sys
import tempfile
import types
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.flax
import tiny_online
import tiny_pair

import osd_jax
from osd_jax import base, pairs, sharding, testing
from osd_jax.data import vocabulary as vocabularies
from osd_jax.engine.requests import DecodingConfig
from osd_jax.models import families, shapes, weights
from osd_jax.models.convert import hugging_face


@pytest.fixture(scope="module")
def config(tmp_path_factory):
  return tiny_pair.save_tiny_pair(tmp_path_factory.mktemp("pair"))


def load(config):
  return pairs.load_pair(config, sharding.make())


def refused(pair, match, **changes):
  with pytest.raises(base.InputError, match=match):
    pairs.load_pair(dataclasses.replace(pair, **changes))


def rewritten(pair_config, field, folder, **changes):
  """The config with one file changed."""
  found = dataclasses.replace(weights.load(getattr(pair_config, field)), **changes)
  path = folder / f"{field}.safetensors"
  weights.save(path, found)
  return dataclasses.replace(pair_config, **{field: str(path)})


def assert_same(found, wanted):
  jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_pair_has_the_parameters_of_its_files(config):
  pair = load(config)
  target = weights.load(config.target)
  # The target is kept as it is served.
  served = families.build(target.config).prepare(target.params)
  assert_same(pair.target_params, served)
  assert_same(pair.draft_params, weights.load(config.draft).params)
  assert pair.target.vocab_size == pair.draft.vocab_size == tiny_pair.VOCAB_SIZE
  assert (pair.target.name, pair.draft.name) == ("target", "draft")
  again = load(config)
  assert again.target is pair.target and again.draft is pair.draft


def test_adapted_draft_loads_like_the_first(config, tmp_path):
  pair = load(config)
  adapted = jax.tree.map(lambda leaf: leaf + 1, pair.draft_params)
  path = tmp_path / "adapted.safetensors"
  pair.save_draft(path, adapted, "adapted")
  again = load(dataclasses.replace(config, draft=str(path)))
  assert_same(again.draft_params, adapted)
  assert again.draft_config == pair.draft_config


@pytest.mark.parametrize(
  "value, storage", [(np.nan, "float32"), (-np.inf, "float32"), (3.4e38, "bfloat16")]
)
def test_draft_that_is_not_finite_is_not_saved(config, tmp_path, value, storage):
  pair, path = load(config), tmp_path / "draft.safetensors"
  leaves, tree = jax.tree.flatten(pair.draft_params)
  broken = jax.tree.unflatten(tree, [*leaves[:-1], leaves[-1].at[0].set(value)])
  with pytest.raises(base.InputError, match="the draft is not saved: .* of the .*NaN"):
    pair.save_draft(path, broken, "", storage)
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fault", ["full disk", "no folder"])
def test_draft_that_cannot_be_written_is_kept_elsewhere(
  config, tmp_path, monkeypatch, fault
):
  pair, path = load(config), tmp_path / "given" / "draft.safetensors"
  (tmp_path / "spare").mkdir()
  monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "spare"))
  if fault == "no folder":
    path.parent.write_text("a file")
  else:
    real = safetensors.flax.save_file

    def save_file(tensors, place, **named):
      if place.parent == path.parent:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
      real(tensors, place, **named)

    monkeypatch.setattr(safetensors.flax, "save_file", save_file)
  with pytest.raises(base.UserError, match="The draft is in") as told:
    pair.save_draft(path, pair.draft_params, "adapted")
  kept = str(told.value).partition("The draft is in ")[2].rstrip(".")
  assert_same(weights.load(kept).params, pair.draft_params)


def test_dtype_applies_to_both_models(config):
  pair = load(dataclasses.replace(config, dtype="bfloat16"))
  assert pair.draft_config.dtype == "bfloat16"
  # The target is not trained, so it has no float32 parameters and no second copy.
  served = pair.target.prepare(pair.target_params)
  assert {leaf.dtype for leaf in jax.tree.leaves(pair.target_params)} == {
    jnp.dtype("bfloat16")
  }
  norm = lambda params: params["encoder"]["encoder_norm"]["scale"]
  assert norm(served) is norm(pair.target_params)
  drafts = {leaf.dtype for leaf in jax.tree.leaves(pair.draft_params)}
  assert drafts == {jnp.dtype("float32")}  # the draft is trained in float32
  assert pair.target is not load(config).target


@pytest.mark.parametrize("field", ["target", "draft"])
def test_different_vocabulary_is_refused(config, field, tmp_path):
  changed = rewritten(config, field, tmp_path, vocabulary="f" * 64)
  with pytest.raises(ValueError, match=rf"PairConfig\.{field}: .*ffffffffffff\.\.\."):
    load(changed)


def test_vocabulary_sizes_must_agree(config, tmp_path):
  found = weights.load(config.draft)
  wider = dataclasses.replace(found.config, vocab_size=tiny_pair.VOCAB_SIZE + 64)
  params = families.build(wider).init(jax.random.key(0))
  changed = rewritten(config, "draft", tmp_path, config=wider, params=params)
  with pytest.raises(ValueError, match="has 1536 token ids, draft .* has 1600"):
    load(changed)


def test_model_must_cover_every_id_of_the_vocabulary(config, tmp_path):
  unnamed = rewritten(config, "target", tmp_path, vocabulary="")
  with pytest.raises(ValueError, match=r"PairConfig\.target: .*1536 token ids, .*1636"):
    load(dataclasses.replace(unnamed, extra_ids=100))


@pytest.mark.parametrize("field", ["target", "draft", "vocabulary"])
def test_missing_files_are_named(config, field):
  with pytest.raises(ValueError, match="nowhere"):
    load(dataclasses.replace(config, **{field: "nowhere/at_all.safetensors"}))


# ---- Transformers folders


def as_folders(config, folder):
  """Saves the pair as two transformers folders; the target has the vocabulary."""
  for field in ("target", "draft"):
    found = weights.load(getattr(config, field))
    vocabulary = vocabularies.Vocabulary.load(config.path("vocabulary"))
    files = vocabularies.tokenizer_files(vocabulary) if field == "target" else {}
    hugging_face.write(folder / field, found, files)
  return dataclasses.replace(
    config, target="target", draft="draft", vocabulary="target", folder=str(folder)
  )


def test_transformers_folders_give_the_same_pair(config, tmp_path):
  pair, files = load(as_folders(config, tmp_path)), load(config)
  assert_same(pair.target_params, files.target_params)
  assert_same(pair.draft_params, files.draft_params)
  assert pair.vocabulary == files.vocabulary
  for folder in (tmp_path, "."):
    with pytest.raises(base.InputError, match=r"^save: received .* it is a folder"):
      pair.save_draft(folder, pair.draft_params, "")
  saved = pair.save_draft(tmp_path / "draft.safetensors", pair.draft_params, "")
  assert weights.load(saved).vocabulary


def test_folder_applies_to_relative_paths_only(config, tmp_path):
  there = as_folders(config, tmp_path)
  shipped = "shipped:demo_vocabulary.model"
  mixed = dataclasses.replace(there, draft=config.draft, vocabulary=shipped)
  assert_same(load(mixed).draft_params, load(config).draft_params)
  with pytest.raises(ValueError, match=r"cannot read .*config\.json"):
    load(dataclasses.replace(there, target="."))


# ---- A target and nothing else


def with_sentinels(folder):
  """A T5 folder as published: 100 sentinels, and a padded embedding."""
  config = dataclasses.replace(testing.TINY_T5, vocab_size=1664)
  params = families.build(config).init(jax.random.key(0))
  shipped = pairs.PairConfig().path("vocabulary")
  files = vocabularies.tokenizer_files(vocabularies.Vocabulary.load(shipped, 100))
  return hugging_face.write(folder, weights.Weights(config, params), files)


def chat_model(llama_pair, folder):
  """A Llama folder with a chat template."""
  found = weights.load(llama_pair.target)
  files = {"tokenizer.model": llama_pair.path("vocabulary").read_bytes()}
  files["chat_template.jinja"] = b"<s>{{ messages[0].content }} ANSWER:"
  return hugging_face.write(folder, found, files)


@pytest.mark.parametrize("family", ["t5", "llama"])
def test_folder_of_a_target_is_enough(llama_pair, tmp_path, family, caplog):
  """Vocabulary, sentinels and chat template come from the folder."""
  folder = str(
    with_sentinels(tmp_path / "t5")
    if family == "t5"
    else chat_model(llama_pair, tmp_path / "llama")
  )
  for serving in (osd_jax.Server(target=folder), osd_jax.Server(folder)):
    vocabulary, draft = serving.pair.vocabulary, serving.pair.draft_config
    assert str(vocabulary.path).startswith(folder)
    assert draft == pairs.AttachedConfig()
    assert serving.engine.config.cache_tokens  # helps until the draft has learned
    assert vocabulary.extra_ids == (100 if family == "t5" else 0)
    asked = vocabulary.decode(vocabulary.encode_prompt("How many?")[:-1])
    assert ("ANSWER" in asked) == (family == "llama")
  plain = pairs.load_pair(pairs.PairConfig(target=folder, chat_template=""))
  assert plain.vocabulary.template is None
  assert not caplog.text
  if family == "llama":
    os.remove(f"{folder}/chat_template.jinja")
    pairs.load_pair(pairs.PairConfig(target=folder))
    assert "has no chat template: prompts go in as they are" in caplog.text


def test_target_is_never_served_with_a_vocabulary_that_is_not_its_own(config, tmp_path):
  """Negative control: the shipped vocabulary would be large enough for each of them."""
  folder = with_sentinels(tmp_path / "folder")
  (folder / "spiece.model").unlink()
  unnamed = rewritten(config, "target", tmp_path, vocabulary="").target
  other = rewritten(config, "target", tmp_path / "o", vocabulary="f" * 64).target
  for target, cause in (
    (folder, r"folder holds no tokenizer; .*, or name the vocabulary"),
    (unnamed, r"target\.safetensors does not say which vocabulary"),
    (other, r"was trained with the vocabulary ffffffffffff"),
  ):
    with pytest.raises(base.InputError, match=rf"^\w+\.\w+: .*{cause}") as caught:
      osd_jax.Server(target=str(target))
    assert len(str(caught.value).splitlines()) == 1


# ---- Errors


@pytest.mark.parametrize("field", ["target", "draft"])
def test_nan_error_names_field_file_and_tensor(config, field, tmp_path):
  params = weights.load(getattr(config, field)).params
  path = "decoder/decoder_norm/scale"
  params["decoder"]["decoder_norm"]["scale"] *= np.nan
  changed = rewritten(config, field, tmp_path, params=params)
  named = rf"PairConfig\.{field}: .*{field}\.safetensors: tensor {path}: .* NaN"
  with pytest.raises(base.InputError, match=named):
    load(changed)


def test_extra_ids_must_match_the_weights(config, tmp_path):
  with_sentinels = vocabularies.Vocabulary.load(config.path("vocabulary"), 100)
  fingerprint = with_sentinels.fingerprint
  for field in ("target", "draft"):
    found = weights.load(getattr(config, field))
    wider = dataclasses.replace(found.config, vocab_size=1664)
    config = rewritten(
      config,
      field,
      tmp_path,
      config=wider,
      params=families.build(wider).init(jax.random.key(0)),
      vocabulary=fingerprint,
    )
  with pytest.raises(base.InputError, match=r"extra_ids: received 0, expected 100 for"):
    load(dataclasses.replace(config, extra_ids=0))
  for stated in (None, 100):
    found = load(dataclasses.replace(config, extra_ids=stated))
    assert found.vocabulary == with_sentinels


def test_extra_ids_must_match_the_tokenizer_settings(config, tmp_path):
  there = as_folders(config, tmp_path)
  settings = tmp_path / "target" / "tokenizer_config.json"
  settings.write_text('{"extra_ids": 100}')
  refused(there, r"extra_ids: received 0, expected 100 for", extra_ids=0)
  refused(there, r"has 1536 token ids, expected at least the 1636 of", extra_ids=None)
  for unreadable in ("{", "[]", '{"extra_ids": "many"}', "{}"):
    settings.write_text(unreadable)
    assert load(there)


def test_extra_ids_are_known_for_published_t5s():
  """With 32,000 pieces, 32,128 or 32,100 rows imply 100 sentinel tokens."""
  pieces = vocabularies.Vocabulary("f", 32_000, "nowhere/spiece.model", 0, None)
  config = pairs.PairConfig(target="flan-t5-small")
  for size in (32_128, 32_100, 32_000, 33_000):
    held = weights.Weights(shapes.T5Config(vocab_size=size), {})
    if size in (32_128, 32_100):
      with pytest.raises(base.InputError, match=r"PairConfig\.extra_ids: .*100"):
        pairs.check_vocabulary(config, "target", held, pieces)
    else:
      pairs.check_vocabulary(config, "target", held, pieces)


@pytest.mark.parametrize(
  ("field", "name"),
  [
    ("target", "google/flan-t5-small"),
    ("draft", "t5-small"),
    ("vocabulary", "t5-base"),
  ],
)
def test_hub_name_is_downloaded_if_possible(config, field, name, tmp_path, monkeypatch):
  folders = as_folders(config, tmp_path)
  asked = []

  def snapshot_download(name, allow_patterns):
    asked.append((name, allow_patterns))
    return str(tmp_path / getattr(folders, field))

  hub = types.ModuleType("huggingface_hub")
  hub.snapshot_download = snapshot_download
  changed = dataclasses.replace(config, **{field: name})
  monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # not installed
  with pytest.raises(
    base.InputError,
    match=rf"PairConfig\.{field}: received '{name}'.*no such file.*pip install",
  ):
    load(changed)
  monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
  assert_same(load(changed).draft_params, load(config).draft_params)
  ((repository, patterns),) = asked
  assert repository == name and "*.safetensors" in patterns
  assert {"spiece.model", "tokenizer.model", "chat_template.jinja"} <= {*patterns}

  unreachable = type("LocalEntryNotFoundError", (OSError,), {})("Got: Errno -2")
  for error, reason in (
    (OSError("no route to the hub\nmore"), "no route"),
    (unreachable, "cannot be reached; correct"),
  ):
    hub.snapshot_download = unittest.mock.Mock(side_effect=error)
    with pytest.raises(
      base.InputError, match=rf"PairConfig\.{field}.*{reason}"
    ) as caught:
      load(changed)
    assert len(str(caught.value).splitlines()) == 1


def test_unknown_shipped_name_offers_files_of_its_kind(config):
  for field in ("target", "draft", "vocabulary"):
    with pytest.raises(base.InputError, match="expected one of") as caught:
      load(dataclasses.replace(config, **{field: "shipped:x"}))
    names = re.findall(r"shipped:\w+", str(caught.value).partition("expected")[2])
    assert names and all(name.endswith(f"_{field}") for name in names)


def test_mistyped_folder_is_refused_with_a_suggestion(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setitem(sys.modules, "huggingface_hub", None)
  (tmp_path / "models" / "my_flan").mkdir(parents=True)
  for typed, meant in (("models/my_flam", "models/my_flan"), ("model", "models")):
    match = rf"^PairConfig.target: received '{typed}'.*did you mean '{meant}'"
    with pytest.raises(base.InputError, match=match) as caught:
      osd_jax.Server(typed)
    # A name below an existing folder is not a name on the hub.
    assert ("Hugging Face" in str(caught.value)) == (typed == "model")


# ---- Decoder-only pairs


@pytest.fixture(scope="module")
def llama_pair(tmp_path_factory):
  return tiny_online.save_lively_pair(tmp_path_factory.mktemp("llama"), "llama")


def test_pairs_of_two_families_are_refused(llama_pair, tmp_path):
  other = tiny_pair.save_tiny_pair(tmp_path)
  match = r"PairConfig.draft.* is a T5, but .* of a decoder-only"
  refused(llama_pair, match, draft=other.draft)
  refused(other, r"is a decoder-only model, but .* of a T5", target=llama_pair.target)


def test_different_end_of_sequence_tokens_are_refused(llama_pair, tmp_path):
  found = weights.load(llama_pair.target)
  config = dataclasses.replace(found.config, eos_ids=(7,))
  other = tmp_path / "other.safetensors"
  weights.save(other, dataclasses.replace(found, config=config))
  refused(llama_pair, r"ends a sequence with \(7,\)", target=str(other))


def test_state_layer_selects_the_states_of_an_attached_draft(llama_pair, tmp_path):
  source = np.arange(3, 11, dtype=np.int32)[None]

  def loaded(layer, draft="attached"):
    config = dataclasses.replace(tiny_online.attached(llama_pair), state_layer=layer)
    return pairs.load_pair(dataclasses.replace(config, draft=draft))

  def target_states(found):
    served = found.target.prepare(found.target_params)
    return found.target.prefill(
      served, source, found.target.mask(source), 12
    ).target_states

  after_all, first = loaded(0), loaded(1)
  assert not np.array_equal(target_states(first), target_states(after_all))
  last = loaded(testing.TINY_LLAMA.num_layers)
  np.testing.assert_array_equal(target_states(last), target_states(after_all))
  path = first.save_draft(tmp_path / "draft.safetensors", first.draft_params, "")
  assert loaded(1, str(path)).draft_config == tiny_online.SHAPE
  shape = dataclasses.replace(tiny_online.SHAPE, reads="tokens")
  config = dataclasses.replace(tiny_online.attached(llama_pair), state_layer=1)
  other = pairs.load_pair(dataclasses.replace(config, attached=shape))
  with pytest.raises(base.InputError, match=r"reads='prompt'.*expected .*'tokens'"):
    other.load_draft(path)
  with pytest.raises(base.InputError, match="attached to the target"):
    loaded(0, str(path))
  with pytest.raises(base.InputError, match=r"PairConfig\.state_layer: received 9"):
    loaded(9)
  with pytest.raises(base.InputError, match=r"state_layer: received 1.*an encoder"):
    pairs.load_pair(pairs.PairConfig(state_layer=1))


def test_more_tokens_than_positions_are_refused(llama_pair):
  long = DecodingConfig(source_lengths=(200,), target_length=60)
  with pytest.raises(base.InputError, match="260 tokens, but the target has 256"):
    osd_jax.Server(llama_pair, long)
