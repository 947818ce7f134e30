"""Weights files of a tiny untrained pair, T5 or Llama."""

import dataclasses
import functools
import io
import json
from pathlib import Path

import jax
import sentencepiece

from osd_jax import assets, pairs, testing
from osd_jax.data import examples
from osd_jax.data.vocabulary import Vocabulary
from osd_jax.models import families, weights

VOCAB_SIZE = 1536
SHAPES = {
  "t5": {"target": testing.TINY_T5, "draft": testing.TINY_DRAFT},
  "llama": {
    "target": dataclasses.replace(testing.TINY_LLAMA, eos_ids=(2,)),
    "draft": dataclasses.replace(testing.TINY_LLAMA_DRAFT, eos_ids=(2,)),
  },
}


@functools.cache
def llama_tokenizer() -> bytes:
  """A `tokenizer.model` trained on the generated topics, with Llama's special ids."""
  texts = [
    text
    for topic in examples.TOPICS
    for example in examples.topic_examples(topic, "train", 200)
    for text in (example.prompt, example.reference)
  ]
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.Train(
    sentence_iterator=iter(texts),
    model_writer=model,
    vocab_size=VOCAB_SIZE,
    model_type="bpe",
    byte_fallback=True,
    normalization_rule_name="identity",
    remove_extra_whitespaces=False,
    hard_vocab_limit=False,
    unk_id=0,
    bos_id=1,
    eos_id=2,
    pad_id=-1,
    num_threads=1,
    minloglevel=2,
  )
  return model.getvalue()


def vocabulary(kind: str, folder: Path) -> Vocabulary:
  """Returns the vocabulary of a "llama", of "bytes" as in Qwen, or the shipped T5's."""
  if kind == "shipped":
    return Vocabulary.load(assets.resolve("shipped:demo_vocabulary.model"))
  if kind == "llama":
    (folder / "tokenizer.model").write_bytes(llama_tokenizer())
    return Vocabulary.load(folder)
  from tokenizers import Tokenizer, decoders, models, pre_tokenizers

  letters = pre_tokenizers.ByteLevel.alphabet()
  made = Tokenizer(models.BPE({x: i for i, x in enumerate(sorted(letters))}, []))
  made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  made.decoder = decoders.ByteLevel()
  made.add_special_tokens(["<end>"])
  made.save(str(folder / "tokenizer.json"))
  settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
  (folder / "tokenizer_config.json").write_text(json.dumps(settings))
  return Vocabulary.load(folder)


def save_tiny_pair(folder: Path, family: str = "t5") -> pairs.PairConfig:
  """Writes `target.safetensors` and `draft.safetensors`; returns their config.

  The models are untrained, so their outputs run to the length limit.
  """
  path = pairs.PairConfig().named("vocabulary")
  if family == "llama":
    path = str(folder / "tokenizer.model")
    Path(path).write_bytes(llama_tokenizer())
  vocabulary = Vocabulary.load(assets.resolve(path))
  for seed, (name, shape) in enumerate(SHAPES[family].items()):
    config = dataclasses.replace(shape, vocab_size=VOCAB_SIZE)
    params = families.build(config, name).init(jax.random.key(seed))
    weights.save(
      folder / f"{name}.safetensors",
      weights.Weights(config, params, vocabulary.fingerprint, "tiny, untrained"),
    )
  return pairs.PairConfig(
    target=str(folder / "target.safetensors"),
    draft=str(folder / "draft.safetensors"),
    vocabulary=path,
  )
