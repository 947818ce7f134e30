"""Mixed text sources draw the writer of each prompt or token from a seed."""

import jax.numpy as jnp
import numpy as np
import pytest
import test_corpus
from test_corpus import generated

from osd_tools import mixture

pair, plain = test_corpus.pair, test_corpus.plain


def test_mix_request_takes_each_text_from_one_model(pair, plain):
  rows = generated(pair, sample_source="mix_request", seed=1)
  by_target, by_draft = ((rows.target == texts).all(axis=1) for texts in plain)
  assert (by_target ^ by_draft).all()
  assert by_target.any() and by_draft.any()
  other = generated(pair, sample_source="mix_request", seed=2)
  assert (rows.target != other.target).any()


def test_mix_token_takes_each_token_from_one_model(pair):
  rows = generated(pair, sample_source="mix_token", seed=1)
  target, draft = (
    np.asarray(model.score(params, rows.source, None, rows.target).argmax(-1))
    for model, params in (
      (pair.target, pair.target_params),
      (pair.draft, pair.draft_params),
    )
  )
  by_target, by_draft = rows.target == target, rows.target == draft
  assert (by_target | by_draft).all()
  differ = target != draft  # elsewhere the writer of a token is unknown
  assert differ.sum() > 50 and 0.25 < by_draft[differ].mean() < 0.75


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_mix_token_texts_do_not_depend_on_their_batch(pair, temperature):
  values = {"sample_source": "mix_token", "temperature": temperature, "seed": 1}
  rows = generated(pair, **values)
  np.testing.assert_array_equal(rows.target, generated(pair, rows=1, **values).target)
  # Negative control: they depend on the seed of the draws.
  assert (rows.target != generated(pair, **{**values, "seed": 9}).target).any()


def test_mixture_scores_with_the_draws_of_decoding(pair):
  rows = generated(pair, sample_source="mix_token", seed=1)
  params = {"target": pair.target_params, "draft": pair.draft_params}

  def first_choices(seed):
    mixed = mixture.mix(pair.target, pair.draft, 0.5, seed)
    source = jnp.asarray(rows.source)
    return np.asarray(mixed.score(params, source, None, rows.target).argmax(-1))

  np.testing.assert_array_equal(first_choices(1), rows.target)
  assert (first_choices(9) != rows.target).any()


def test_prompt_hash_ignores_padding():
  source = jnp.asarray([[4, 5, 1, 0], [5, 4, 1, 0]], jnp.int32)
  short, long = mixture.fingerprint(source[:, :3]), mixture.fingerprint(source)
  np.testing.assert_array_equal(short, long)
  assert short[0] != short[1]
