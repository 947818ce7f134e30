"""`OwnSampling` is what `generate` of transformers makes of generation_config.json."""

import dataclasses
import json

import pytest
import tiny_online

from osd_jax import base, evaluate, offline, online, pairs, runs
from osd_jax.data import batches
from osd_jax.engine import generation_config
from osd_jax.engine.requests import OwnSampling, SamplingConfig

QWEN = {
  "do_sample": True,
  "temperature": 0.7,
  "top_p": 0.8,
  "top_k": 20,
  "repetition_penalty": 1.05,
  "eos_token_id": [7, 8],
  "max_new_tokens": 2048,
  "transformers_version": "4.37.0",
}


def read(folder, **fields):
  (folder / "generation_config.json").write_text(json.dumps(fields))
  return generation_config.read(folder)


@pytest.mark.parametrize(
  ("fields", "expected"),
  [
    ({}, SamplingConfig()),
    ({"eos_token_id": 1, "_from_model_config": True}, SamplingConfig()),
    # Greedy, as without do_sample a temperature has no effect in transformers.
    ({"temperature": 0.9, "top_p": 0.6}, SamplingConfig()),
    ({**QWEN, "do_sample": False}, SamplingConfig(repetition_penalty=1.05)),
    ({**QWEN, "do_sample": None}, SamplingConfig(repetition_penalty=1.05)),
    # Defaults of transformers: top-k is 50 unless the file says otherwise.
    ({"do_sample": True}, SamplingConfig(temperature=1, top_k=50)),
    ({"do_sample": True, "top_k": 0}, SamplingConfig(temperature=1)),
    ({"do_sample": True, "top_k": None}, SamplingConfig(temperature=1, top_k=50)),
    (
      {"do_sample": True, "top_k": 64, "top_p": 0.95, "cache_implementation": "hybrid"},
      SamplingConfig(temperature=1, top_k=64, top_p=0.95),
    ),
    ({"do_sample": True, "min_p": 0.1}, SamplingConfig(1, 50, min_p=0.1)),
    (QWEN, SamplingConfig(0.7, 20, 0.8, repetition_penalty=1.05)),
    # Values without effect, and a filter that greedy decoding does not apply.
    (
      {"num_beams": 1, "no_repeat_ngram_size": 0, "suppress_tokens": [], "top_h": 0.4},
      SamplingConfig(),
    ),
  ],
)
def test_fields_are_read_as_in_transformers(tmp_path, fields, expected):
  assert read(tmp_path, **fields) == expected


@pytest.mark.parametrize(
  ("fields", "part"),
  [
    ({"do_sample": "yes"}, "do_sample: received 'yes', expected true or false"),
    ({"do_sample": 1}, "do_sample: received 1"),
    ({"do_sample": True, "temperature": "warm"}, "temperature: received 'warm'"),
    ({"do_sample": True, "temperature": 0.0}, "temperature: received 0 with do_sample"),
    ({"do_sample": True, "temperature": -1, "top_k": -3}, "top_k: received -3"),
    ({"do_sample": True, "top_k": 20.5}, "top_k: received 20.5"),
    ({"do_sample": True, "top_p": [0.9]}, "top_p: received (0.9,)"),
    ({"repetition_penalty": True}, "repetition_penalty: received True"),
    ({"num_beams": 4}, "num_beams: received 4, which is not supported"),
    ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size: received 3"),
    ({"bad_words_ids": [[3]]}, "bad_words_ids: received [[3]]"),
    ({"forced_bos_token_id": 0}, "forced_bos_token_id: received 0"),
    ({"do_sample": True, "typical_p": 0.9}, "typical_p: received 0.9"),
    ({"do_sample": True, "epsilon_cutoff": 3e-4}, "epsilon_cutoff: received 0.0003"),
    ({"do_sample": True, "top_h": 0.4}, "top_h: received 0.4"),
    ({"guidance_scale": 1.5}, "guidance_scale: received 1.5"),
  ],
)
def test_other_fields_are_refused_in_one_line(tmp_path, fields, part):
  with pytest.raises(base.InputError) as caught:
    read(tmp_path, **fields)
  text = str(caught.value)
  assert part in text and "generation_config.json" in text
  assert len(text.splitlines()) == 1


