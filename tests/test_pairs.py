"""A pair is loaded as it was written, and does not load what does not fit."""

import dataclasses
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_pair

from osd_jax import base, pairs, sharding
from osd_jax.data import vocabulary as vocabularies
from osd_jax.models import convert, families, t5, weights


@pytest.fixture(scope="module")
def config(tmp_path_factory):
  return tiny_pair.save_tiny_pair(tmp_path_factory.mktemp("pair"))


def load(config):
  return pairs.load_pair(config, sharding.make())


def rewritten(pair_config, field, folder, **changes):
  """The config with one file changed."""
  found = dataclasses.replace(weights.load(getattr(pair_config, field)), **changes)
  path = folder / f"{field}.safetensors"
  weights.save(path, found)
  return dataclasses.replace(pair_config, **{field: str(path)})


def assert_same(found, wanted):
  jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_a_pair_is_what_its_files_hold(config):
  pair = load(config)
  assert_same(pair.target_params, weights.load(config.target).params)
  assert_same(pair.draft_params, weights.load(config.draft).params)
  assert pair.target.vocab_size == pair.draft.vocab_size == tiny_pair.VOCAB_SIZE
  assert (pair.target.name, pair.draft.name) == ("target", "draft")


def test_loading_again_gives_the_same_functions(config):
  one, again = load(config), load(config)  # so that nothing compiles twice
  assert one.target is again.target and one.draft is again.draft


def test_an_adapted_draft_loads_like_the_first(config, tmp_path):
  pair = load(config)
  adapted = jax.tree.map(lambda leaf: leaf + 1, pair.draft_params)
  path = tmp_path / "adapted.safetensors"
  pair.save_draft(path, adapted, "adapted")
  again = load(dataclasses.replace(config, draft=str(path)))
  assert_same(again.draft_params, adapted)
  assert again.draft_config == pair.draft_config


def test_the_shipped_vocabulary_reads_and_writes(config):
  vocabulary = load(config).vocabulary
  ids = vocabulary.encode("SELECT name")
  assert vocabulary.decode(ids) == "SELECT name"


def test_both_models_compute_in_the_wanted_type(config):
  pair = load(dataclasses.replace(config, dtype="bfloat16"))
  assert pair.draft_config.dtype == "bfloat16"
  # The target is never trained: no bits that it does not compute with, no second copy.
  served = pair.target.prepare(pair.target_params)
  assert {leaf.dtype for leaf in jax.tree.leaves(pair.target_params)} == {
    jnp.dtype("bfloat16")
  }
  scale = ("encoder", "encoder_norm", "scale")
  for params in (served, pair.target_params):
    for name in scale:
      params = params[name]
    assert params is pair.target_params["encoder"]["encoder_norm"]["scale"]
  drafts = {leaf.dtype for leaf in jax.tree.leaves(pair.draft_params)}
  assert drafts == {jnp.dtype("float32")}  # which is
  assert pair.target is not load(config).target


@pytest.mark.parametrize("field", ["target", "draft"])
def test_another_vocabulary_is_refused(config, field, tmp_path):
  changed = rewritten(config, field, tmp_path, vocabulary="f" * 64)
  with pytest.raises(ValueError, match=rf"PairConfig\.{field}: .*ffffffffffff\.\.\."):
    load(changed)


def test_sizes_must_agree(config, tmp_path):
  found = weights.load(config.draft)
  wider = dataclasses.replace(found.config, vocab_size=tiny_pair.VOCAB_SIZE + 64)
  params = families.build(wider).init(jax.random.key(0))
  changed = rewritten(config, "draft", tmp_path, config=wider, params=params)
  with pytest.raises(ValueError, match="has 1536 token ids, draft .* has 1600"):
    load(changed)


def test_a_model_must_know_every_id_of_the_vocabulary(config, tmp_path):
  unnamed = rewritten(config, "target", tmp_path, vocabulary="")
  with pytest.raises(ValueError, match=r"PairConfig\.target: .*1536 token ids, .*1636"):
    load(dataclasses.replace(unnamed, extra_ids=100))


@pytest.mark.parametrize("field", ["target", "draft", "vocabulary"])
def test_missing_files_are_named(config, field):
  with pytest.raises(ValueError, match="nowhere"):
    load(dataclasses.replace(config, **{field: "nowhere/at_all.safetensors"}))


def test_a_file_of_something_else_is_refused(config, tmp_path):
  path = tmp_path / "text.safetensors"
  path.write_text("no weights")
  with pytest.raises(ValueError, match="text.safetensors"):
    load(dataclasses.replace(config, draft=str(path)))


# ---- Folders of transformers


def as_folders(config, folder):
  """The pair as two folders of transformers, the vocabulary in the target's."""
  for field in ("target", "draft"):
    found = weights.load(getattr(config, field))
    vocabulary = vocabularies.Vocabulary.load(config.path("vocabulary"))
    files = vocabularies.tokenizer_files(vocabulary) if field == "target" else {}
    convert.write_hugging_face(folder / field, found, files)
  return dataclasses.replace(
    config, target="target", draft="draft", vocabulary="target", folder=str(folder)
  )


def test_folders_of_transformers_are_the_same_pair(config, tmp_path):
  pair, files = load(as_folders(config, tmp_path)), load(config)
  assert_same(pair.target_params, files.target_params)
  assert_same(pair.draft_params, files.draft_params)
  assert pair.vocabulary == files.vocabulary
  saved = pair.save_draft(tmp_path / "draft.safetensors", pair.draft_params, "")
  assert weights.load(saved).vocabulary


