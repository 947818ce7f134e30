"""Makes the demo's vocabulary from the train split of the demo's topics.

  python experiments/shipped_pair/make_vocabulary.py \\
      --out osd_jax/assets/demo_vocabulary.model
  python experiments/shipped_pair/make_vocabulary.py \\
      --family llama --out runs/demo_llama/tokenizer.model

SentencePiece BPE with byte fallback, so that encoding preserves every text. Each number
0..99 forms one piece with the space before it, so it has the same id in prompt and
output. Newline and four spaces are pieces too.
"""

import argparse
import io
import pathlib
from collections.abc import Iterator

import sentencepiece
import topics

VOCAB_SIZE = 1536
# Special ids of each family of models.
SPECIAL_IDS = {
  "t5": {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
  "llama": {"pad_id": -1, "eos_id": 2, "unk_id": 0, "bos_id": 1},
}
_SPACE = "\u2581"  # SentencePiece's sign for a space
NUMBER_PIECES = [f"{_SPACE}{number}" for number in range(99, -1, -1)]


def training_texts(rows: int, seed: int) -> Iterator[str]:
  """Yields the texts of `rows` train examples of each topic.

  Args:
    rows: examples of each topic.
    seed: seed of the examples.

  Yields:
    Prompts and references, newlines kept.
  """
  for topic in topics.TOPICS:
    for example in topics.generate(topic, "train", rows, seed):
      yield example.prompt
      yield example.reference


def train(rows: int, seed: int, family: str = "t5") -> bytes:
  """Trains the vocabulary.

  Args:
    rows: examples of each topic.
    seed: seed of the examples.
    family: a key of SPECIAL_IDS.

  Returns:
    The serialised SentencePiece model.
  """
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=training_texts(rows, seed),
    model_writer=model,
    model_type="bpe",
    vocab_size=VOCAB_SIZE,
    byte_fallback=True,
    character_coverage=1.0,
    normalization_rule_name="identity",
    remove_extra_whitespaces=False,
    add_dummy_prefix=True,
    user_defined_symbols=["\n", _SPACE * 4, *NUMBER_PIECES],
    **SPECIAL_IDS[family],
    num_threads=1,
    minloglevel=2,
  )
  return model.getvalue()


def main() -> None:
  """Trains the vocabulary on generated text and writes it."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--out", type=pathlib.Path, required=True)
  parser.add_argument("--rows", type=int, default=5000, help="examples of each topic")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--family", choices=SPECIAL_IDS, default="t5")
  arguments = parser.parse_args()
  model = train(arguments.rows, arguments.seed, arguments.family)
  arguments.out.parent.mkdir(parents=True, exist_ok=True)
  arguments.out.write_bytes(model)
  print(f"wrote {len(model)} bytes to {arguments.out}")


if __name__ == "__main__":
  main()
