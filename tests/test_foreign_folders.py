"""Model folders as other tools write them, after public reports of other projects."""

import codecs
import dataclasses
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
import safetensors.numpy
import sentencepiece
import tiny_pair
from data import test_vocabulary

from osd_jax import base, pairs, testing
from osd_jax.data.vocabulary import Vocabulary, tokenizer_files
from osd_jax.engine.requests import TextSoFar
from osd_jax.models import families, weights
from osd_jax.models.convert import hugging_face

LLAMA_CONFIG = {
  "model_type": "llama",
  "hidden_size": 16,
  "intermediate_size": 32,
  "num_hidden_layers": 1,
  "num_attention_heads": 2,
  "vocab_size": 300,
  "max_position_embeddings": 64,
  "eos_token_id": 2,
}


@pytest.fixture(scope="module")
def llama_model() -> bytes:
  return tiny_pair.llama_tokenizer()


def random_weights(shape) -> weights.Weights:
  return weights.Weights(shape, jax.jit(families.build(shape).init)(jax.random.key(0)))


# ---- Tokenizers


def t5_tokenizer_json(model: bytes, extra_ids: int):
  """Converts a T5's SentencePiece model as `save_pretrained` of transformers 5 does."""
  library = pytest.importorskip("tokenizers")
  pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
  scored = [
    (pieces.IdToPiece(i), pieces.GetScore(i)) for i in range(pieces.GetPieceSize())
  ]
  sentinels = [f"<extra_id_{i}>" for i in range(extra_ids)]
  scored += [(name, 0.0) for name in reversed(sentinels)]
  made = library.Tokenizer(library.models.Unigram(scored, 2))
  made.pre_tokenizer = library.pre_tokenizers.Metaspace()
  made.decoder = library.decoders.Metaspace()
  made.post_processor = library.processors.TemplateProcessing(
    single="$A </s>", special_tokens=[("</s>", 1)]
  )
  made.add_special_tokens(["<pad>", "</s>", "<unk>"])
  made.add_special_tokens([library.AddedToken(s, lstrip=True) for s in sentinels])
  return made.to_str().encode()


def test_t5_folder_saved_by_transformers_5_has_the_ids_of_its_spiece_model(tmp_path):
  model = test_vocabulary.trained(tmp_path / "spiece.model").read_bytes()
  expected = Vocabulary.load(tmp_path / "spiece.model", extra_ids=2)
  settings = {
    "tokenizer_class": "T5Tokenizer",
    "extra_ids": 2,
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
  }
  shape = dataclasses.replace(testing.TINY_T5, vocab_size=expected.size)
  files = {
    "tokenizer.json": t5_tokenizer_json(model, 2),
    "tokenizer_config.json": json.dumps(settings).encode(),
  }
  folder = hugging_face.write(tmp_path / "t5", random_weights(shape), files)
  for extra_ids in (0, 2):
    config = pairs.PairConfig(
      target=str(folder), draft="attached", vocabulary=str(folder), extra_ids=extra_ids
    )
    found = pairs.load_pair(config).vocabulary
    assert (found.size, found.extra_ids, found.is_causal) == (expected.size, 2, False)
    for text in ("x u number 3", "number 42 <extra_id_1>", "yv"):
      ids = expected.encode_prompt(text).tolist()
      assert found.encode_prompt(text).tolist() == ids and ids[-1] == 1
    for decoded in (found, expected):
      text = decoded.decode(expected.encode("x u <extra_id_0> number"))
      # The two libraries write different spaces around sentinels.
      assert text.replace(" ", "") == "xu<extra_id_0>number"
  assert tokenizer_files(found) == files
  with pytest.raises(base.InputError, match="received 1, but .* holds 2 sentinels"):
    Vocabulary.load(folder, extra_ids=1)


