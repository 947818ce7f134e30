"""Texts in bulk: answers in order, and what the target says of references."""

import dataclasses

import jax
import numpy as np
import pytest
import tabular_pair

from osd_jax import base, corpus, sharding
from osd_jax.engine import engine

ONE_DEVICE = sharding.PartitionConfig()
DECODING = engine.DecodingConfig(
  rows=3,
  source_lengths=(tabular_pair.SOURCE_LENGTH,),
  target_length=tabular_pair.TARGET_LENGTH,
  record_top_k=tabular_pair.VOCAB_SIZE,
)


@pytest.fixture(scope="module")
def pair():
  return tabular_pair.make()


def test_answers_come_in_the_order_of_the_prompts(pair):
  """Each equals the same prompt answered alone: rows mix nothing up."""
  found = tabular_pair.prompts(7)
  sampling = engine.SamplingConfig(temperature=1.0, seed=5)
  server = corpus.plain_server(pair, DECODING, ONE_DEVICE)
  together = server.run(corpus.requests(found, sampling))
  single = engine.Engine(
    dataclasses.replace(DECODING, rows=1), pair.target, pair.target_params
  )
  for index, done in enumerate(together):
    own = dataclasses.replace(sampling, seed=5 + index)
    alone = single.run([engine.Request(found[index].tokens, own)])[0]
    np.testing.assert_array_equal(done.tokens, alone.tokens)
    assert done.request.tag == found[index].task_id
  assert len({done.tokens.tobytes() for done in together}) > 1


def test_answer_reports_each_prompt_as_it_finishes(pair):
  seen = []
  server = corpus.plain_server(pair, DECODING, ONE_DEVICE)
  requests = corpus.requests(tabular_pair.prompts(5), engine.SamplingConfig())
  server.run(requests, seen.append)
  assert len(seen) == 5


def test_reference_rows_hold_what_the_target_says_of_the_references(pair):
  found = tabular_pair.prompts(5)
  found[2] = dataclasses.replace(found[2], reference=np.zeros(0, np.int32))
  parts = list(corpus.reference_rows(pair, found, DECODING, rows=4))
  assert [len(part.weight) for part in parts] == [4, 4]
  whole = corpus.stack(parts)
  assert whole.weight.tolist() == [1, 1, 0, 1, 1, 0, 0, 0]
  mask = whole.source != base.PAD_ID
  logits = pair.target.score(pair.target_params, whole.source, mask, whole.target)
  expected = jax.nn.log_softmax(logits, axis=-1)
  kept = np.take_along_axis(
    np.asarray(expected), np.asarray(whole.records.ids, np.int64), axis=-1
  )
  where = np.asarray(whole.mask)
  np.testing.assert_allclose(
    np.asarray(whole.records.log_probs)[where], kept[where], rtol=1e-5
  )
  assert where.sum() == 3 * 4
