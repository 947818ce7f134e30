"""`osd convert`, and the T5 pair of the paper from transformers folders, end to end."""

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from osd_jax import assets, base, convert, pairs, sharding, testing
from osd_jax import main as cli
from osd_jax.data.vocabulary import Vocabulary, tokenizer_files
from osd_jax.models import attached, families, shapes, tensors, weights
from osd_jax.models.convert import hugging_face
from osd_tools import t5x

VOCABULARY = "shipped:demo_vocabulary.model"
VOCAB_SIZE = 1664  # 1,536 pieces, 100 sentinels, and padding as published models have


@pytest.fixture(scope="module")
def given():
  config = dataclasses.replace(testing.TINY_T5, vocab_size=VOCAB_SIZE)
  params = jax.jit(families.build(config).init)(jax.random.key(0))
  return weights.Weights(config, params)


@pytest.fixture
def folder(given, tmp_path):
  return hugging_face.write(tmp_path / "source", given)


def assert_same(found, expected):
  assert found.config == expected.config
  jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)


@pytest.mark.parametrize("shape", [testing.TINY_T5, testing.TINY_LLAMA], ids=type)
def test_bfloat16_stays_bfloat16_in_both_directions(tmp_path, shape):
  """Bit for bit and in size; in a mixed model, each tensor keeps its type."""
  params = jax.jit(families.build(shape).init)(jax.random.key(0))
  short = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
  mixed = jax.tree.map(lambda x, y: x if x.ndim == 1 else y, params, short)
  types, sizes = {}, {}
  for name, given in {"float32": params, "bfloat16": short, "mixed": mixed}.items():
    folder = hugging_face.write(tmp_path / name, weights.Weights(shape, given))
    file, back = str(tmp_path / f"{name}.safetensors"), tmp_path / f"{name}_again"
    convert.run(convert.ConvertConfig(str(folder), file))
    convert.run(convert.ConvertConfig(file, str(back), output_kind="hugging_face"))
    for part in ("config.json", "model.safetensors"):
      assert (back / part).read_bytes() == (folder / part).read_bytes()
    jax.tree.map(
      np.testing.assert_array_equal, weights.load(file, as_stored=True).params, given
    )
    # The headers say the same, without reading any tensor.
    kept = {path for path, x in tensors.flat(given).items() if x.dtype == jnp.bfloat16}
    assert hugging_face.bfloat16_of(folder) == weights.bfloat16_of(file) == kept
    types[name] = json.loads((folder / "config.json").read_text())["dtype"]
    sizes[name] = os.path.getsize(file)
  assert types == {"float32": "float32", "bfloat16": "bfloat16", "mixed": "float32"}
  values = sum(leaf.size for leaf in jax.tree.leaves(params))
  assert sizes["float32"] - sizes["bfloat16"] == pytest.approx(2 * values, abs=256)


def test_vocabulary_is_recorded_or_written(folder, tmp_path, given):
  fingerprint = Vocabulary.load(assets.resolve(VOCABULARY), 100).fingerprint
  config = convert.ConvertConfig(
    str(folder), str(tmp_path / "w.safetensors"), vocabulary=VOCABULARY, extra_ids=100
  )
  found = weights.load(convert.run(config).path)
  assert_same(found, given)
  assert found.vocabulary == fingerprint
  back = dataclasses.replace(
    config,
    source=config.output,
    output=str(tmp_path / "back"),
    output_kind="hugging_face",
  )
  assert Vocabulary.load(convert.run(back).path, 100).fingerprint == fingerprint
  other = dataclasses.replace(back, extra_ids=0, output=str(tmp_path / "no"))
  with pytest.raises(
    base.InputError, match=r"ConvertConfig\.extra_ids: received 0, expected 100"
  ):
    convert.run(other)
  many = dataclasses.replace(config, extra_ids=200, output=str(tmp_path / "no"))
  with pytest.raises(ValueError, match="has 1664 token ids, .* the 1736 of"):
    convert.run(many)
  assert not (tmp_path / "no").exists()