def test_chat_template_is_read_as_utf8_in_every_locale(tmp_path, llama_model):
  (tmp_path / "tokenizer.model").write_bytes(llama_model)
  template = "<｜User｜>{{ messages[0]['content'] }}<｜Assistant｜>"
  (tmp_path / "chat_template.jinja").write_bytes(codecs.BOM_UTF8 + template.encode())
  code = (
    "import sys; from osd_jax.data.vocabulary import Vocabulary;"
    "print(ascii(Vocabulary.load(sys.argv[1], template='own').template('hi')))"
  )
  plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
  done = subprocess.run(
    [sys.executable, "-c", code, str(tmp_path)],
    env=os.environ | plain,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.stdout.strip() == ascii("<｜User｜>hi<｜Assistant｜>"), done.stderr


def test_added_tokens_that_are_not_special_stay_in_answers(tmp_path, llama_model):
  (tmp_path / "tokenizer.model").write_bytes(llama_model)
  size = Vocabulary.load(tmp_path).size
  added = {
    str(size + i): {"content": text, "special": text == "<hidden>"}
    for i, text in enumerate(("<think>", "</think>", "<hidden>"))
  }
  settings = {"legacy": True, "added_tokens_decoder": added}
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
  vocabulary = Vocabulary.load(tmp_path)
  red, blue = vocabulary.encode("red"), vocabulary.encode("blue")
  ids = np.asarray([size, *red, size + 1, size + 2, *blue])
  # As transformers decodes with skip_special_tokens=True.
  assert vocabulary.decode(ids) == "<think> red</think> blue"
  assert vocabulary.decode([*red, size + 2, *blue]) == "red blue"
  found = TextSoFar(vocabulary.decode, ("</think>",)).watch(ids)
  assert found is not None


def test_special_tokens_of_older_folders_are_read(tmp_path, llama_model):
  (tmp_path / "tokenizer.model").write_bytes(llama_model)
  settings = {"bos_token": None, "add_bos_token": None, "chat_template": None}
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
  specials = {"bos_token": {"content": "<BOS>"}, "eos_token": "<EOS>"}
  (tmp_path / "special_tokens_map.json").write_text(json.dumps(specials))
  template = "{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}"
  vocabulary = Vocabulary.load(tmp_path, template=template)
  assert vocabulary.template("hi") == "<BOS>hi<EOS>"
  assert vocabulary.prefix == (1,)  # null is the default, True


def test_added_tokens_of_older_folders_are_read(tmp_path, llama_model):
  (tmp_path / "tokenizer.model").write_bytes(llama_model)
  size = Vocabulary.load(tmp_path).size
  added = {"<think>": size, "<hidden>": size + 1, "[PAD]": size + 2}
  (tmp_path / "added_tokens.json").write_text(json.dumps(added))
  specials = {"pad_token": "[PAD]", "additional_special_tokens": ["<hidden>"]}
  (tmp_path / "special_tokens_map.json").write_text(json.dumps(specials))
  vocabulary = Vocabulary.load(tmp_path)
  assert vocabulary.size == size + 3
  ids = vocabulary.encode("<think><hidden>[PAD]")
  assert ids == [size, size + 1, size + 2] and vocabulary.decode(ids) == "<think>"
  copy = tmp_path / "copy"
  copy.mkdir()
  for name, content in tokenizer_files(vocabulary).items():
    (copy / name).write_bytes(content)
  assert Vocabulary.load(copy) == vocabulary


@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "Qwen2Tokenizer"])
def test_added_tokens_that_tokenizer_json_lacks_are_added(tmp_path, kind):
  library = pytest.importorskip("tokenizers")
  words = sorted(library.pre_tokenizers.ByteLevel.alphabet())
  made = library.Tokenizer(library.models.BPE({w: i for i, w in enumerate(words)}, []))
  made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
  made.decoder = library.decoders.ByteLevel()
  made.add_special_tokens(["<end>"])
  made.save(str(tmp_path / "tokenizer.json"))
  added = {
    str(256 + i): {"content": text, "special": text == "<end>"}
    for i, text in enumerate(("<end>", "<think>", "</think>"))
  }
  settings = {
    "tokenizer_class": kind,
    "eos_token": "<end>",
    "added_tokens_decoder": added,
  }
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
  vocabulary = Vocabulary.load(tmp_path)
  ids = vocabulary.encode("a<think>b</think>")
  assert ids[1::2] == [257, 258] and len(ids) == 4
  assert vocabulary.decode(ids) == "a<think>b</think>"


