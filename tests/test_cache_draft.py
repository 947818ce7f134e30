"""`PairConfig.draft = "cache"`: drafts from prompts and served answers, no draft model.

`decoding/test_ngrams.py` shows what a lookup names; here are whole commands.
"""

import dataclasses
import json

import numpy as np
import pytest
import tiny_online

from osd_jax import base, evaluate, offline, online, pairs, runs
from osd_jax.data.batches import BatchConfig
from osd_jax.engine import agreement
from osd_jax.engine.requests import DecodingConfig, Request, SamplingConfig
from osd_jax.engine.server import Server

SIZE = 1 << 10


@pytest.fixture(scope="module", params=["t5", "llama"])
def pair(request, tmp_path_factory):
  """A target alone: its draft's file is gone."""
  folder = tmp_path_factory.mktemp("pair")
  found = tiny_online.save_lively_pair(folder, request.param)
  (folder / "draft.safetensors").unlink()
  return dataclasses.replace(found, draft="cache")


@pytest.fixture(scope="module")
def requests(pair):
  """Requests with sampled answers, each of them twice in a row."""
  vocabulary = pairs.load_vocabulary(pair)
  prompts = [vocabulary.encode_prompt(f"{text} of all rows") for text in ("max", "sum")]
  return [
    Request(prompt, SamplingConfig(temperature=1.0, seed=seed), tag=0)
    for seed, prompt in enumerate(prompts)
    for _ in range(2)
  ]


DECODING = DecodingConfig(
  source_lengths=(tiny_online.SOURCE,),
  target_length=12,
  acceptance_rule="coupling",
  cache_tokens=SIZE,
)


def test_repeated_answer_is_drafted_from_the_first(pair, requests):
  with Server(pair, DECODING) as server:
    found = server.run(requests)
    plain = Server(server.pair.plain(), DECODING).run(requests)
    assert server.pair.draft_params.ring.shape == (SIZE,)
    with pytest.raises(base.InputError, match=r"n-gram cache has no weights"):
      server.save("draft.safetensors")
    with pytest.raises(base.InputError, match="without training.*leave `learn` out"):
      server.learn(found[0])
  assert [d.tokens.tolist() for d in found] == [d.tokens.tolist() for d in plain]
  assert found[1].target_calls < found[0].target_calls


def test_size_has_a_default_and_follows_cache_tokens(pair):
  loaded = pairs.load_pair(pair)
  assert loaded.draft_params.ring.shape == (2**16,)
  assert loaded.with_cache_size(SIZE).draft_params.ring.shape == (SIZE,)
  assert loaded.with_cache_size(0) is loaded


def test_agreement_is_measured_before_an_answer_is_taken_up(pair, requests):
  server = Server(pair, DECODING)
  first, again = server.run(requests)[:2]
  draft, params = server.pair.draft, server.draft_params

  def overlap(answers):
    found = agreement.mean_agreement(draft, params, answers)
    return found[0]["distribution_overlap"]

  alone = overlap([first])
  # A one-hot draft overlaps with the target by the probability of its token.
  known = agreement.absorbed(draft, draft.init(None), first)
  after = agreement.of_answer(draft, known, again).distribution_overlap[0]
  assert overlap([first, again]) == pytest.approx((alone + float(after)) / 2, rel=1e-5)
  assert after > alone  # the answer itself would raise its own overlap


@pytest.mark.slow
@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_online_run_measures_the_cache_against_prompt_lookup(pair, tmp_path):
  config = tiny_online.config(
    pair, tmp_path / "run", rows=1, compare_every=2, measure_costs=True
  )
  decoding = dataclasses.replace(config.decoding, cache_tokens=SIZE)
  tasks = tiny_online.tasks("stream", 2)  # each query comes three times
  stream = dataclasses.replace(config.stream, tasks=tasks)
  result = online.run(dataclasses.replace(config, decoding=decoding, stream=stream))
  assert result.exact
  rows = list(runs.read(result.path / "metrics.jsonl"))
  asked = [row for row in rows if row["kind"] == "request"]
  assert not [row for row in rows if row["kind"] == "update"]
  later = [row for number, row in enumerate(asked) if number % 6 >= 2]
  assert np.mean([row["acceptance_rate"] for row in later]) > np.mean(
    [row["floor_acceptance_rate"] for row in later]
  )
  assert np.mean([row["tokens_per_target_call"] for row in later]) > 1
  assert not list(result.path.rglob("*.safetensors"))
  assert "No draft was trained" in (result.path / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("pair", ["t5"], indirect=True)
def test_evaluation_and_certificate_run_without_a_draft_model(pair, tmp_path):
  prompts = BatchConfig(tasks=tiny_online.tasks("eval", 1), source_length=48)
  decoding = dataclasses.replace(DECODING, source_lengths=(48,), rows=2)
  shared = {"prompts": prompts, "count": 4, "pair": pair}
  config = evaluate.EvaluateConfig(
    **shared,
    decoding=decoding,
    speed_requests=2,
    run_directory=str(tmp_path / "evaluate"),
  )
  found = evaluate.run(config)
  rows = list(runs.read(found.path / "metrics.jsonl"))
  assert found.exact
  assert {row["draft"] for row in rows if row["kind"] == "draft"} == {"cache"}
  certified = evaluate.certify(
    evaluate.CertifyConfig(
      **shared,
      decoding=decoding,
      num_draft_tokens=(3,),
      rows=(2,),
      drafts=("pair",),
      run_directory=str(tmp_path / "certify"),
    )
  )
  assert certified.exact
  found = json.loads((certified.path / "certificate.json").read_text())
  assert found["outputs"] == found["equal"] == 4


def test_offline_distillation_is_refused(pair):
  batch = BatchConfig(tasks=tiny_online.tasks("train", 1), source_length=48)
  with pytest.raises(base.InputError, match=r"OfflineConfig.pair.*can be trained"):
    offline.OfflineConfig(batch, batch, "draft.safetensors", pair)