def test_the_folder_leads_to_relative_paths_only(config, tmp_path):
  there = as_folders(config, tmp_path)
  shipped = "shipped:demo_vocabulary.model"
  mixed = dataclasses.replace(there, draft=config.draft, vocabulary=shipped)
  assert_same(load(mixed).draft_params, load(config).draft_params)
  with pytest.raises(ValueError, match=r"cannot read .*config\.json"):
    load(dataclasses.replace(there, target="."))


def test_sizes_of_folders_must_agree(config, tmp_path):
  there = as_folders(config, tmp_path)
  found = weights.load(config.draft)
  wider = dataclasses.replace(found.config, vocab_size=tiny_pair.VOCAB_SIZE + 64)
  params = families.build(wider).init(jax.random.key(0))
  convert.write_hugging_face(tmp_path / "wide", weights.Weights(wider, params))
  with pytest.raises(ValueError, match="has 1536 token ids, draft wide has 1600"):
    load(dataclasses.replace(there, draft="wide"))
  with pytest.raises(ValueError, match=r"PairConfig\.extra_ids: received 100, .* 0"):
    load(dataclasses.replace(there, extra_ids=100))


def test_a_type_that_is_for_rescoring_only_is_refused():
  with pytest.raises(ValueError, match="PairConfig.dtype: received 'float64'"):
    pairs.PairConfig(dtype="float64")


# ---- What is named


@pytest.mark.parametrize("field", ["target", "draft"])
def test_a_nan_is_named_with_its_setting_file_and_tensor(config, field, tmp_path):
  params = weights.load(getattr(config, field)).params
  path = "decoder/decoder_norm/scale"
  params["decoder"]["decoder_norm"]["scale"] *= np.nan
  changed = rewritten(config, field, tmp_path, params=params)
  named = rf"PairConfig\.{field}: .*{field}\.safetensors: tensor {path}: .* NaN"
  with pytest.raises(base.InputError, match=named):
    load(changed)


def test_the_sentinels_that_weights_were_trained_with_are_asked_for(config, tmp_path):
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
    load(config)
  assert load(dataclasses.replace(config, extra_ids=100)).vocabulary == with_sentinels


def test_the_sentinels_that_a_folder_states_are_asked_for(config, tmp_path):
  there = as_folders(config, tmp_path)
  settings = tmp_path / "target" / "tokenizer_config.json"
  settings.write_text('{"extra_ids": 100}')
  with pytest.raises(base.InputError, match=r"extra_ids: received 0, expected 100 for"):
    load(there)
  for unreadable in ("{", "[]", '{"extra_ids": "many"}', "{}"):
    settings.write_text(unreadable)
    assert load(there)


def test_published_t5s_want_their_sentinels(monkeypatch):
  """32,128 rows for 32,000 pieces: nothing else says that there are 100 more."""
  pieces = vocabularies.Vocabulary("f", 32_000, "nowhere/spiece.model", 0, None)
  config = pairs.PairConfig(target="flan-t5-small")
  for size in (32_128, 32_100, 32_000, 33_000):
    held = weights.Weights(t5.T5Config(vocab_size=size), {})
    if size in (32_128, 32_100):
      with pytest.raises(base.InputError, match=r"PairConfig\.extra_ids: .*100"):
        pairs.check_vocabulary(config, "target", held, pieces)
    else:
      pairs.check_vocabulary(config, "target", held, pieces)


@pytest.mark.parametrize("field", ["target", "draft", "vocabulary"])
@pytest.mark.parametrize("name", ["google/flan-t5-small", "t5-small"])
def test_a_name_on_the_hub_is_downloaded_where_that_is_possible(
  config, field, name, tmp_path, monkeypatch
):
  folders = as_folders(config, tmp_path)
  asked = []

  def snapshot_download(name, allow_patterns):
    asked.append((name, allow_patterns))
    return str(tmp_path / getattr(folders, field))

  hub = types.ModuleType("huggingface_hub")
  hub.snapshot_download = snapshot_download
  changed = dataclasses.replace(config, **{field: name})
  monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # as if it were absent
  with pytest.raises(
    base.InputError,
    match=rf"PairConfig\.{field}: received '{name}'.*local.*pip install",
  ):
    load(changed)
  monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
  assert_same(load(changed).draft_params, load(config).draft_params)
  ((repository, patterns),) = asked
  assert repository == name and "*.safetensors" in patterns
  assert {"spiece.model", "tokenizer.model", "chat_template.jinja"} <= {*patterns}

  def refuse(name, allow_patterns):
    raise OSError("no route to the hub\nmore")

  hub.snapshot_download = refuse
  with pytest.raises(
    base.InputError, match=rf"PairConfig\.{field}.*no route"
  ) as caught:
    load(changed)
  assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
  ("changes", "named"),
  [
    ({"extra_ids": 1.5}, "extra_ids"),
    ({"extra_ids": -1}, "extra_ids"),
    ({"target": ""}, "target"),
    ({"draft": None}, "draft"),
    ({"draft_serving": True}, "draft_serving"),
  ],
)
def test_bad_settings_are_named(changes, named):
  with pytest.raises(base.InputError, match=rf"PairConfig\.{named}: received"):
    pairs.PairConfig(**changes)
