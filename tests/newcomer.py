"""What newcomer.sh needs in Python.

  python newcomer.py models|reports

Runs in the current folder and needs nothing of the checkout.
"""

import csv
import dataclasses
import io
import json
import pathlib
import sys

import browser
import jax
import numpy as np
import sentencepiece
import tokenizers

from osd_jax import testing
from osd_jax.models import families, weights
from osd_jax.models.convert import hugging_face

TEXTS = [
  f"{ask} {thing} with {field} above {count}?"
  for ask in ("How many", "What is the average price of", "List all")
  for thing in ("films", "hotels", "singers")
  for field in ("budget", "rating", "year")
  for count in (3, 44)
]


def write_folder(folder, shape, files, first, end):
  """Writes a model that emits ids first .. end - 1 only, like a trained one."""
  params = jax.jit(families.build(shape, folder).init)(jax.random.key(0))
  head = params["decoder"]["logits_dense"]
  ids = np.arange(shape.vocab_size)
  head["kernel"] = head["kernel"] * ((ids >= first) & (ids < end))
  hugging_face.write(folder, weights.Weights(shape, params), files)


def make_flan(folder):
  """A Flan-T5 with a SentencePiece vocabulary and 100 sentinels."""
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.Train(
    sentence_iterator=iter(TEXTS),
    model_writer=model,
    vocab_size=120,
    hard_vocab_limit=False,
    pad_id=0,
    eos_id=1,
    unk_id=2,
    bos_id=-1,
    minloglevel=2,
  )
  pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
  count = pieces.GetPieceSize()
  settings = {"extra_ids": 100, "tokenizer_class": "T5Tokenizer"}
  vocab_size = -(-(count + 100) // 128) * 128  # a multiple of 128
  shape = dataclasses.replace(testing.TINY_T5, vocab_size=vocab_size)
  files = {
    "spiece.model": model.getvalue(),
    "tokenizer_config.json": json.dumps(settings).encode(),
  }
  write_folder(folder, shape, files, 3, count)


def make_qwen(folder):
  """A Qwen2 with a byte-level vocabulary and a chat template."""
  from tokenizers import decoders, models, pre_tokenizers, trainers

  marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
  tokenizer = tokenizers.Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=384,
    special_tokens=marks,
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  tokenizer.train_from_iterator(TEXTS, trainer)
  changes = {"max_positions": 512, "eos_ids": (2,), "attention_bias": True}
  shape = dataclasses.replace(testing.TINY_LLAMA, vocab_size=512, **changes)
  template = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
  )
  settings = {"eos_token": "<|im_end|>", "chat_template": template}
  files = {
    "tokenizer.json": tokenizer.to_str().encode(),
    "tokenizer_config.json": json.dumps(settings).encode(),
  }
  write_folder(folder, shape, files, len(marks), tokenizer.get_vocab_size())


def models():
  """Writes two models, and a table of questions for them."""
  make_flan("flan")
  make_qwen("qwen")
  with open("questions.csv", "w", newline="") as file:
    rows = csv.writer(file)
    rows.writerow(["prompt", "reference"])
    rows.writerows([text, index] for index, text in enumerate(TEXTS[:20]))


def reports():
  """Looks at all reports in headless Chromium, if it is installed."""
  pages = [
    *pathlib.Path("runs").glob("*/*.html"),
    *pathlib.Path().glob("compared/*.html"),
  ]
  assert len(pages) == 3, pages
  if browser.PROGRAM is None:
    print("reports are not looked at: there is no Chromium")
    return
  frames = [(page.read_text(), width) for page in pages for width in (400, 1400)]
  grounds = set()
  for is_dark in (False, True):
    measured = browser.measured(frames, pathlib.Path.cwd(), is_dark)
    assert [page["cut"] for page in measured] == [[]] * len(frames), (pages, measured)
    grounds |= {(is_dark, page["ground"]) for page in measured}
  assert len(grounds) == 2, grounds  # one color for each scheme
  print("reports: nothing is cut at 400 and 1400 pixels, in light and dark")


if __name__ == "__main__":
  {"models": models, "reports": reports}[sys.argv[1]]()
