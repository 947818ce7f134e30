"""What a newcomer does with the wheel: own weights, own questions, runs and reports.

  python newcomer.py [START]

Runs in an empty directory and needs nothing of the checkout. START is the time when
the installation began, in seconds since 1970; the program prints how long the newcomer
has waited for the first answer of their own model. Reports are checked in headless
Chromium, if it is installed.
"""

import csv
import dataclasses
import io
import json
import pathlib
import subprocess
import sys
import time

import browser
import jax
import numpy as np
import sentencepiece
import tokenizers

from osd_jax import testing
from osd_jax.models import families, weights
from osd_jax.models.convert import hugging_face

QUESTION = "How many films have budget above 44?"
TEXTS = [
  f"{ask} {thing} with {field} above {count}?"
  for ask in ("How many", "What is the average price of", "List all")
  for thing in ("films", "hotels", "singers")
  for field in ("budget", "rating", "year")
  for count in (3, 44)
]
RUN = """
include "runs/online.gin"
StreamConfig.tasks = (@own/TaskConfig(),)
own/TaskConfig.name = "own"
own/TaskConfig.pattern = "questions.csv"
PairConfig.target = "flan"
PairConfig.draft = "attached"
DecodingConfig.target_length = 16
OnlineConfig.compare_every = 2
OnlineConfig.learn = {learn}
OnlineConfig.run_directory = "runs/{name}"
"""


# --- Models, as they lie on a hub -----------------------------------------------------


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


# --- Commands -------------------------------------------------------------------------


def osd(*words):
  """Runs a command that must succeed; returns its output."""
  run = subprocess.run(["osd", *words], capture_output=True, text=True)
  message = f"osd {' '.join(words)}\n{run.stdout}{run.stderr}"
  assert run.returncode == 0 and "Traceback" not in run.stderr, message
  print(f"osd {' '.join(words)}", flush=True)
  return run.stdout


def answers_of(*words):
  """The answers of `osd generate` as JSON objects."""
  lines = osd("generate", *words, "--format", "jsonl").splitlines()
  answers = [json.loads(line) for line in lines]
  for answer in answers:
    assert answer["tokens"] and "\u2047" not in answer["text"], answer
  return answers


def main(start):
  make_flan("flan")
  make_qwen("qwen")
  limit = ("--max_new_tokens", "12")
  (first,) = answers_of("--target", "flan", QUESTION, *limit)
  print(f"{time.time() - start:.0f} s from the installation to the first answer")
  (other,) = answers_of("--target", "qwen", QUESTION, *limit)
  assert first["text"] != other["text"]
  with open("questions.csv", "w", newline="") as file:
    rows = csv.writer(file)
    rows.writerow(["prompt", "reference"])
    rows.writerows([text, index] for index, text in enumerate(TEXTS[:20]))
  learn = ("--learn", "--save", "adapted.safetensors")
  served = answers_of("--target", "flan", "--file", "questions.csv", *limit, *learn)
  assert [answer["prompt"] for answer in served] == TEXTS[:20]
  adapted = ("--draft", "adapted.safetensors")
  # Another draft changes the speed and never the answer.
  (again,) = answers_of("--target", "flan", *adapted, QUESTION, *limit)
  assert again["tokens"] == first["tokens"]
  for name, learns in (("frozen", False), ("learning", True)):
    pathlib.Path(f"{name}.gin").write_text(RUN.format(name=name, learn=learns))
    osd("online", f"--gin_file={name}.gin")
  osd("compare", "runs/frozen", "runs/learning", "--output", "compared")
  reports = [
    *pathlib.Path("runs").glob("*/*.html"),
    *pathlib.Path("compared").glob("*.html"),
  ]
  assert len(reports) == 3, reports
  if browser.PROGRAM is None:
    print("reports are not measured: there is no Chromium")
    return
  frames = [(report.read_text(), width) for report in reports for width in (400, 1400)]
  grounds = set()
  for is_dark in (False, True):
    pages = browser.measured(frames, pathlib.Path.cwd(), is_dark)
    assert [page["cut"] for page in pages] == [[]] * len(frames), (reports, pages)
    grounds |= {(is_dark, page["ground"]) for page in pages}
  assert len(grounds) == 2, grounds  # one color for each scheme
  print("reports: nothing is cut at 400 and 1400 pixels, in light and dark")


if __name__ == "__main__":
  main(float(sys.argv[1]) if len(sys.argv) > 1 else time.time())
