"""What is measured of an answer does not depend on how much room it had."""

import dataclasses

import jax
import numpy as np
import pytest
import tabular_pair
from serving.test_slots import Compilations

from osd_jax import testing
from osd_jax.serving import agreement, server, slots

LENGTH = 12
DECODING = slots.DecodingConfig(
  source_lengths=(tabular_pair.SOURCE_LENGTH,),
  target_length=LENGTH,
  record_top_k=4,
)


@pytest.fixture(scope="module")
def pair():
  return tabular_pair.make()


@pytest.fixture(scope="module")
def answers(pair):
  """Of 1 to 12 tokens."""
  sampling = slots.SamplingConfig(temperature=1.0)
  prompts = tabular_pair.prompts(24)
  requests = [
    slots.Request(prompt.tokens, sampling.of_request(i), max_length=1 + i % LENGTH)
    for i, prompt in enumerate(prompts)
  ]
  found = server.Server(pair, DECODING).run(requests)
  assert len({len(done.tokens) for done in found}) > 4
  return found


def test_the_least_length_that_holds_an_answer_gives_what_all_places_give(
  pair, answers
):
  looked_at = []

  def score(params, source, mask, target, **reading):
    looked_at.append(target.shape[1])
    return pair.draft.score(params, source, mask, target, **reading)

  told = dataclasses.replace(pair.draft, score=score)
  for done in answers:
    jax.clear_caches()  # each is traced
    short = agreement.of_answer(told, pair.draft_params, done)
    whole = agreement.agreement(
      pair.draft, pair.draft_params, done.batch, done.settings
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), short, whole)
    least = next(n for n in (3, 6, 12) if n >= len(done.tokens))
    assert looked_at[-1] == least
  assert set(looked_at) == {3, 6, 12} == set(agreement.lengths(LENGTH))


def test_a_length_that_cuts_an_answer_gives_another_figure(pair, answers):
  """Control: the places behind the cut count."""
  longest = max(answers, key=lambda done: len(done.tokens))
  whole, cut = (
    agreement.agreement(
      pair.draft, pair.draft_params, longest.batch, longest.settings, length
    )
    for length in (None, len(longest.tokens) // 2)
  )
  assert abs(whole.distribution_overlap[0] - cut.distribution_overlap[0]) > 1e-3


@pytest.mark.parametrize("length", [1, 2, 3, 64, 191])
def test_lengths_end_with_all_places(length):
  assert agreement.lengths(length)[-1] == length
  assert list(agreement.lengths(length)) == sorted(set(agreement.lengths(length)))


def test_after_warm_up_no_answer_compiles_anything(pair):
  model = testing.tabular_model(tabular_pair.VOCAB_SIZE, "tabular, measured anew")
  ready = server.Server(dataclasses.replace(pair, target=model, draft=model), DECODING)
  ready.warm_up(learn=True)
  prompts = tabular_pair.prompts(6)
  with Compilations() as measuring:
    for i, prompt in enumerate(prompts):
      request = slots.Request(prompt.tokens, max_length=(1, 4, 12)[i % 3])
      for done in ready.run([request]):
        ready.learn(done)
  assert measuring.count == 0
