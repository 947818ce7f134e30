"""The certificate passes exact outputs and near ties, and fails everything else."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import tabular_pair
import tiny_online
from made_rows import of_kind

from osd_jax import base, certificate, corpus, evaluate, pairs, runs, sharding, testing
from osd_jax.data.batches import BatchConfig
from osd_jax.engine.requests import DecodingConfig, Request, SamplingConfig
from osd_jax.engine.server import Server

SIZE, LENGTH = tabular_pair.VOCAB_SIZE, tabular_pair.TARGET_LENGTH
MIXED = SamplingConfig(temperature=0.8, top_k=6, top_p=0.9, seed=5)


def decoding(**values) -> DecodingConfig:
  return DecodingConfig(
    rows=4,
    num_draft_tokens=3,
    source_lengths=(tabular_pair.SOURCE_LENGTH,),
    target_length=LENGTH,
    acceptance_rule="coupling",
    **values,
  )


def with_table(table) -> pairs.Pair:
  return dataclasses.replace(tabular_pair.make(), target_params=np.float32(table))


def answers(pair, sampling=MIXED, draft=True, count=6):
  """Serves `count` prompts with the draft, or plainly if `draft` is False."""
  server = Server(pair if draft else pair.plain(), decoding())
  return server.run(corpus.requests(tabular_pair.prompts(count), sampling))


def altered(done, position, token):
  """Returns the answer with one token replaced."""
  tokens = done.tokens.copy()
  tokens[position] = token
  return dataclasses.replace(done, tokens=tokens)


@pytest.mark.parametrize("sampling", [SamplingConfig(), MIXED])
def test_correct_outputs_pass(sampling):
  pair = tabular_pair.make()
  judged = zip(answers(pair, sampling, False), answers(pair, sampling), strict=True)
  found = certificate.Certifier(pair).judge(judged)
  assert found.passed and found.equal == found.outputs == 6
  assert found.tokens == 6 * LENGTH and not found.near_ties


def test_failure_names_prompt_position_tokens_and_scores():
  pair = tabular_pair.make()
  plain = answers(pair, SamplingConfig(), False)
  right = int(plain[2].tokens[4])
  wrong = (right + 1) % SIZE or 2
  judged = [*zip(plain[:2], plain[:2], strict=True)]
  judged.append((plain[2], altered(plain[2], 4, wrong)))
  found = certificate.Certifier(pair).judge(judged, first=10)
  (failure,) = found.failures
  assert not found.passed and found.equal == 2
  assert (failure.prompt, failure.position) == (12, 4)
  assert (failure.expected, failure.emitted) == (right, wrong)
  logits = np.asarray(pair.target_params)[plain[2].tokens[2], plain[2].tokens[3]]
  assert failure.expected_score == pytest.approx(logits[right])
  assert failure.emitted_score == pytest.approx(logits[wrong])
  assert "prompt 12, position 4" in found.sentence() and "NOT EXACT" in found.sentence()


# Near ties are tokens whose scores differ by at most 1e-5, relatively.
@pytest.mark.parametrize(("distance", "passes"), [(5e-6, True), (5e-5, False)])
def test_only_near_ties_pass(distance, passes):
  table = testing.random_table(SIZE, 0)
  table[..., base.PAD_ID] = table[..., base.EOS_ID] = -1e9
  # Tokens 4 and 5 are the best in every context, `distance` apart.
  best = table.max(-1) + 1
  table[..., 4], table[..., 5] = best, best * (1 - np.sign(best) * distance)
  pair = with_table(table)
  plain = answers(pair, SamplingConfig(), False, 1)[0]
  assert (plain.tokens == 4).all()
  found = certificate.Certifier(pair).judge([(plain, altered(plain, 3, 5))])
  assert found.passed == passes and found.near_ties == passes


def test_token_outside_the_cut_off_fails():
  pair = tabular_pair.make()
  sampling = dataclasses.replace(MIXED, top_k=2, top_p=1.0)
  plain = answers(pair, sampling, False, 1)[0]
  row = np.asarray(pair.target_params, np.float64)[0, plain.tokens[0]]
  found = certificate.scores(row, plain.settings, 1)
  assert np.isfinite(found).sum() == 2
  outside = int(np.argmin(row))
  judged = certificate.Certifier(pair).judge([(plain, altered(plain, 1, outside))])
  assert judged.failures[0].emitted_score == -np.inf


def test_token_just_below_the_cut_off_counts_as_inside():
  logits = np.array([3.0, 2.0, 2.0 - 1e-6, 1.0])
  settings = answers(tabular_pair.make(), MIXED, False, 1)[0].settings
  settings = settings.replace(top_k=np.int32([2]), top_p=np.float32([1.0]))
  assert np.isfinite(certificate.scores(logits, settings, 0)).sum() == 3


@pytest.mark.parametrize(
  "sampling",
  [
    MIXED,
    dataclasses.replace(MIXED, min_p=0.3, repetition_penalty=1.7),
    SamplingConfig(repetition_penalty=2.0),
  ],
)
def test_arg_max_of_scores_equals_the_token_of_plain_decoding(sampling):
  pair = tabular_pair.make()
  table = np.asarray(pair.target_params, np.float64)
  for done in answers(pair, sampling, False):
    before = np.array([0, 0, *done.tokens])
    rows = table[before[:-2], before[1:-1]]
    rows = certificate.penalized(rows, done.settings, [0], done.tokens)
    for position, token in enumerate(done.tokens):
      found = certificate.scores(rows[position], done.settings, position)
      assert np.argmax(found) == token


def test_output_that_ends_early_fails():
  plain = answers(tabular_pair.make(), SamplingConfig(), False, 1)[0]
  short = dataclasses.replace(plain, tokens=plain.tokens[:4])
  found = certificate.Certifier(tabular_pair.make()).judge([(plain, short)])
  assert found.failures[0].position == 4 and found.failures[0].emitted is None


@pytest.mark.parametrize(("ties", "passes"), [(0, True), (1, True), (2, False)])
def test_too_many_near_ties_fail(ties, passes):
  assert certificate.Certificate(near_ties=ties, outputs=9, tokens=999).passed == passes
  many = certificate.Certificate(near_ties=5 * ties, outputs=9, tokens=10**6)
  assert many.passed  # the limit is 10 near ties per million tokens


def test_verdict_sums_the_rows_of_a_log(tmp_path):
  good = certificate.Certificate(outputs=1, equal=1, tokens=10)
  wrong = certificate.Difference(3, 2, 5, 6, 1.0, 0.5, False)
  bad = certificate.Certificate(outputs=1, tokens=10, failures=(wrong,))
  rows = [{"certificate": dataclasses.asdict(c)} for c in (good, good, bad)]
  rows = json.loads(json.dumps([*rows, {"kind": "update"}]))
  directory = runs.RunDirectory.start(tmp_path / "run")
  assert certificate.finish(certificate.of_rows(rows[:2]), directory)
  written = json.loads((directory.path / "certificate.json").read_text())
  assert written["passed"] and written["equal"] == written["outputs"] == 2
  verdict = certificate.of_rows(rows)
  assert verdict.failures == (wrong,) and verdict.tokens == 30
  assert not certificate.finish(verdict, directory)
  assert certificate.finish(certificate.of_rows([]), directory)  # nothing to check


@pytest.mark.parametrize("score", [-np.inf, np.inf, np.nan])
def test_non_finite_scores_fail_also_when_read_from_a_log(tmp_path, score):
  wrong = certificate.Difference(3, 2, 5, 6, 1.0, score, False)
  bad = certificate.Certificate(outputs=1, tokens=10, failures=(wrong,))
  assert "NOT EXACT" in bad.sentence()
  directory = runs.RunDirectory.start(tmp_path / "run")
  with runs.MetricsLog(directory.metrics_path) as log:
    log.write(of_kind("request", certificate=bad))
  verdict = certificate.of_rows(runs.read(directory.metrics_path))
  assert not verdict.passed and verdict.failures[0].emitted_score is None
  text = verdict.sentence()
  assert "NOT EXACT" in text and "emitted 6 (score not finite)" in text
  for found in (verdict, bad):
    assert not certificate.finish(found, directory)
  text = (directory.path / "certificate.json").read_text()
  assert "Infinity" not in text and "NaN" not in text
  assert "NOT EXACT" in json.loads(text)["sentence"]


# --- T5 -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair_config(tmp_path_factory):
  return tiny_online.save_lively_pair(tmp_path_factory.mktemp("certificate"))


def decoding_of_t5() -> DecodingConfig:
  return DecodingConfig(rows=2, source_lengths=(40,), target_length=10)


def certify_config(pair_config, folder, **changes):
  tasks = tiny_online.tasks("eval", 3)
  made = evaluate.CertifyConfig(
    prompts=BatchConfig(tasks=tasks, source_length=40),
    count=6,
    pair=pair_config,
    rows=(1, 3),
    num_draft_tokens=(2,),
    drafts=("pair", "perturbed"),
    decoding=decoding_of_t5(),
    run_directory=str(folder / "run"),
  )
  return dataclasses.replace(made, **changes)


def test_float64_rescoring_agrees_with_float32(pair_config):
  pair = pairs.load_pair(pair_config, sharding.make())
  source, mask = testing.random_sources(2, 7, pair.target.vocab_size, 0)
  target = source[:, :6]
  single = pair.target.score(pair.target_params, source, mask, target)
  with jax.enable_x64(True):
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), pair.target_params)
    double = np.asarray(pair.rescoring_target.score(params, source, mask, target))
  assert double.dtype == np.float64 and single.dtype == np.float32
  scale = np.abs(double).max()
  np.testing.assert_allclose(single, double, atol=1e-5 * scale)
  assert np.any(single != double)


def test_certify_passes_a_correct_pair(pair_config, tmp_path):
  result = evaluate.certify(certify_config(pair_config, tmp_path))
  path = result.path
  verdict = json.loads((path / "certificate.json").read_text())
  assert verdict["passed"] and verdict["equal"] == verdict["outputs"] == 6
  assert result.exact
  assert (path / "report.html").is_file()


def test_certify_reports_a_wrong_output(pair_config, tmp_path, monkeypatch):
  """Negative control: a wrong output is reported, and the results are still written."""
  real = evaluate.speculative_answers

  def faulty(*args):
    first, *others = real(*args)
    return [altered(first, 1, (first.tokens[1] + 1) % 99), *others]

  monkeypatch.setattr(evaluate, "speculative_answers", faulty)
  config = certify_config(pair_config, tmp_path, rows=(3,), drafts=("pair",))
  assert not evaluate.certify(config).exact
  verdict = json.loads((tmp_path / "run" / "certificate.json").read_text())
  assert not verdict["passed"] and verdict["first_failures"][0]["position"] == 1


def test_certify_fails_a_target_with_one_nan(pair_config, tmp_path):
  """Plain and speculative outputs are equal, so equality alone would pass."""
  pair = pairs.load_pair(pair_config, sharding.make())

  def broken(path, leaf):
    return leaf.at[0, 5].set(np.nan) if "logits_dense" in str(path) else leaf

  params = jax.tree_util.tree_map_with_path(broken, pair.target_params)
  nan = dataclasses.replace(pair, target_params=params)
  config = certify_config(nan, tmp_path, rows=(2,), drafts=("pair",))
  assert not evaluate.certify(config).exact
  verdict = json.loads((tmp_path / "run" / "certificate.json").read_text())
  assert verdict["broken"] == verdict["outputs"] and not verdict["passed"]
  page = (tmp_path / "run" / "report.html").read_text()
  assert "NOT EXACT" in page and "not finite" in page


def test_bfloat16_target_is_audited(pair_config, tmp_path):
  config = dataclasses.replace(pair_config, dtype="bfloat16")
  path = evaluate.certify(
    certify_config(config, tmp_path, rows=(3,), drafts=("pair",))
  ).path
  verdict = json.loads((path / "certificate.json").read_text())
  assert verdict["check"] == "near-tie audit" and verdict["passed"]
  pair = pairs.load_pair(config)
  request = Request(np.int32([7, 8, 1]))
  (done,) = Server(pair, decoding_of_t5()).run([request])
  worst = np.asarray(done.batch.target)[0]
  judged = certificate.Certifier(pair).judge(
    [(done, altered(done, 2, (worst[2] + 7) % 999))]
  )
  assert not judged.passed
