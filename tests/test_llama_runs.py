"""Whole commands with a decoder-only pair: the paper's layout, meshes, broken input."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import tiny_online
import tiny_pair
from whole_run import COUNT, INTERRUPTED, run

import osd_jax
from osd_jax import base, certify, convert, evaluate, offline, pairs, runs, testing
from osd_jax import main as cli
from osd_jax.costs.table import RoundCosts
from osd_jax.data import tokenizers
from osd_jax.data.batches import BatchConfig
from osd_jax.distillation import optimizers, update
from osd_jax.engine import adaptive, engine
from osd_jax.models import convert as formats
from osd_jax.models import weights

pytestmark = pytest.mark.slow

DECODING = engine.DecodingConfig(
  rows=2,
  num_draft_tokens=2,
  source_lengths=(16, tiny_online.SOURCE),
  target_length=8,
  record_top_k=8,
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
  return tiny_online.save_lively_pair(tmp_path_factory.mktemp("pair"), "llama")


# ---- Meshes


@pytest.fixture(scope="module")
def alone(pair, tmp_path_factory):
  """What one device serves and learns."""
  found, updates = run(pair, tmp_path_factory.mktemp("one") / "run", (1, 1))
  assert len({tuple(tokens) for tokens in found}) > COUNT // 2 and len(updates) > 2
  return found, updates


@pytest.mark.skipif(len(jax.devices()) < 4, reason="conftest.py fakes four devices")
@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("mesh", [(2, 2), (1, 4)], ids=str)
def test_an_online_run_on_a_mesh_continued_on_one_device(alone, pair, tmp_path, mesh):
  """(1, 4) does not divide the two heads of keys: those stay whole."""
  found, updates = run(pair, tmp_path / "run", mesh, INTERRUPTED, (1, 1))
  assert found == alone[0]
  np.testing.assert_allclose(updates, alone[1], atol=1e-4)


def test_a_k_of_its_own(alone, pair, tmp_path):
  """The table makes it draft at first and decode plainly later."""
  costs = RoundCosts((1.0, 4.0))
  chosen = adaptive.AdaptiveConfig(candidates=(0, 2), rounds_per_call=1, costs=(costs,))
  found, _ = run(pair, tmp_path / "run", (1, 1), adaptive=chosen)
  assert found == alone[0]


# ---- Other commands


def corpus(split, limit):
  return BatchConfig(
    tasks=tiny_online.tasks(split, limit),
    batch_size=4,
    source_length=tiny_online.SOURCE,
    target_length=8,
    reader="plain",
  )


def asked(pair, folder):
  return {
    "prompts": corpus("eval", 2),
    "count": 5,
    "pair": pair,
    "decoding": DECODING,
    "run_directory": str(folder / "run"),
  }


def test_a_certificate(pair, tmp_path):
  config = certify.CertifyConfig(
    **asked(pair, tmp_path), num_draft_tokens=(2, 5), rows=(1, 2), drafts=("pair",)
  )
  made = certify.run(config)
  assert made.exact
  found = [r for r in runs.read(made.path / "metrics.jsonl") if "equal" in r]
  assert all(row["outputs"] == row["equal"] > 0 for row in found) and len(found) > 2


def test_an_evaluation(pair, tmp_path):
  made = evaluate.run(evaluate.EvaluateConfig(**asked(pair, tmp_path)))
  assert [r for r in runs.read(made.path / "metrics.jsonl") if r["kind"] == "draft"]


@pytest.mark.parametrize("draft", ["independent", "attached"])
def test_distilled_offline_it_agrees_more_and_serves(pair, tmp_path, draft):
  if draft == "attached":
    pair = dataclasses.replace(pair, draft="attached")
  output = str(tmp_path / "draft.safetensors")
  config = offline.OfflineConfig(
    corpus=corpus("train", 4),
    evaluation=corpus("eval", 2),
    output=output,
    pair=pair,
    decoding=DECODING,
    steps=30,
    update=update.UpdateConfig(optimizers.OptimizerConfig(learning_rate=1e-2)),
    evaluate_every=15,
    evaluation_prompts=8,
    run_directory=str(tmp_path / "run"),
  )
  made = offline.run(config)
  rows = runs.of_kind(list(runs.read(made.path / "metrics.jsonl")), "evaluation")
  overlaps = [
    np.mean([task["distribution_overlap"] for task in row["tasks"].values()])
    for row in rows
  ]
  assert overlaps[-1] > 1.05 * overlaps[0]
  adapted = dataclasses.replace(pair, draft=output)
  texts = []
  for one in (pair, adapted):
    with osd_jax.Server(one, DECODING) as server:
      texts.append(
        [answer.text for answer in server.generate(["add 2 and 3", "x = 4"])]
      )
  assert texts[0] == texts[1]


def test_answers_are_streamed_as_they_are_whole(pair):
  with osd_jax.Server(pair, DECODING) as server:
    (whole,) = server.generate(["list all singers"])
    pieces = list(server.stream("list all singers"))
  assert "".join(str(piece) for piece in pieces) == whole.text


# ---- The paper's layout


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
  """What CHECKPOINTS holds, tiny: vicuna-7b/ and llama-160m/."""
  folder = tmp_path_factory.mktemp("checkpoints")
  source = tmp_path_factory.mktemp("tokenizer")
  (source / "tokenizer.model").write_bytes(tiny_pair.llama_tokenizer())
  files = tokenizers.tokenizer_files(tokenizers.load_any(source))
  names = {"target": "vicuna-7b", "draft": "llama-160m"}
  for seed, (field, shape) in enumerate(tiny_pair.SHAPES["llama"].items()):
    config = dataclasses.replace(
      shape, vocab_size=tiny_pair.VOCAB_SIZE, max_positions=700
    )
    model = weights.families.build(config, field)
    held = weights.Weights(config, model.init(jax.random.key(seed)))
    formats.write_hugging_face(folder / names[field], held, files)
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
  "StreamConfig__reader": "plain",
  "DecodingConfig__source_lengths": (64,),
  "DecodingConfig__target_length": 12,
  "ScheduleConfig__update_interval": 2,
  "OptimizerConfig__learning_rate": 1e-2,
}


@pytest.mark.parametrize("draft", ["llama-160m", "attached"])
def test_the_papers_pair_runs_from_a_folder_of_its_layout(
  checkpoints, data, unprepared, draft
):
  settings = {
    **SMALL,
    "CHECKPOINTS": str(checkpoints),
    "DATA_DIR": str(data),
    "OnlineConfig__run_directory": str(data / "run"),
    "PairConfig__draft": draft,
  }
  assert osd("online", "experiments/vicuna_7b_gsm8k.gin", **settings) == 0
  rows = list(runs.read(data / "run/metrics.jsonl"))
  assert runs.of_kind(rows, "update")
  if draft == "attached":
    return
  home = data / "adapted"
  config = convert.ConvertConfig(
    str(data / "run/draft.safetensors"), str(home), output_kind="hugging_face"
  )
  convert.run(config)
  adapted = formats.read_hugging_face(home)
  first = formats.read_hugging_face(checkpoints / "llama-160m")
  assert adapted.config == first.config
  moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), adapted.params, first.params)
  assert any(jax.tree.leaves(moved))  # it learnt


def test_every_file_of_the_pair_is_walked(checkpoints, unprepared, capsys):
  for name in ("gsm8k", "spider", "finance", "python"):
    flags = [f"--gin.CHECKPOINTS={str(checkpoints)!r}", "--dry_run"]
    file = f"--gin_file=experiments/vicuna_7b_{name}.gin"
    assert cli.main(["online", file, *flags]) == 0
    assert f"'runs/vicuna_7b_{name}'" in capsys.readouterr().out
  assert osd("online", "experiments/vicuna_7b_gsm8k.gin") == 2
  assert "--gin.CHECKPOINTS=" in capsys.readouterr().err


# ---- Broken input


def refused(pair, match, **changes):
  with pytest.raises(base.InputError, match=match):
    pairs.load_pair(dataclasses.replace(pair, **changes))


def test_pairs_of_two_families_are_refused(pair, tmp_path):
  t5 = tiny_pair.save_tiny_pair(tmp_path)
  refused(pair, r"PairConfig.draft.* is a T5, but .* of a decoder-only", draft=t5.draft)
  refused(t5, r"is a decoder-only model, but .* of a T5", target=pair.target)


def test_another_end_of_sequence_is_named(pair, tmp_path):
  found = weights.load(pair.target)
  config = dataclasses.replace(found.config, eos_ids=(7,))
  other = tmp_path / "other.safetensors"
  weights.save(other, dataclasses.replace(found, config=config))
  refused(pair, r"ends a sequence with \(7,\)", target=str(other))


def test_the_layer_that_an_attached_draft_reads_is_chosen(pair, tmp_path):
  source = np.arange(3, 11, dtype=np.int32)[None]

  def loaded(layer, draft="attached"):
    config = dataclasses.replace(tiny_online.attached(pair), state_layer=layer)
    return pairs.load_pair(dataclasses.replace(config, draft=draft))

  def target_states(found):
    served = found.target.prepare(found.target_params)
    return found.target.prefill(
      served, source, found.target.mask(source), 12
    ).target_states

  behind_all, first = loaded(0), loaded(1)
  assert not np.array_equal(target_states(first), target_states(behind_all))
  last = loaded(testing.TINY_LLAMA.num_layers)
  np.testing.assert_array_equal(target_states(last), target_states(behind_all))
  path = first.save_draft(tmp_path / "draft.safetensors", first.draft_params, "")
  assert loaded(1, str(path)).draft_config == tiny_online.SHAPE
  with pytest.raises(base.InputError, match="attached to the target"):
    loaded(0, str(path))
  with pytest.raises(base.InputError, match=r"PairConfig\.state_layer: received 9"):
    loaded(9)
  with pytest.raises(base.InputError, match=r"state_layer: received 1.*an encoder"):
    pairs.load_pair(pairs.PairConfig(state_layer=1))


def test_more_tokens_than_positions_are_refused(pair):
  long = dataclasses.replace(DECODING, source_lengths=(200,), target_length=60)
  with pytest.raises(base.InputError, match="are 260 tokens, expected at most the 256"):
    osd_jax.Server(pair, long)


@pytest.mark.parametrize(
  "changes, match",
  [
    ({"model_type": "gpt2"}, "model_type: received 'gpt2'"),
    ({"hidden_act": "gelu"}, "hidden_act: received 'gelu'"),
    ({"quantization_config": {"bits": 4}}, "quantised"),
    ({"num_local_experts": 8}, "mixture of experts"),
    ({"mlp_bias": True}, "mlp_bias.*biases"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type.*'yarn'"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ({"eos_token_id": None}, "eos_token_id"),
    ({"hidden_size": None}, "hidden_size: received nothing"),
  ],
)
def test_what_cannot_be_converted_is_refused_by_field(changes, match):
  fields = formats.config_to_hugging_face(testing.TINY_LLAMA)
  fields.pop("rope_parameters")
  assert formats.config_from_hugging_face(fields) == testing.TINY_LLAMA
  with pytest.raises(base.InputError, match=match):
    formats.config_from_hugging_face({**fields, **changes})


def test_a_window_bounds_the_context():
  fields = formats.config_to_hugging_face(testing.TINY_LLAMA)
  window = {"sliding_window": 32}
  mistral = {**fields, "model_type": "mistral", **window}
  assert formats.config_from_hugging_face(mistral).max_positions == 32
  qwen = {**fields, "model_type": "qwen2", **window}  # which does not use it
  assert formats.config_from_hugging_face(qwen).max_positions == 256
