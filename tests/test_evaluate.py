import dataclasses
import types

import jax
import numpy as np
import pytest
import tiny_pair

from osd_jax import base, evaluate, metrics, runs
from osd_jax.costs.table import RoundCosts
from osd_jax.data.batches import BatchConfig, EncodedExample
from osd_jax.data.examples import topic_task
from osd_jax.engine.requests import (
  AdaptiveConfig,
  DecodingConfig,
  Request,
  SamplingConfig,
)
from osd_jax.loop import meter

pytestmark = pytest.mark.slow

TASKS = tuple(topic_task(topic, "eval", 5) for topic in ("maths", "sql"))
PROMPTS = BatchConfig(tasks=TASKS, source_length=48)
K = 2


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> evaluate.EvaluateConfig:
  """The second of the two drafts is the target itself."""
  folder = tmp_path_factory.mktemp("evaluate")
  pair = tiny_pair.save_tiny_pair(folder)
  return evaluate.EvaluateConfig(
    prompts=PROMPTS,
    count=6,
    pair=pair,
    drafts=(pair.target,),
    decoding=DecodingConfig(
      rows=1,
      num_draft_tokens=K,
      source_lengths=(48,),
      target_length=8,
      record_top_k=tiny_pair.VOCAB_SIZE,
    ),
    speed_requests=3,
    run_directory=str(folder / "run"),
  )


@pytest.fixture(scope="module")
def rows(config):
  path = evaluate.run(config).path
  assert (path / "report.html").is_file()
  return list(runs.read(path / "metrics.jsonl"))


def of(rows, kind, **where):
  return [
    row
    for row in rows
    if row["kind"] == kind and all(row[name] == v for name, v in where.items())
  ]


def test_draft_equal_to_the_target_is_always_accepted(rows):
  for topic in ("maths", "sql"):
    equal = of(rows, "draft", draft="target", task=topic)[0]
    other = of(rows, "draft", draft="draft", task=topic)[0]
    for name in ("distribution_overlap", "acceptance_rate", "draft_acceptance_rate"):
      assert equal[name] == pytest.approx(1, abs=1e-4)
      assert other[name] < 0.9  # negative control
    # 8 tokens in rounds of K + 1 = 3: three calls.
    assert equal["tokens_per_target_call"] == pytest.approx(8 / 3)
    assert other["tokens_per_target_call"] < 2


def test_change_rows_are_differences_of_draft_rows(rows):
  name = "distribution_overlap"
  assert len(of(rows, "change")) == 2
  for change in of(rows, "change"):
    before = of(rows, "draft", draft="draft", task=change["task"])[0]
    after = of(rows, "draft", draft=change["draft"], task=change["task"])[0]
    assert change[name] > 0.1
    assert change[name] == pytest.approx(after[name] - before[name])


def test_sampled_evaluation_with_adaptive_k(config, tmp_path):
  """Greedy outputs are certified; no speed is predicted, since K is not fixed."""
  policy = AdaptiveConfig(candidates=(0, K), costs=(RoundCosts((1.0, 1.2)),))
  adapting = dataclasses.replace(
    config,
    sampling=SamplingConfig(temperature=1.0),
    drafts=(),
    speed_requests=1,
    decoding=dataclasses.replace(config.decoding, adaptive=policy),
    run_directory=str(tmp_path / "r"),
  )
  path = evaluate.run(adapting).path
  found = list(runs.read(path / "metrics.jsonl"))
  (verdict,), (speed,) = of(found, "certificate"), of(found, "speed")
  assert verdict["equal"] == verdict["outputs"] == 6
  assert speed["predicted"] is None and speed["speed_up"] > 0
  assert "K adaptive" in (path / "report.html").read_text()


def test_speed_rows_are_consistent(rows):
  speeds = of(rows, "speed")
  assert [row["draft"] for row in speeds] == ["draft", "target"]
  for row in speeds:
    c, v, tau = row["cost_ratio"], row["verify_ratio"], row["tokens_per_target_call"]
    assert row["predicted"] == pytest.approx(tau / (K * c + v))
    assert row["predicted_paper"] == pytest.approx(tau / (K * c + 1))
    assert c == pytest.approx(row["draft_step_ms"] / row["plain_step_ms"])
    assert v == pytest.approx(row["verify_ms"] / row["plain_step_ms"])
    assert row["speed_up"] == pytest.approx(
      row["plain_ms_per_token"] / row["ms_per_token"]
    )
    assert row["ms_per_token"] > 0


