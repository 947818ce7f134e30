"""Agreement of draft and target: equal to enumeration, and independent of padding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import tabular_pair
from compilations import Compilations
from decoding import harness

from osd_jax import base, corpus, sharding, testing
from osd_jax.decoding import records
from osd_jax.engine import agreement, server
from osd_jax.engine.requests import DecodingConfig, Request, SamplingConfig
from osd_jax.models import families

LENGTH = 12
DECODING = DecodingConfig(
  source_lengths=(tabular_pair.SOURCE_LENGTH,), target_length=LENGTH, record_top_k=4
)


@pytest.fixture(scope="module")
def pair():
  return tabular_pair.make()


@pytest.fixture(scope="module")
def answers(pair):
  """Answers of 1 to 12 tokens."""
  sampling = SamplingConfig(temperature=1.0)
  prompts = tabular_pair.prompts(24)
  requests = [
    Request(prompt.tokens, sampling.of_request(i), max_new_tokens=1 + i % LENGTH)
    for i, prompt in enumerate(prompts)
  ]
  found = server.Server(pair, DECODING).run(requests)
  assert len({len(done.tokens) for done in found}) > 4
  return found


def test_shortest_padded_length_gives_the_same_agreement(pair, answers):
  scored_lengths = []

  def score(params, source, mask, target, **given):
    scored_lengths.append(target.shape[1])
    return pair.draft.score(params, source, mask, target, **given)

  # One answer of each length, and a model of its own, so that `score` is traced.
  for done in {len(done.tokens): done for done in answers}.values():
    draft = dataclasses.replace(pair.draft, score=score)
    short = agreement.of_answer(draft, pair.draft_params, done)
    whole = agreement.agreement(
      pair.draft, pair.draft_params, done.batch, done.settings
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), short, whole)
    least = next(n for n in (3, 6, 12) if n >= len(done.tokens))
    assert scored_lengths[-1] == least
  assert set(scored_lengths) == {3, 6, 12} == set(agreement.lengths(LENGTH))


def test_measuring_compiles_nothing_after_warm_up(pair):
  model = testing.tabular_model(tabular_pair.VOCAB_SIZE, "tabular, measured again")
  ready = server.Server(dataclasses.replace(pair, target=model, draft=model), DECODING)
  ready.warm_up(learn=True)
  prompts = tabular_pair.prompts(6)
  with Compilations() as measuring:
    for i, prompt in enumerate(prompts):
      request = Request(prompt.tokens, max_new_tokens=(1, 4, 12)[i % 3])
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
  settings = SamplingConfig(temperature=temperature, top_k=top_k).settings(LENGTH)
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


def test_server_measures_the_draft_with_its_current_shortlist(pair, answers):
  """Agreement is restricted to the tokens that the output head covers at present."""
  covered, done = np.array([1, 2, 5], np.int32), answers[0]
  with server.Server(pair, DECODING) as one:
    one.engine.shortlist = covered
    one.learn(done)
    measured = one.learner.state()[1]["schedule"]["recent"]
  overlaps = [
    agreement.of_answer(pair.draft, pair.draft_params, done, tokens)
    for tokens in (covered, None)
  ]
  expected, whole = (float(each.distribution_overlap[0]) for each in overlaps)
  assert measured == (pytest.approx(expected),) and abs(expected - whole) > 1e-3


# --- Against enumeration in float64 ---------------------------------------------------

VOCAB, LAW_LENGTH = 9, 7
# temperature, top_k, top_p
SETTINGS = (
  (0.0, 0, 1.0),
  (0.7, 0, 1.0),
  (1.0, 0, 1.0),
  (1.0, 3, 1.0),
  (1.0, 0, 0.8),
  (0.7, 4, 0.9),
  (1.6, 2, 0.5),
)
ROWS = len(SETTINGS)


def logits_of(seed, sharpness=2.0):
  rng = np.random.default_rng(seed)
  return rng.normal(0, sharpness, (ROWS, LAW_LENGTH, VOCAB)).astype(np.float32)


def batch_of(target_logits, kept):
  """Rows of 1 to LAW_LENGTH emitted tokens."""
  count = 1 + np.arange(ROWS) % LAW_LENGTH
  return base.DistillationBatch(
    source=jnp.ones((ROWS, 2), jnp.int32),
    target=jnp.ones((ROWS, LAW_LENGTH), jnp.int32),
    mask=jnp.asarray(np.arange(LAW_LENGTH) < count[:, None]),
    records=records.from_logits(jnp.asarray(target_logits), kept),
    weight=jnp.ones(ROWS, jnp.float32),
  )


def enumerated(target_logits, draft_logits, batch, processed):
  """Mean over a row's positions of sum_x min(target, draft), in float64."""
  found = np.zeros(ROWS)
  for row, (temperature, top_k, top_p) in enumerate(SETTINGS):
    if not processed:
      temperature, top_k, top_p = 1.0, 0, 1.0
    values = [
      np.minimum(
        oracles.processed_probs(target, temperature, top_k, top_p),
        oracles.processed_probs(draft, temperature, top_k, top_p),
      ).sum()
      for target, draft in zip(target_logits[row], draft_logits[row], strict=True)
    ]
    found[row] = np.mean(np.asarray(values)[np.asarray(batch.mask)[row]])
  return found


