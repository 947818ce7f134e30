"""The measured agreement of an answer does not depend on the padded length."""

import dataclasses

import jax
import numpy as np
import pytest
import tabular_pair
from compilations import Compilations

from osd_jax import testing
from osd_jax.engine import agreement, engine, server
from osd_jax.models import families

LENGTH = 12
DECODING = engine.DecodingConfig(
  source_lengths=(tabular_pair.SOURCE_LENGTH,),
  target_length=LENGTH,
  record_top_k=4,
)


@pytest.fixture(scope="module")
def pair():
  return tabular_pair.make()


@pytest.fixture(scope="module")
def answers(pair):
  """Answers of 1 to 12 tokens."""
  sampling = engine.SamplingConfig(temperature=1.0)
  prompts = tabular_pair.prompts(24)
  requests = [
    engine.Request(prompt.tokens, sampling.of_request(i), max_new_tokens=1 + i % LENGTH)
    for i, prompt in enumerate(prompts)
  ]
  found = server.Server(pair, DECODING).run(requests)
  assert len({len(done.tokens) for done in found}) > 4
  return found


@pytest.mark.slow
def test_shortest_padded_length_gives_the_same_agreement(pair, answers):
  scored_lengths = []

  def score(params, source, mask, target, **given):
    scored_lengths.append(target.shape[1])
    return pair.draft.score(params, source, mask, target, **given)

  draft = dataclasses.replace(pair.draft, score=score)
  for done in answers:
    jax.clear_caches()  # so that `score` is traced for each answer
    short = agreement.of_answer(draft, pair.draft_params, done)
    whole = agreement.agreement(
      pair.draft, pair.draft_params, done.batch, done.settings
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), short, whole)
    least = next(n for n in (3, 6, 12) if n >= len(done.tokens))
    assert scored_lengths[-1] == least
  assert set(scored_lengths) == {3, 6, 12} == set(agreement.lengths(LENGTH))


def test_length_that_cuts_the_answer_changes_the_agreement(pair, answers):
  """Control: the positions after the cut contribute to the result."""
  longest = max(answers, key=lambda done: len(done.tokens))
  whole, cut = (
    agreement.agreement(
      pair.draft, pair.draft_params, longest.batch, longest.settings, length
    )
    for length in (None, len(longest.tokens) // 2)
  )
  assert abs(whole.distribution_overlap[0] - cut.distribution_overlap[0]) > 1e-3


@pytest.mark.parametrize("length", [1, 2, 3, 64, 191])
def test_lengths_end_with_the_full_length(length):
  assert agreement.lengths(length)[-1] == length
  assert list(agreement.lengths(length)) == sorted(set(agreement.lengths(length)))


def test_measuring_compiles_nothing_after_warm_up(pair):
  model = testing.tabular_model(tabular_pair.VOCAB_SIZE, "tabular, measured again")
  ready = server.Server(dataclasses.replace(pair, target=model, draft=model), DECODING)
  ready.warm_up(learn=True)
  prompts = tabular_pair.prompts(6)
  with Compilations() as measuring:
    for i, prompt in enumerate(prompts):
      request = engine.Request(prompt.tokens, max_new_tokens=(1, 4, 12)[i % 3])
      for done in ready.run([request]):
        ready.learn(done)
  assert measuring.count == 0


def restricted_to(covered, model):
  """The model, with no mass on tokens outside `covered`."""

  def score(*arguments, **given):
    logits = model.score(*arguments, **given)
    others = np.setdiff1d(np.arange(model.vocab_size), covered)
    return logits.at[..., others].set(-np.inf)

  return dataclasses.replace(model, score=score)


@pytest.mark.parametrize("temperature, top_k", [(0.0, 0), (1.0, 0), (0.7, 3)])
def test_tokens_outside_a_short_head_have_no_mass(pair, answers, temperature, top_k):
  covered = np.array([1, 4, 2, 7], np.int32)
  short = restricted_to(covered, pair.draft)
  settings = engine.SamplingConfig(temperature=temperature, top_k=top_k).settings(
    LENGTH
  )
  whole = []
  for done in answers[:8]:
    arguments = (pair.draft_params, done.batch, settings, None)
    found = agreement.agreement(pair.draft, *arguments, covered)
    wanted = agreement.agreement(short, *arguments)
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), found, wanted
    )
    whole.append(agreement.agreement(pair.draft, *arguments).distribution_overlap)
    assert found.distribution_overlap <= found.distribution_overlap_upper <= 1 + 1e-6
    assert abs(found.distribution_overlap - whole[-1]) > 1e-3  # negative control


def test_draft_with_score_at_scores_only_covered_tokens(answers):
  model = families.build(dataclasses.replace(testing.TINY_DRAFT, vocab_size=1000))
  params = model.init(jax.random.key(3))
  covered = np.array([1, 5, 9, 300, 301], np.int32)
  done = next(done for done in answers if len(done.tokens) == LENGTH)
  asked = (params, done.batch, done.settings, LENGTH)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5),
    agreement.agreement(model, *asked, covered),
    agreement.agreement(dataclasses.replace(model, score_at=None), *asked, covered),
  )
  restricted, whole = (
    agreement.agreement.lower(model, *asked, tokens).as_text()
    for tokens in (covered, None)
  )
  assert f"{LENGTH}x1000xf32" not in restricted and f"{LENGTH}x1000xf32" in whole


def test_server_measures_the_draft_with_its_current_shortlist(
  pair, answers, monkeypatch
):
  """Agreement is restricted to the tokens that the output head covers at present."""
  seen, real = [], agreement.agreement
  monkeypatch.setattr(
    agreement, "agreement", lambda *given: (seen.append(given[5]), real(*given))[1]
  )
  one = server.Server(pair, DECODING)
  one.engine.shortlist = np.array([1, 2, 5], np.int32)
  one.warm_up(learn=True)
  one.learn(answers[0])
  assert len(seen) > 2 and all(given.tolist() == [1, 2, 5] for given in seen)
  one.close()