class FakeServer:
  """Records which requests it served."""

  engine = types.SimpleNamespace(config=DecodingConfig(source_lengths=(4, 8)))

  def __init__(self, name, calls):
    self._name, self._calls = name, calls

  def run(self, requests):
    self._calls.append((self._name, [request.tag for request in requests]))
    done = types.SimpleNamespace(tokens=np.zeros(6), target_calls=2)
    return [done] * len(requests)

  def clear_cache(self):
    self._calls.append((self._name, "clear"))


def test_timing_alternates_servers_and_serves_each_request_once():
  calls = []
  requests = [
    Request(np.ones(2 + 4 * (tag % 2), np.int32), tag=tag) for tag in range(5)
  ]
  servers = [FakeServer(n, calls) for n in "ab"]
  found = evaluate.time_requests(servers, requests, block=2)
  warm, timed = calls[:4], calls[4:]
  assert [len(tags) for _, tags in warm[::2]] == [2, 2]  # one request per bucket
  assert warm[1::2] == [("a", "clear"), ("b", "clear")]
  assert [name for name, _ in timed] == ["a", "b", "b", "a", "a", "b"]
  for name in "ab":
    assert sum((tags for n, tags in timed if n == name), []) == [0, 1, 2, 3, 4]
  assert [tokens_per_call for _, tokens_per_call in found] == [3, 3]


@pytest.mark.parametrize(
  ("tokens", "expected"),
  [
    ([7] * 11, True),  # eight in a row, four times
    ([7] * 10, False),  # three times
    (list(range(8)) * 4, True),
    (list(range(8)) * 3 + list(range(7)), False),
    (list(range(90)), False),
    ([], False),
  ],
)
def test_text_loops_if_a_window_occurs_four_times(tokens, expected):
  assert metrics.loops(np.asarray(tokens)) is expected


def answered(vocabulary, prompt, reference, text, reason):
  tokens = vocabulary.encode_with_eos(text)
  found = EncodedExample(vocabulary.encode_with_eos(prompt), 0, reference)
  return found, types.SimpleNamespace(tokens=tokens, stop_reason=reason)


def test_quality_counts_references_and_forms():
  bench = evaluate.Vocabulary.load(
    evaluate.pairs.assets.resolve("shipped:demo_vocabulary.model")
  )
  whole = bench.encode_with_eos("the sum is 7")
  eos, length = base.StopReason.EOS, base.StopReason.LENGTH
  part = [
    answered(bench, "one", whole, "the sum is 7", eos),
    answered(bench, "two", whole, "the sum is 8", eos),
    answered(bench, "three", whole[:-1], "the sum is 7", length),  # truncated
    answered(bench, "four", whole[:0], "a a", eos),  # no reference
  ]
  found = evaluate.quality(part, bench)
  assert found["references"] == 2
  assert found["exact_match"] == 0.5
  assert found["ended"] == 0.75
  assert found["distinct"] == 0.75
  assert found["looping"] == 0
  assert evaluate.quality(part[3:], bench)["exact_match"] is None


def test_acceptance_divides_sums_of_counters():
  done = [
    types.SimpleNamespace(accepted=a, drafted=d, tokens=np.zeros(n), target_calls=c)
    for a, d, n, c in ((1, 2, 3, 2), (9, 10, 12, 3))
  ]
  found = meter.acceptance(done)
  assert found["draft_acceptance_rate"] == pytest.approx(10 / 12)
  assert found["tokens_per_target_call"] == 3


def test_drafts_with_equal_file_names_are_labelled_by_path():
  labels = evaluate.draft_labels(["shipped:demo_draft.safetensors", "a/x.st", "b/x.st"])
  assert labels == ["demo_draft", "a/x.st", "b/x.st"]


def test_token_accuracy_is_one_on_the_targets_own_answers(config):
  bench = evaluate.Bench(config)
  leaves = [jax.tree.leaves(pair.target_params) for pair in bench.pairs.values()]
  assert all(one is other for one, other in zip(*leaves, strict=True))  # one copy
  answers = bench.plain().run(bench.requests)
  before = [found for found in bench.token_accuracies() if found is not None]
  assert len(before) == 6 and np.mean(before) < 0.5  # negative control
  bench.prompts = [
    dataclasses.replace(prompt, reference=done.tokens)
    for prompt, done in zip(bench.prompts, answers, strict=True)
  ]
  assert bench.token_accuracies() == [1.0] * 6