def measured(draft_logits, batch):
  temperature, top_k, top_p = zip(*SETTINGS, strict=True)
  filters = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
  settings = harness.settings_of(ROWS, max_length=LAW_LENGTH, **filters)
  return agreement.agreement_from_logits(jnp.asarray(draft_logits), batch, settings)


def test_full_rows_equal_enumeration():
  target, draft = logits_of(0), logits_of(1)
  batch = batch_of(target, VOCAB)
  found = measured(draft, batch)
  overlap = enumerated(target, draft, batch, processed=False)
  np.testing.assert_allclose(found.distribution_overlap, overlap, atol=1e-5)
  np.testing.assert_allclose(found.distribution_overlap_upper, overlap, atol=1e-5)
  accepted = enumerated(target, draft, batch, processed=True)
  np.testing.assert_allclose(found.acceptance_rate, accepted, atol=1e-5)
  assert np.ptp(accepted - overlap) > 0.05  # the two figures differ


@pytest.mark.parametrize("kept", [1, 3, 6])
def test_truncated_rows_bracket_the_overlap(kept):
  target, draft = logits_of(2, 1.0), logits_of(3, 1.0)
  batch = batch_of(target, kept)
  found = measured(draft, batch)
  overlap = enumerated(target, draft, batch, processed=False)
  assert (np.asarray(found.distribution_overlap) <= overlap + 1e-6).all()
  assert (np.asarray(found.distribution_overlap_upper) >= overlap - 1e-6).all()
  width = found.distribution_overlap_upper - found.distribution_overlap
  assert (np.asarray(width) > 1e-3).all()


def test_truncated_rows_are_exact_if_top_k_fits_the_records():
  """A draft whose top-k lies outside the kept tokens must not get a high overlap."""
  target, draft = logits_of(4), logits_of(5)
  draft[0] = -target[0]
  draft[3] = -target[3]
  batch = batch_of(target, 4)
  accepted = enumerated(target, draft, batch, processed=True)
  exact = [0, 3, 5, 6]  # greedy, or top_k <= 4
  np.testing.assert_allclose(
    np.asarray(measured(draft, batch).acceptance_rate)[exact],
    accepted[exact],
    atol=1e-5,
  )
  assert accepted[3] < 0.1


FULL = DecodingConfig(
  rows=3,
  source_lengths=(tabular_pair.SOURCE_LENGTH,),
  target_length=tabular_pair.TARGET_LENGTH,
  record_top_k=tabular_pair.VOCAB_SIZE,
)


@pytest.fixture(scope="module")
def sampled(pair):
  server = corpus.plain_server(pair, FULL, sharding.PartitionConfig())
  sampling = SamplingConfig(temperature=1.0)
  return server.run(corpus.requests(tabular_pair.prompts(7), sampling))


@pytest.mark.parametrize("rows", [3, 16])
def test_mean_agreement_is_the_mean_overlap_of_requests(pair, sampled, rows):
  """Against the formula, written in numpy."""
  overlaps = {0: [], 1: []}
  tables = [
    np.asarray(jax.nn.softmax(table, axis=-1), np.float64)
    for table in (pair.target_params, pair.draft_params)
  ]
  for done in sampled:
    fed = [0, *done.tokens.tolist()[:-1]]
    before = [0, *fed[:-1]]
    overlap = np.minimum(tables[0][before, fed], tables[1][before, fed]).sum(-1)
    overlaps[done.request.tag].append(overlap.mean())
  found = agreement.mean_agreement(pair.draft, pair.draft_params, sampled, rows)
  assert [found[task]["requests"] for task in (0, 1)] == [4, 3]
  for task, values in overlaps.items():
    assert found[task]["distribution_overlap"] == pytest.approx(
      np.mean(values), abs=1e-5
    )
