"""GGUF files give the weights, the tokenizer and the chat template that they hold."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sentencepiece
import tiny_pair
import tokenizers
from models import tiny

from osd_jax import base, convert, pairs, testing
from osd_jax.data.vocabulary import Vocabulary
from osd_jax.engine import generation_config
from osd_jax.engine.requests import SamplingConfig
from osd_jax.models import families, tensors, weights
from osd_jax.models.convert import hugging_face, llama
from osd_tools import gguf as reader

gguf = pytest.importorskip("gguf")

TEMPLATE = "{% for message in messages %}<u>{{ message.content }}<a>{% endfor %}"
SHAPES = {
  "llama": dataclasses.replace(
    testing.TINY_LLAMA, vocab_size=tiny_pair.VOCAB_SIZE, eos_ids=(2,)
  ),
  "qwen2": dataclasses.replace(
    testing.TINY_LLAMA, vocab_size=320, attention_bias=True, eos_ids=(257,)
  ),
  "qwen3": dataclasses.replace(
    testing.TINY_LLAMA,
    vocab_size=320,
    query_key_norm=True,
    tied_head=True,
    eos_ids=(257,),
  ),
  "gemma3": dataclasses.replace(
    tiny.GEMMA,
    vocab_size=tiny_pair.VOCAB_SIZE,
    num_layers=6,
    windows=(*(3,) * 5, 0),
    local_rope_theta=1e4,
    query_pre_attn_scalar=0.0,
    attention_cap=0.0,
    logit_cap=0.0,
    eos_ids=(2,),
  ),
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path / "home"))


def interleaved(tensor, heads):
  """Rows of queries and keys as llama.cpp's converter of a Llama writes them."""
  halves = tensor.reshape(heads, 2, -1, tensor.shape[-1])
  return halves.swapaxes(1, 2).reshape(tensor.shape)


def given_name(name, names):
  """The name in a GGUF file of a tensor of transformers."""
  start, kind = name.rsplit(".", 1)
  if not start.startswith("model.layers."):
    return {v: k for k, v in reader._NAMES.items()}[start] + f".{kind}"
  _, _, layer, part = start.split(".", 3)
  inner = {v: k for k, v in names.items()}[part]
  return f"blk.{layer}.{inner}.{kind}"


def add_sentence_pieces(writer):
  model = sentencepiece.SentencePieceProcessor()
  model.LoadFromSerializedProto(tiny_pair.llama_tokenizer())
  ids = range(model.GetPieceSize())
  kinds = [
    1 + model.IsUnknown(i) + 2 * model.IsControl(i) + 5 * model.IsByte(i) for i in ids
  ]
  writer.add_tokenizer_model("llama")
  writer.add_token_list([model.IdToPiece(i) for i in ids])
  writer.add_token_scores([model.GetScore(i) for i in ids])
  writer.add_token_types(kinds)
  for name, token in (("bos", 1), ("eos", 2), ("unk", 0)):
    getattr(writer, f"add_{name}_token_id")(token)


def add_byte_pairs(writer):
  """Bytes, one merge, and two control tokens."""
  plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [code for code in range(256) if code not in plain]
  letters = [chr(code) for code in plain] + [chr(256 + n) for n in range(len(others))]
  tokens = [*letters, "<u>", "<a>", "he"]
  writer.add_tokenizer_model("gpt2")
  writer.add_tokenizer_pre("qwen2")
  writer.add_token_list(tokens)
  writer.add_token_types([1] * 256 + [3, 3, 1])
  writer.add_token_merges(["h e"])
  writer.add_eos_token_id(257)


