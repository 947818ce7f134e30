"""Whole commands with decoder-only pairs: distillation, and the paper's pair."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import tiny_online
import tiny_pair

from osd_jax import convert, offline, runs
from osd_jax import main as cli
from osd_jax.data.batches import BatchConfig
from osd_jax.data.vocabulary import Vocabulary, tokenizer_files
from osd_jax.distillation import optimizers, update
from osd_jax.engine.requests import DecodingConfig
from osd_jax.models import weights
from osd_jax.models.convert import hugging_face

pytestmark = pytest.mark.slow

DECODING = DecodingConfig(
  rows=2,
  num_draft_tokens=2,
  source_lengths=(16, tiny_online.SOURCE),
  target_length=8,
  record_top_k=8,
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
  return tiny_online.save_lively_pair(tmp_path_factory.mktemp("pair"), "llama")


def corpus(split, limit):
  return BatchConfig(
    tasks=tiny_online.tasks(split, limit),
    batch_size=4,
    source_length=tiny_online.SOURCE,
    target_length=8,
  )


@pytest.mark.parametrize("form", ["attached", "EAGLE-3"])
def test_offline_distillation_raises_overlap(pair, tmp_path, form):
  pair = dataclasses.replace(pair, draft="attached")
  if form == "EAGLE-3":
    pair = tiny_online.with_head(pair)
  config = offline.OfflineConfig(
    corpus=corpus("train", 4),
    evaluation=corpus("eval", 2),
    output=str(tmp_path / "draft.safetensors"),
    pair=pair,
    decoding=DECODING,
    steps=30,
    update=update.UpdateConfig(
      optimizers.OptimizerConfig(learning_rate=1e-2, warmup_steps=0), num_replay=4
    ),
    evaluate_every=15,
    run_directory=str(tmp_path / "run"),
  )
  made = offline.run(config)
  rows = runs.of_kind(list(runs.read(made.path / "metrics.jsonl")), "evaluation")
  overlaps = [
    np.mean([task["distribution_overlap"] for task in row["tasks"].values()])
    for row in rows
  ]
  assert overlaps[-1] > 1.05 * overlaps[0]


# ---- The folder layout of the paper's pair


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
  """A tiny CHECKPOINTS folder with vicuna-7b/ and llama-160m/."""
  folder = tmp_path_factory.mktemp("checkpoints")
  source = tmp_path_factory.mktemp("tokenizer")
  (source / "tokenizer.model").write_bytes(tiny_pair.llama_tokenizer())
  files = tokenizer_files(Vocabulary.load(source))
  names = {"target": "vicuna-7b", "draft": "llama-160m"}
  for seed, (field, shape) in enumerate(tiny_pair.SHAPES["llama"].items()):
    config = dataclasses.replace(
      shape, vocab_size=tiny_pair.VOCAB_SIZE, max_positions=700
    )
    model = weights.families.build(config, field)
    held = weights.Weights(config, model.init(jax.random.key(seed)))
    hugging_face.write(folder / names[field], held, files)
  return folder


@pytest.fixture
def data(tmp_path):
  rows = [{"prompt": f"How many is {n}?", "reference": f"{n}"} for n in range(8)]
  text = "".join(json.dumps(row) + "\n" for row in rows)
  (tmp_path / "gsm8k.train.jsonl").write_text(text)
  return tmp_path


def osd(command, file, **settings):
  flags = [
    f"--gin.{name.replace('__', '.')}={value!r}" for name, value in settings.items()
  ]
  return cli.main([command, f"--gin_file={file}", *flags])


SMALL = {
  "StreamConfig__requests_per_task": 8,
  "StreamConfig__source_length": 64,
  "DecodingConfig__source_lengths": (64,),
  "DecodingConfig__target_length": 12,
  "ScheduleConfig__update_interval": 2,
  "OptimizerConfig__learning_rate": 1e-2,
}


def test_the_papers_pair_runs_and_converts_back(checkpoints, data, unprepared):
  settings = {
    **SMALL,
    "CHECKPOINTS": str(checkpoints),
    "DATA_DIR": str(data),
    "OnlineConfig__run_directory": str(data / "run"),
  }
  assert osd("online", "experiments/vicuna_7b_gsm8k.gin", **settings) == 0
  rows = list(runs.read(data / "run/metrics.jsonl"))
  assert runs.of_kind(rows, "update")
  home = data / "adapted"
  config = convert.ConvertConfig(
    str(data / "run/draft.safetensors"), str(home), output_kind="hugging_face"
  )
  convert.run(config)
  adapted = hugging_face.load(home)
  first = hugging_face.load(checkpoints / "llama-160m")
  assert adapted.config == first.config
  moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), adapted.params, first.params)
  assert any(jax.tree.leaves(moved))


def test_every_gin_file_of_the_pair_builds_a_config(checkpoints, unprepared, capsys):
  for name in ("gsm8k", "spider", "finance", "python"):
    flags = [f"--gin.CHECKPOINTS={str(checkpoints)!r}", "--dry_run"]
    file = f"--gin_file=experiments/vicuna_7b_{name}.gin"
    assert cli.main(["online", file, *flags]) == 0
    assert f"'runs/vicuna_7b_{name}'" in capsys.readouterr().out
  assert osd("online", "experiments/vicuna_7b_gsm8k.gin") == 2
  assert "--gin.CHECKPOINTS=" in capsys.readouterr().err