def test_t5x_checkpoints_need_a_model_config(tmp_path, repository):
  from tools.test_t5x_checkpoints import CONFIG

  source = repository.parent / "shared/fixtures/t5x/native/checkpoint_7"
  if not source.is_dir():
    pytest.skip("t5x's own checkpoints absent: no ../shared/fixtures/t5x")
  config = convert.ConvertConfig(str(source), str(tmp_path / "w.safetensors"))
  with pytest.raises(ValueError, match=r"ConvertConfig\.model: received None"):
    convert.run(config)
  assert not list(tmp_path.iterdir())
  path = convert.run(dataclasses.replace(config, model=CONFIG)).path
  assert_same(weights.load(path), t5x.read(source, CONFIG))


@pytest.mark.parametrize(
  ("changes", "named"),
  [
    ({"output_kind": "t5x"}, "ConvertConfig.output_kind: received 't5x'"),
    ({"source": ""}, "ConvertConfig.source"),
    ({"source": "nowhere"}, "no such file or folder"),
    ({"source": "nowhere/at/all"}, "which does not exist"),
    ({"extra_ids": 2.0}, "ConvertConfig.extra_ids"),
    ({"output": "/dev/null/w"}, "ConvertConfig.output: received '/dev/null/w'"),
    ({"output": ".", "output_kind": "hugging_face"}, "it exists already"),
    ({"model": shapes.T5Config()}, "leave ConvertConfig.model unset"),
  ],
)
def test_invalid_settings_are_named_and_write_nothing(folder, tmp_path, changes, named):
  fields = {"source": str(folder), "output": str(tmp_path / "w"), **changes}
  with pytest.raises(base.InputError) as caught:
    convert.run(convert.ConvertConfig(**fields))
  assert named in str(caught.value) and len(str(caught.value).splitlines()) == 1
  assert not (tmp_path / "w").exists()


# ---- From the command line


def osd(command, *files, **settings):
  flags = [f"--gin.{name.replace('__', '.')}={v!r}" for name, v in settings.items()]
  return cli.main([command, *(f"--gin_file={file}" for file in files), *flags])


def test_command_names_a_wrong_tensor_with_both_shapes(
  folder, tmp_path, unprepared, capsys
):
  fields = json.loads((folder / "config.json").read_text())
  fields["d_ff"] += 1
  (folder / "config.json").write_text(json.dumps(fields))
  output = tmp_path / "w.safetensors"
  settings = {"source": str(folder), "output": str(output)}
  settings = {f"ConvertConfig__{name}": path for name, path in settings.items()}
  assert osd("convert", "runs/convert.gin", **settings) == 2
  error = capsys.readouterr().err
  assert error.startswith(f"osd convert: weights: {folder}: tensors do not fit")
  assert "DenseReluDense.wi_0.weight: found (" in error and ", expected (" in error
  assert not output.exists()


# ---- The pair of the paper


@pytest.fixture
def checkpoints(given, tmp_path):
  """A tiny CHECKPOINTS folder with flan-t5-xl/ and t5-small/."""
  folder = tmp_path / "checkpoints"
  files = tokenizer_files(Vocabulary.load(assets.resolve(VOCABULARY), 100))
  hugging_face.write(folder / "flan-t5-xl", given, files)
  config = dataclasses.replace(
    testing.TINY_DRAFT,
    vocab_size=VOCAB_SIZE,
    mlp_activations=("relu",),  # the draft is a T5 1.0, the target a T5 1.1
    tied_head=True,
  )
  params = jax.jit(families.build(config).init)(jax.random.key(1))
  hugging_face.write(folder / "t5-small", weights.Weights(config, params))
  return folder


@pytest.fixture
def data(tmp_path):
  folder = tmp_path / "data"
  folder.mkdir()
  rows = [{"prompt": f"How many is {n}?", "reference": f"{n}"} for n in range(8)]
  text = "".join(json.dumps(row) + "\n" for row in rows)
  (folder / "gsm8k.train.jsonl").write_text(text)
  return folder