def write(path, kind, stored=None, change=None):
  """Writes a tiny model; returns its weights, as float32 values of what is stored.

  `stored` is the quantisation of the kernels whose rows fit its blocks.
  """
  config = SHAPES[kind]
  params = tiny.random_params(families.build(config), 0)
  writer = gguf.GGUFWriter(path, kind)
  writer.add_context_length(config.max_positions)
  writer.add_embedding_length(config.width)
  writer.add_feed_forward_length(config.mlp_dim)
  writer.add_block_count(config.num_layers)
  writer.add_head_count(config.num_heads)
  writer.add_head_count_kv(config.num_kv_heads)
  writer.add_key_length(config.head_dim)
  writer.add_layer_norm_rms_eps(config.norm_epsilon)
  writer.add_rope_freq_base(config.rope_theta)
  add_tokenizer = add_byte_pairs if kind.startswith("qwen") else add_sentence_pieces
  add_tokenizer(writer)
  is_gemma = kind == "gemma3"
  names = reader._GEMMA_NAMES if is_gemma else reader._LAYER_NAMES
  if is_gemma:
    writer.add_sliding_window(3)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(config.rope_factor)
  writer.add_chat_template(TEMPLATE)
  heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}

  def written(path, leaf):
    path = "/".join(key.key for key in path)
    name = given_name(llama.tensor_name(path, config), names)
    is_kernel = path.endswith(("/kernel", "/embedding"))
    tensor = leaf.T if llama.is_transposed(path) else leaf
    raw = None
    data = np.ascontiguousarray(tensor)
    if is_gemma and not is_kernel:  # llama.cpp stores 1 + scale
      data = data + np.float32(1)
      tensor = data - np.float32(1)
    if is_kernel and stored and tensor.shape[-1] % 32 == 0:
      data = raw_data = gguf.quants.quantize(data, stored)
      tensor = gguf.quants.dequantize(raw_data, stored).reshape(tensor.shape)
      tensor, raw = tensor.astype(jnp.bfloat16).astype(np.float32), stored
    if kind == "llama" and (part := name.split(".")[-2]) in heads:
      data = interleaved(data, heads[part])
    writer.add_tensor(name, data, raw_dtype=raw)
    return tensor.T if llama.is_transposed(path) else tensor

  kept = jax.tree_util.tree_map_with_path(written, params)
  if change:
    change(writer)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return weights.Weights(config, kept)


@pytest.mark.parametrize("kind", SHAPES)
def test_weights_are_those_of_the_file(tmp_path, kind):
  path = tmp_path / "model.gguf"
  held = write(path, kind, gguf.GGMLQuantizationType.Q8_0)
  found = hugging_face.load(path, as_stored=True)
  assert found.config == held.config
  jax.tree.map(np.testing.assert_array_equal, found.params, held.params)
  types = {name: str(x.dtype) for name, x in tensors.flat(found.params).items()}
  assert set(types.values()) == {"bfloat16", "float32"}  # norms are not quantized
  short = {name for name, kind in types.items() if kind == "bfloat16"}
  assert hugging_face.bfloat16_of(path) == short


def test_file_alone_is_served(tmp_path):
  """Equals the folder with the same weights and the tokenizer that it was made from."""
  path, folder = tmp_path / "model.gguf", tmp_path / "folder"
  held = write(path, "llama", gguf.GGMLQuantizationType.Q8_0)
  files = {"tokenizer.model": tiny_pair.llama_tokenizer()}
  hugging_face.write(folder, held, files)
  found, wanted = (
    pairs.load_pair(pairs.PairConfig(target=str(target), draft="cache"))
    for target in (path, folder)
  )
  jax.tree.map(
    lambda a, b: np.testing.assert_array_equal(np.float32(a), b),
    found.target_params,
    wanted.target_params,
  )
  assert found.vocabulary.template("Hi") == "<u>Hi<a>"
  for text in ("SELECT name FROM", "Zwölf ☃", " a  b\n"):
    ids = found.vocabulary.encode(text)
    assert ids == wanted.vocabulary.encode(text)
    assert found.vocabulary.decode(ids) == wanted.vocabulary.decode(ids)
  assert found.vocabulary.prefix == wanted.vocabulary.prefix == (1,)


