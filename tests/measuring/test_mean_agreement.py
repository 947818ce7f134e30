"""A draft's agreement with answered prompts, a task."""

import jax
import numpy as np
import pytest
import tabular_pair

from osd_jax import corpus, sharding
from osd_jax.engine import slots
from osd_jax.measuring import metrics

DECODING = slots.DecodingConfig(
  rows=3,
  source_lengths=(tabular_pair.SOURCE_LENGTH,),
  target_length=tabular_pair.TARGET_LENGTH,
  record_top_k=tabular_pair.VOCAB_SIZE,
)


@pytest.fixture(scope="module")
def pair():
  return tabular_pair.make()


@pytest.fixture(scope="module")
def answers(pair):
  server = corpus.plain_server(pair, DECODING, sharding.PartitionConfig())
  sampling = slots.SamplingConfig(temperature=1.0)
  return server.run(corpus.requests(tabular_pair.prompts(7), sampling))


def test_a_draft_equal_to_the_target_agrees_entirely(pair, answers):
  equal = metrics.mean_agreement(pair.target, pair.target_params, answers)
  other = metrics.mean_agreement(pair.draft, pair.draft_params, answers)
  assert equal.keys() == other.keys() == {0, 1}
  for task in (0, 1):
    assert equal[task]["distribution_overlap"] == pytest.approx(1, abs=1e-5)
    assert other[task]["distribution_overlap"] < 0.9  # negative control
  assert [equal[task]["requests"] for task in (0, 1)] == [4, 3]


def test_mean_agreement_does_not_depend_on_the_rows_of_a_pass(pair, answers):
  few = metrics.mean_agreement(pair.draft, pair.draft_params, answers, rows=3)
  many = metrics.mean_agreement(pair.draft, pair.draft_params, answers, rows=16)
  for task in few:
    assert few[task] == pytest.approx(many[task], abs=1e-6)


def test_mean_agreement_is_the_mean_over_requests_of_the_overlap(pair, answers):
  """Against the formula, written out in numpy."""
  overlaps = {0: [], 1: []}
  tables = [
    np.asarray(jax.nn.softmax(table, axis=-1), np.float64)
    for table in (pair.target_params, pair.draft_params)
  ]
  for done in answers:
    fed = [0, *done.tokens.tolist()[:-1]]
    before = [0, *fed[:-1]]
    overlap = np.minimum(tables[0][before, fed], tables[1][before, fed]).sum(-1)
    overlaps[done.request.tag].append(overlap.mean())
  found = metrics.mean_agreement(pair.draft, pair.draft_params, answers)
  for task, values in overlaps.items():
    assert found[task]["distribution_overlap"] == pytest.approx(
      np.mean(values), abs=1e-5
    )