def test_special_token_beyond_the_embedding_is_refused_only_in_texts(
  tmp_path, llama_model
):
  # As in fine-tuned Llamas whose padding token was only added to the tokenizer.
  shape = dataclasses.replace(
    testing.TINY_LLAMA, vocab_size=tiny_pair.VOCAB_SIZE, eos_ids=(2,)
  )
  token = {str(tiny_pair.VOCAB_SIZE): {"content": "[PAD]", "special": True}}
  settings = {"added_tokens_decoder": token, "pad_token": "[PAD]"}
  files = {"tokenizer.model": llama_model}
  write = lambda name, settings: hugging_face.write(
    tmp_path / name,
    random_weights(shape),
    {**files, "tokenizer_config.json": json.dumps(settings).encode()},
  )
  load = lambda folder: pairs.load_pair(
    pairs.PairConfig(target=str(folder), draft="cache")
  )
  own = load(write("padded", settings)).vocabulary
  assert own.size == tiny_pair.VOCAB_SIZE and len(own.encode_prompt("red")) > 1
  with pytest.raises(base.InputError, match=r"the token \[PAD\] \(1536\), but .* 1536"):
    own.encode("red[PAD]")
  token[str(tiny_pair.VOCAB_SIZE)]["special"] = False
  with pytest.raises(base.InputError, match="expected at least the 1537"):
    load(write("longer", settings))


QWEN2_TEXTS = ["How many singers are there?", "x = 3 + 42", "naïve 漢字 🙂", "a\n\n  b"]


@pytest.fixture
def qwen2_folder(tmp_path):
  """A folder in Qwen2's first format: vocab.json and merges.txt."""
  library = pytest.importorskip("tokenizers")
  made = library.Tokenizer(library.models.BPE())
  made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
  alphabet = library.pre_tokenizers.ByteLevel.alphabet()
  trainer = library.trainers.BpeTrainer(
    vocab_size=300, initial_alphabet=alphabet, show_progress=False
  )
  made.train_from_iterator(QWEN2_TEXTS * 5, trainer)
  made.model.save(str(tmp_path))
  size = made.get_vocab_size()
  ends = {"content": "<|im_end|>", "special": True}
  settings = {
    "tokenizer_class": "Qwen2Tokenizer",
    "eos_token": "<|im_end|>",
    "added_tokens_decoder": {str(size): ends},
  }
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
  return tmp_path


def test_vocab_and_merges_of_qwen2_are_read(qwen2_folder):
  vocabulary = Vocabulary.load(qwen2_folder)
  assert vocabulary.decode([*vocabulary.encode("x"), vocabulary.eos_ids[0], 5]) == "x"
  assert vocabulary.prefix == ()
  for text in QWEN2_TEXTS:
    assert vocabulary.decode(vocabulary.encode_with_eos(text)) == text
  assert len(vocabulary.encode("42")) == 2, "Qwen2 splits numbers into digits"
  assert len(vocabulary.encode("singers")) < len("singers")
  (qwen2_folder / "merges.txt").unlink()
  with pytest.raises(base.InputError, match="vocab.json or .* cannot be .*merges"):
    Vocabulary.load(qwen2_folder)
  config = {"model_type": "llama", "hidden_size": 512, "num_attention_heads": 9}
  (qwen2_folder / "config.json").write_text(json.dumps(config))
  with pytest.raises(base.InputError, match=r"hidden size \(512\) is not a multiple"):
    Vocabulary.load(qwen2_folder)


def test_folder_with_only_a_tekken_json_is_refused_with_the_remedy(tmp_path):
  (tmp_path / "tekken.json").write_text("{}")
  with pytest.raises(base.InputError, match="tekken.json, .* download the token"):
    Vocabulary.load(tmp_path)


BYTE_TEXTS = (
  "H\u00ebllo \u65e5\u672c \n\t a  b",
  "fill <extra_id_0> and <extra_id_124>.",
  "",
)