def test_byte_pairs_are_read(tmp_path):
  write(tmp_path / "model.gguf", "qwen3")
  found = Vocabulary.load(tmp_path / "model.gguf", template=None)
  ids = found.encode_prompt("hehé")
  assert ids[0] == 256 and ids[-1] == 257 and 258 in ids and found.eos_ids == (257,)
  assert found.processor.DecodeIds(ids.tolist()) == "hehé"


def sampling(**fields):
  """Adds fields of general.sampling to a file."""

  def change(writer):
    for name, value in fields.items():
      getattr(writer, f"add_sampling_{name}")(value)

  return change


def test_sampling_is_read_from_the_metadata(tmp_path):
  path = tmp_path / "model.gguf"
  fields = {"temp": 0.7, "top_k": 20, "top_p": 0.8, "penalty_repeat": 1.05}
  write(path, "qwen2", change=sampling(**fields, penalty_last_n=-1))
  found = generation_config.read(path)
  assert found == SamplingConfig(0.7, 20, 0.8, repetition_penalty=1.05)
  write(path, "qwen2", change=sampling(temp=0.0, penalty_repeat=1.5))
  assert generation_config.read(path) == SamplingConfig(repetition_penalty=1.5)
  write(path, "qwen2")
  with pytest.raises(
    base.InputError, match=r"model\.gguf has no generation_config.*general\.sampling"
  ):
    generation_config.read(path)
  for field, value in (("mirostat", 2), ("penalty_last_n", 64)):
    write(path, "qwen2", change=sampling(**{field: value}))
    with pytest.raises(base.InputError, match=f"{field}: received {value}"):
      generation_config.read(path)


def test_file_is_converted(tmp_path):
  held = write(tmp_path / "model.gguf", "qwen2")
  config = convert.ConvertConfig(str(tmp_path / "model.gguf"), str(tmp_path / "out"))
  found = weights.load(convert.run(config).path)
  jax.tree.map(np.testing.assert_array_equal, found.params, held.params)


def with_fields(fields, renamed=()):
  """Replaces fields of a file, and texts of its tokens; None removes a field."""

  def change(writer):
    held = writer.kv_data[0]
    tokens = held["tokenizer.ggml.tokens"].value
    for token, text in dict(renamed).items():
      tokens[token] = text
    for name, value in fields.items():
      held.pop(name, None)
      kinds = {bool: "bool", int: "uint32", float: "float32", str: "string"}
      if value is not None:
        getattr(writer, f"add_{kinds[type(value)]}")(name, value)

  return change


@pytest.mark.parametrize(
  ("kind", "fields", "begins"),
  [
    ("qwen2", {"tokenizer.ggml.pre": "llama-bpe"}, True),
    ("qwen2", {"tokenizer.ggml.pre": "llama-v3"}, True),
    (
      "qwen2",
      {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False},
      False,
    ),
    ("qwen2", {"tokenizer.ggml.pre": "tekken"}, True),
    ("qwen2", {"tokenizer.ggml.pre": "smollm"}, False),
    ("qwen2", {"tokenizer.ggml.add_bos_token": True}, True),
    ("qwen2", {}, False),
    ("llama", {}, True),
    ("llama", {"tokenizer.ggml.add_bos_token": False}, False),
  ],
)
def test_texts_begin_as_in_llama_cpp(tmp_path, kind, fields, begins):
  path, first = tmp_path / "model.gguf", 1 if kind == "llama" else 256
  fields = {"tokenizer.ggml.bos_token_id": first, **fields}
  write(path, kind, change=with_fields(fields))
  found = Vocabulary.load(path)
  assert found.prefix == ((first,) if begins else ())
  assert (found.encode_prompt("he")[0] == first) == begins