def test_missing_or_damaged_file_is_refused_in_one_line(tmp_path):
  with pytest.raises(base.InputError, match=r"has no generation_config\.json"):
    generation_config.read(tmp_path)
  (tmp_path / "generation_config.json").write_text("[1]")
  with pytest.raises(base.InputError, match="expected a JSON object"):
    generation_config.read(tmp_path)


def test_folder_is_that_of_the_target_or_of_its_vocabulary(tmp_path):
  for name, top_k in (("model", 5), ("words", 6)):
    (tmp_path / name).mkdir()
    read(tmp_path / name, do_sample=True, top_k=top_k)
  words = str(tmp_path / "words" / "tokenizer.json")
  (tmp_path / "words" / "tokenizer.json").touch()
  given = pairs.PairConfig(str(tmp_path / "model"), vocabulary=words)
  found = generation_config.resolved(OwnSampling(seed=3), given)
  assert found == SamplingConfig(temperature=1, top_k=5, seed=3)
  file = dataclasses.replace(given, target=str(tmp_path / "w.safetensors"))
  assert generation_config.resolved(OwnSampling(), file).top_k == 6
  assert generation_config.resolved(SamplingConfig(0.5), given) == SamplingConfig(0.5)


@pytest.fixture
def pair(tmp_path):
  """A pair of Llamas in files of this package, whose tokenizer states a sampling."""
  made = tiny_online.save_lively_pair(tmp_path, "llama")
  fields = {
    "do_sample": True,
    "temperature": 2.0,
    "top_k": 9,
    "repetition_penalty": 1.2,
  }
  read(tmp_path, **fields)
  return made


OWN = SamplingConfig(2.0, 9, seed=5, repetition_penalty=1.2)


@pytest.mark.parametrize("command", ["online", "offline", "evaluate", "certify"])
def test_every_command_resolves_it(pair, tmp_path, monkeypatch, command):
  """The run directory records the settings, so a changed file is another run."""
  prompts = batches.BatchConfig(tasks=tiny_online.tasks("eval", 2), source_length=40)
  own = OwnSampling(seed=5)
  common = {"pair": pair, "sampling": own}
  run, config = {
    "online": lambda: (online.run, tiny_online.config(pair, tmp_path, sampling=own)),
    "offline": lambda: (
      offline.run,
      offline.OfflineConfig(prompts, prompts, str(tmp_path / "d"), **common),
    ),
    "evaluate": lambda: (evaluate.run, evaluate.EvaluateConfig(prompts, **common)),
    "certify": lambda: (evaluate.certify, evaluate.CertifyConfig(prompts, **common)),
  }[command]()
  recorded = []

  def start(folder, config, **_):
    recorded.append(config)
    raise KeyboardInterrupt

  monkeypatch.setattr(runs.RunDirectory, "start", start)
  if command == "certify":
    with pytest.raises(base.InputError, match="acceptance_rule = 'coupling'"):
      run(config)
    coupled = dataclasses.replace(config.decoding, acceptance_rule="coupling")
    config = dataclasses.replace(config, decoding=coupled)
  with pytest.raises(KeyboardInterrupt):
    run(config)
  assert [config.sampling for config in recorded] == [OWN]


@pytest.mark.slow
def test_online_run_samples_as_the_file_says(pair, tmp_path):
  def tokens(name, sampling):
    config = tiny_online.config(
      pair, tmp_path / name, sampling=sampling, keep_outputs="ids", learn=False
    )
    rows = runs.read(online.run(config).path / "outputs.jsonl")
    return [row["output_ids"] for row in rows]

  own = tokens("own", OwnSampling(seed=5))
  assert own == tokens("stated", OWN)
  assert own != tokens("greedy", SamplingConfig())  # negative control