def test_vocabulary_of_a_byt5_are_the_bytes(tmp_path):
  (tmp_path / "config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
  vocabulary = Vocabulary.load(tmp_path)
  assert (vocabulary.size, vocabulary.extra_ids) == (384, 125)
  assert not vocabulary.is_causal and vocabulary.pieces[259] == "<extra_id_0>"
  for text in BYTE_TEXTS:
    assert vocabulary.decode(vocabulary.encode_with_eos(text)) == text
  assert vocabulary.decode(vocabulary.encode("a\u00eb")[:-1]) == "a"
  for name, content in tokenizer_files(vocabulary).items():
    (tmp_path / name).write_bytes(content)
  assert Vocabulary.load(tmp_path) == vocabulary


# ---- config.json and weights


@pytest.mark.parametrize(
  ("change", "expected"),
  [
    (
      {"max_position_embeddings": None, "max_sequence_length": 32},
      {"max_positions": 32},
    ),
    ({"max_sequence_length": 32}, {}),
    ({"pretraining_tp": 2}, {}),
    ({"rope_scaling": {"type": "linear", "factor": 1.0}}, {}),
    ({"rope_theta": None}, {}),
    ({"rope_parameters": {"rope_theta": None, "rope_type": None}}, {}),
    ({"hidden_act": "swish"}, {}),
    ({"rms_norm_eps": None, "hidden_act": None, "tie_word_embeddings": None}, {}),
  ],
)
def test_config_with_old_names_or_nulls_gives_the_same_shape(change, expected):
  usual = hugging_face.config_from(LLAMA_CONFIG)
  found = hugging_face.config_from(LLAMA_CONFIG | change)
  assert found == dataclasses.replace(usual, **expected)


def test_config_with_a_byte_order_mark_is_read(tmp_path):
  text = codecs.BOM_UTF8 + json.dumps(LLAMA_CONFIG).encode()
  (tmp_path / "config.json").write_bytes(text)
  found = hugging_face.shape_of(tmp_path)
  assert found == hugging_face.config_from(LLAMA_CONFIG)


def test_tied_model_without_the_prefix_of_its_names_is_read(tmp_path):
  shape = dataclasses.replace(testing.TINY_LLAMA, tied_head=True)
  folder = hugging_face.write(tmp_path / "tied", random_weights(shape))
  expected = hugging_face.load(folder)
  path = folder / "model.safetensors"
  tensors = safetensors.numpy.load_file(path)
  renamed = {name.removeprefix("model."): x for name, x in tensors.items()}
  assert renamed.keys() != tensors.keys()
  safetensors.numpy.save_file(renamed, path, {"format": "pt"})
  found = hugging_face.load(folder)
  jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod."])
@pytest.mark.parametrize("shape", [testing.TINY_LLAMA, testing.TINY_T5])
def test_names_of_wrapped_models_are_read(tmp_path, shape, prefix):
  folder = hugging_face.write(tmp_path / "model", random_weights(shape))
  expected = hugging_face.load(folder)
  path = folder / "model.safetensors"
  tensors = safetensors.numpy.load_file(path)
  renamed = {prefix + name: x for name, x in tensors.items()}
  safetensors.numpy.save_file(renamed, path, {"format": "pt"})
  found = hugging_face.load(folder)
  jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)
  # A prefix of some names belongs to another model.
  first, *_ = tensors
  renamed[first] = renamed.pop(prefix + first)
  safetensors.numpy.save_file(renamed, path, {"format": "pt"})
  with pytest.raises(base.InputError, match="tensors do not fit the configuration"):
    hugging_face.load(folder)


def test_tensors_that_transformers_does_not_read_are_ignored_or_named(tmp_path):
  folder = hugging_face.write(tmp_path / "model", random_weights(testing.TINY_LLAMA))
  expected = hugging_face.load(folder)
  path = folder / "model.safetensors"
  tensors = safetensors.numpy.load_file(path)
  names = ("v_head.summary.weight", "v_head.summary.bias", "model.position_ids")
  tensors |= {name: np.zeros(3, np.float32) for name in names}
  safetensors.numpy.save_file(tensors, path, {"format": "pt"})
  found = hugging_face.load(folder)
  jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)
  tensors["model.reward.weight"] = np.zeros(3, np.float32)
  safetensors.numpy.save_file(tensors, path, {"format": "pt"})
  with pytest.raises(base.InputError, match=r"reward.*The model does not read these"):
    hugging_face.load(folder)


def test_adapter_next_to_a_model_is_refused(tmp_path):
  folder = hugging_face.write(tmp_path / "model", random_weights(testing.TINY_LLAMA))
  (folder / "adapter_config.json").write_text("{}")
  with pytest.raises(base.InputError, match="PairConfig.target: .* and an adapter"):
    pairs.load_pair(pairs.PairConfig(target=str(folder), draft="cache"))


def test_equal_weights_are_equal_files(tmp_path):
  # The library orders metadata at random, differently in every call.
  made = random_weights(testing.TINY_T5)
  files = [weights.save(tmp_path / f"{i}", made).read_bytes() for i in range(8)]
  assert len(set(files)) == 1
  loaded = weights.load(tmp_path / "0")
  assert loaded.config == made.config