@pytest.mark.slow
def test_the_papers_pair_runs_and_converts_back(
  checkpoints, data, tmp_path, unprepared
):
  """An online run from two transformers folders; its draft is converted back."""
  run = tmp_path / "run"
  settings = {
    "CHECKPOINTS": str(checkpoints),
    "DATA_DIR": str(data),
    "OnlineConfig__run_directory": str(run),
    # much smaller than the sizes in the gin file
    "StreamConfig__requests_per_task": 6,
    "StreamConfig__source_length": 32,
    "DecodingConfig__source_lengths": (32,),
    "DecodingConfig__target_length": 12,
    "OptimizerConfig__learning_rate": 1e-2,
  }
  assert osd("online", "experiments/flan_t5_xl_gsm8k.gin", **settings) == 0
  first = hugging_face.load(checkpoints / "t5-small")
  adapted = weights.load(run / "draft.safetensors")
  assert adapted.config == first.config
  moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), adapted.params, first.params)
  assert any(jax.tree.leaves(moved))
  home = tmp_path / "adapted"
  settings = {
    "ConvertConfig__source": str(run / "draft.safetensors"),
    "ConvertConfig__output": str(home),
    "ConvertConfig__output_kind": "hugging_face",
  }
  assert osd("convert", "runs/convert.gin", **settings) == 0
  assert_same(hugging_face.load(home), adapted)
  pair = pairs.PairConfig(
    "flan-t5-xl", str(home), "flan-t5-xl", 100, folder=str(checkpoints)
  )
  loaded = pairs.load_pair(pair, sharding.make())
  jax.tree.map(np.testing.assert_array_equal, loaded.draft_params, adapted.params)


def test_gin_files_require_only_checkpoints(checkpoints, unprepared, capsys):
  assert osd("online", "experiments/flan_t5_xl_gsm8k.gin") == 2
  error = capsys.readouterr().err
  assert "--gin.CHECKPOINTS=" in error and len(error.splitlines()) == 1
  flags = [f"--gin.CHECKPOINTS={str(checkpoints)!r}", "--dry_run"]
  for name in ("gsm8k", "spider", "finance", "python"):
    file = f"--gin_file=experiments/flan_t5_xl_{name}.gin"
    assert cli.main(["online", file, *flags]) == 0
    shown = capsys.readouterr().out
    assert f"OnlineConfig.run_directory = 'runs/flan_t5_xl_{name}'" in shown


ADAPTER = "an adapter .LoRA.*merge it into its base model"


@pytest.mark.parametrize(
  ("file", "content", "message"),
  [
    ("adapter_config.json", b"{}", ADAPTER),
    ("model.gguf", b"GGUF\x03\x00\x00\x00", "GGUF files of llama.cpp"),
  ],
)
def test_folder_of_another_kind_is_refused_with_a_remedy(
  tmp_path, file, content, message
):
  """By the conversion, and as a target, whose vocabulary is missing as well."""
  (tmp_path / file).write_bytes(content)
  config = convert.ConvertConfig(str(tmp_path), str(tmp_path / "out.safetensors"))
  with pytest.raises(base.InputError, match=f"ConvertConfig.source: .*{message}"):
    convert.run(config)
  with pytest.raises(base.InputError, match=f"PairConfig.target: .*{message}"):
    pairs.load_pair(pairs.PairConfig(target=str(tmp_path)))


@pytest.mark.parametrize("kind", ["hugging_face", "osd"])
def test_attached_draft_cannot_be_exported(tmp_path, kind):
  shape = shapes.AttachedConfig(width=16, num_heads=2, head_dim=8, mlp_dim=24)
  draft = attached.build(shape, testing.TINY_T5)
  params = jax.tree.map(
    lambda leaf: np.zeros(leaf.shape, np.float32),
    jax.eval_shape(draft.init, jax.random.key(0)),
  )
  held = weights.AttachedWeights(shape, params, "fingerprint", "big")
  source = weights.save(tmp_path / "draft.safetensors", held)
  config = convert.ConvertConfig(str(source), str(tmp_path / "out"), output_kind=kind)
  with pytest.raises(base.InputError, match="attached draft.*cannot be exported"):
    convert.run(config)
  assert not (tmp_path / "out").exists()