# Words of "I'LL pay 1234 kr.\n\n  Tom's x=5", by the rules of their tokenizers.
WORDS = {
  "qwen2": "I|'LL| pay| |1|2|3|4| kr|.\n\n| | Tom|'s| x|=|5",
  "llama-bpe": "I|'LL| pay| |123|4| kr|.\n\n| | Tom|'s| x|=|5",
  "smaug-bpe": "I|'LL| pay| |123|4| kr|.\n\n| | Tom|'s| x|=|5",
  "smollm": "I|'|LL| pay| |1|2|3|4| kr|.|\n\n | Tom|'s| x|=|5",
  "gpt-2": "I|'|LL| pay| 1234| kr|.|\n\n | Tom|'s| x|=|5",
  "tekken": "I|'LL| pay| |1|2|3|4| kr|.\n\n| | Tom|'s| x|=|5",
  "gpt-4o": "I'LL| pay| |123|4| kr|.\n\n| | Tom's| x|=|5",
  "deepseek-v3": "I|'LL| pay| |123|4| kr|.\n\n| | Tom|'s| x|=|5",
  "deepseek-coder": "I|'|LL| pay| |1|2|3|4| kr|.|\n|\n| | Tom|'|s| x|=|5",
  "seed-coder": "I|'LL| pay| |1|2|3|4| kr|.|\n\n| | Tom|'s| x|=|5",
}


@pytest.mark.parametrize("name", WORDS)
def test_texts_are_split_by_the_named_rule(name):
  text = "I'LL pay 1234 kr.\n\n  Tom's x=5"
  words = reader._splitter(reader._RULES[name]).pre_tokenize_str(text)
  assert [text[start:end] for _, (start, end) in words] == WORDS[name].split("|")


def test_every_rule_has_an_example():
  assert {id(rule) for rule in reader._RULES.values()} == {
    id(reader._RULES[one]) for one in WORDS
  }


def test_rules_that_the_tokenizers_library_has_split_alike():
  """A property of any text; the words of Qwen 2 are the negative control."""
  parts = tokenizers.pre_tokenizers
  whole = parts.ByteLevel(add_prefix_space=False)
  digits = parts.Sequence([parts.Digits(individual_digits=True), whole])
  rng = np.random.default_rng(0)
  letters = list("aZé' \n\t19½_.!中ー'sll")
  texts = ["".join(rng.choice(letters, 30)) for _ in range(300)]
  ours = {name: reader._splitter(rule) for name, rule in reader._RULES.items()}
  for theirs, name in ((whole, "gpt-2"), (digits, "smollm")):
    expected = [theirs.pre_tokenize_str(text) for text in texts]
    assert [ours[name].pre_tokenize_str(text) for text in texts] == expected
    assert [ours["qwen2"].pre_tokenize_str(text) for text in texts] != expected


@pytest.mark.parametrize("name", reader._ENDS)
@pytest.mark.parametrize("kind", ["qwen2", "gemma3"])
def test_answers_end_at_the_tokens_that_llama_cpp_knows_by_name(tmp_path, kind, name):
  path, eos = tmp_path / "model.gguf", 257 if kind == "qwen2" else 2
  # One that the file calls a control token, and one that it calls a normal one.
  token = 256 if kind == "qwen2" else tiny_pair.VOCAB_SIZE - 1
  write(path, kind, change=with_fields({}, {token: name}))
  found = Vocabulary.load(path)
  assert found.eos_ids == hugging_face.shape_of(path).eos_ids == (eos, token)
  assert found.encode(name) == [token] and found.decode([token, 259]) == ""


SCALING = "qwen2.rope.scaling"


@pytest.mark.parametrize(
  ("fields", "factor"),
  [
    ({f"{SCALING}.factor": 4.0}, 4),
    ({f"{SCALING}.factor": 4.0, f"{SCALING}.type": "linear"}, 4),
    ({f"{SCALING}.factor": 4.0, f"{SCALING}.type": "none"}, 1),
    ({f"{SCALING}.factor": 0.0}, 1),
    ({"qwen2.rope.scale_linear": 4.0}, 4),
    ({"qwen2.rope.dimension_count": 8, "qwen2.attention.value_length": 8}, 1),
  ],
)
def test_positions_are_scaled_as_in_llama_cpp(tmp_path, fields, factor):
  held = write(tmp_path / "model.gguf", "qwen2", change=with_fields(fields))
  found = hugging_face.shape_of(tmp_path / "model.gguf")
  assert found == dataclasses.replace(held.config, rope_factor=factor)


