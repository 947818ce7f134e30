"""What a newcomer does with the wheel: own weights, own questions, runs and reports.

  python newcomer.py [START]

Runs in an empty directory and needs nothing of the checkout. START is the time when
the installation began, in seconds since 1970; the program prints how long the newcomer
has waited for the first answer of their own model. Reports are checked in headless
Chromium, if it is installed.
"""

import csv
import io
import json
import pathlib
import subprocess
import sys
import time

import browser
import numpy as np
import safetensors.numpy
import sentencepiece
import tokenizers

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


def matrices(rng, shapes):
  """Random weights by name; vectors are scales close to 1, or biases close to 0."""

  def drawn(name, shape):
    noise = rng.normal(size=shape)
    if len(shape) == 1:
      return 0.1 * noise + (not name.endswith("bias"))
    is_embedding = "embed_tokens" in name or name in ("shared.weight", "lm_head.weight")
    return noise if is_embedding or "relative" in name else noise * shape[1] ** -0.5

  return {name: drawn(name, shape).astype(np.float32) for name, shape in shapes.items()}


def write_folder(folder, config, shapes, files, first, end):
  """Writes a model that emits ids first .. end - 1 only, like a trained one."""
  folder.mkdir()
  tensors = matrices(np.random.default_rng(0), shapes)
  tensors["lm_head.weight"][:first] = tensors["lm_head.weight"][end:] = 0
  safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
  (folder / "config.json").write_text(json.dumps(config))
  for name, content in files.items():
    (folder / name).write_bytes(content)


def make_flan(folder, width=32, heads=2, size=16, hidden=48, layers=2, buckets=32):
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
  vocab = -(-(pieces.GetPieceSize() + 100) // 128) * 128  # a multiple of 128
  shapes = {"shared.weight": (vocab, width), "lm_head.weight": (vocab, width)}
  for side, parts in (("encoder", 2), ("decoder", 3)):
    shapes[f"{side}.final_layer_norm.weight"] = (width,)
    for block in range(layers):
      at = f"{side}.block.{block}.layer"
      for part in range(parts):
        shapes[f"{at}.{part}.layer_norm.weight"] = (width,)
      for part in range(parts - 1):
        name = f"{at}.{part}.{('SelfAttention', 'EncDecAttention')[part]}"
        shapes |= {f"{name}.{x}.weight": (heads * size, width) for x in "qkv"}
        shapes[f"{name}.o.weight"] = (width, heads * size)
      dense = f"{at}.{parts - 1}.DenseReluDense"
      shapes |= {f"{dense}.wi_{i}.weight": (hidden, width) for i in (0, 1)}
      shapes[f"{dense}.wo.weight"] = (width, hidden)
    bias = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    shapes[bias] = (buckets, heads)
  config = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "d_model": width,
    "d_kv": size,
    "d_ff": hidden,
    "num_heads": heads,
    "num_layers": layers,
    "num_decoder_layers": layers,
    "feed_forward_proj": "gated-gelu",
    "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-6,
    "relative_attention_num_buckets": buckets,
    "relative_attention_max_distance": 128,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "vocab_size": vocab,
  }
  settings = {"extra_ids": 100, "tokenizer_class": "T5Tokenizer"}
  files = {
    "spiece.model": model.getvalue(),
    "tokenizer_config.json": json.dumps(settings).encode(),
  }
  write_folder(folder, config, shapes, files, 3, pieces.GetPieceSize())


def make_qwen(folder, width=32, heads=4, pairs=2, hidden=48, layers=2):
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
  vocab, head = 512, width // heads
  shapes = {"model.norm.weight": (width,)}
  shapes |= {
    f"{name}.weight": (vocab, width) for name in ("model.embed_tokens", "lm_head")
  }
  for layer in range(layers):
    at = f"model.layers.{layer}"
    for name, rows in (("q", heads), ("k", pairs), ("v", pairs)):
      shapes[f"{at}.self_attn.{name}_proj.weight"] = (rows * head, width)
      shapes[f"{at}.self_attn.{name}_proj.bias"] = (rows * head,)
    shapes[f"{at}.self_attn.o_proj.weight"] = (width, heads * head)
    shapes[f"{at}.mlp.gate_proj.weight"] = (hidden, width)
    shapes[f"{at}.mlp.up_proj.weight"] = (hidden, width)
    shapes[f"{at}.mlp.down_proj.weight"] = (width, hidden)
    shapes[f"{at}.input_layernorm.weight"] = (width,)
    shapes[f"{at}.post_attention_layernorm.weight"] = (width,)
  config = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": width,
    "intermediate_size": hidden,
    "num_attention_heads": heads,
    "num_key_value_heads": pairs,
    "num_hidden_layers": layers,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "vocab_size": vocab,
  }
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
  write_folder(folder, config, shapes, files, len(marks), tokenizer.get_vocab_size())


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
  make_flan(pathlib.Path("flan"))
  make_qwen(pathlib.Path("qwen"))
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