@pytest.mark.parametrize("home", ["/proc", "/dev/null"])
def test_file_is_read_where_the_home_cannot_be_written(tmp_path, monkeypatch, home):
  held = write(tmp_path / "model.gguf", "qwen2")
  monkeypatch.setenv("HOME", home)
  monkeypatch.setenv("TMPDIR", str(tmp_path))
  monkeypatch.setattr("tempfile.tempdir", None)
  reader._writable.cache_clear()
  assert hugging_face.shape_of(tmp_path / "model.gguf") == held.config
  assert len(list(tmp_path.glob("osd_jax_gguf_*/*/config.json"))) == 1
  monkeypatch.setattr("tempfile.tempdir", home)
  reader._writable.cache_clear()
  with pytest.raises(base.DiskError, match="set HOME or TMPDIR"):
    hugging_face.shape_of(tmp_path / "model.gguf")


def with_tensor(data, kind=None):
  return lambda w: w.add_tensor("blk.9.other.weight", np.asarray(data), raw_dtype=kind)


Q8_K, BLOCK = gguf.GGMLQuantizationType.Q8_K, np.zeros((1, 292), np.uint8)
REFUSED = {
  "architecture.*'gemma9'": lambda w: w.add_string("general.architecture", "gemma9"),
  "expert_count": lambda w: w.add_expert_count(8),
  "pre.*'falcon'": with_fields({"tokenizer.ggml.pre": "falcon"}),
  "general.type: received 'adapter'.* whole model": with_fields(
    {"general.type": "adapter", "qwen2.context_length": None}
  ),
  "rope.scaling.type: received 'yarn'": with_fields(
    {"qwen2.rope.scaling.type": "yarn"}
  ),
  "rope.scaling.factor: received None": with_fields(
    {"qwen2.rope.scaling.type": "linear"}
  ),
  "rope.dimension_count: received 4": with_fields({"qwen2.rope.dimension_count": 4}),
  "value_length: received 4": with_fields({"qwen2.attention.value_length": 4}),
  "attention.causal: received False": with_fields({"qwen2.attention.causal": False}),
  "attn_factor: received 2.0": with_fields({"qwen2.rope.scaling.attn_factor": 2.0}),
  "add_eos_token: received True": with_fields({"tokenizer.ggml.add_eos_token": True}),
  "blk.9.other.weight.*'Q8_K'": with_tensor(BLOCK, Q8_K),
  "'blk.9.other": with_tensor(np.zeros((2, 2), np.float32)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_unsupported_file_is_refused_by_name(tmp_path, message):
  write(tmp_path / "model.gguf", "qwen2", change=REFUSED[message])
  with pytest.raises(base.InputError, match=message):
    hugging_face.shape_of(tmp_path / "model.gguf")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_truncated_file_is_refused(tmp_path, share):
  write(tmp_path / "whole.gguf", "qwen2")
  data = (tmp_path / "whole.gguf").read_bytes()
  path = tmp_path / "model.gguf"
  path.write_bytes(data[: int(share * len(data))])
  config = pairs.PairConfig(target=str(path), draft="cache")
  with pytest.raises(base.InputError, match=r"PairConfig.target: .*model.gguf.*again"):
    pairs.load_pair(config)


def test_file_that_shrinks_later_is_refused(tmp_path):
  path = tmp_path / "model.gguf"
  write(path, "qwen2")
  opened = reader.open_tensors(path)
  path.write_bytes(path.read_bytes()[:-4])
  with pytest.raises(base.InputError, match="it ends inside tensor"):
    for name in opened.shapes:
      opened.read(name)


def test_missing_package_is_named(tmp_path, monkeypatch):
  write(tmp_path / "model.gguf", "qwen2")
  monkeypatch.setitem(sys.modules, "gguf", None)
  with pytest.raises(base.MissingExtraError, match=r"osd_jax\[gguf\]"):
    hugging_face.shape_of(tmp_path / "model.gguf")
