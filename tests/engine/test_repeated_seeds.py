"""A request that comes again with its seed has the target's law, in every turn.

The n-gram cache holds the first answer by then, and a draft may have learned it. Both
depend on the noise that drew it, so the next turn must not draw with this noise again.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from osd_jax import base, testing
from osd_jax.costs.table import RoundCosts
from osd_jax.decoding import ngrams, sampling
from osd_jax.engine import engine
from osd_jax.engine.requests import (
  AdaptiveConfig,
  DecodingConfig,
  Request,
  SamplingConfig,
)

VOCAB, LENGTH, TURNS, SHIFT = 6, 3, 4, 3
MODEL = testing.tabular_model(VOCAB, reads_source=True)
TABLE = testing.random_table(VOCAB, 1, sharpness=1.5)
CLOSE = TABLE + 0.7 * np.random.default_rng(2).normal(size=TABLE.shape)
LAW = oracles.joint_law(np.roll(TABLE, -SHIFT, axis=0), 2, temperature=1.0)
RULES = ("rejection", "block", "coupling")
DRAWS, LEARNED_DRAWS = 768, 384  # per turn
THRESHOLD = 1e-6 / 100  # more p-values than this file computes
COSTS = RoundCosts(((((1.0, 1.2, 1.5),),), (((1.0, 1.05, 1.2),),)))


def make_engine(rule, drafter, rows=64):
  adaptive = None
  if drafter == "adaptive mixture":
    adaptive = AdaptiveConfig(candidates=(0, 1, 2), costs=(COSTS,))
  config = DecodingConfig(
    rows=rows,
    num_draft_tokens=2,
    acceptance_rule=rule,
    source_lengths=(12,),
    target_length=LENGTH,
    record_top_k=0,
    adaptive=adaptive,
    cache_tokens=0 if drafter == "learned" else 2**16,
  )
  draft, params = MODEL, jnp.asarray(CLOSE)
  if drafter == "cache":
    draft = ngrams.build(MODEL, config.cache_tokens)
    params = draft.init(jax.random.key(0))
  return engine.Engine(config, MODEL, jnp.asarray(TABLE), draft, params)


def requests(count):
  """Different prompts with one law: their tokens add up to SHIFT."""
  rng, prompts = np.random.default_rng(0), set()
  while len(prompts) < count:
    prompt = (*rng.integers(2, VOCAB, size=9).tolist(), base.EOS_ID)
    if sum(prompt) % VOCAB == SHIFT:
      prompts.add(prompt)
  return [
    Request(np.array(prompt, np.int32), SamplingConfig(temperature=1.0, seed=seed))
    for seed, prompt in enumerate(sorted(prompts))
  ]


def p_value(answers):
  tokens = np.array([done.tokens[:2] for done in answers])
  return oracles.chi_square(oracles.joint_counts(tokens, VOCAB), LAW)


def learned_from(answer):
  """A draft that repeats an answer."""
  table = np.zeros_like(TABLE)
  for before, last, token in zip((0, 0, *answer), (0, *answer), answer):
    table[(before + SHIFT) % VOCAB, last, token] = 4.0
  return jnp.asarray(table)


def p_values(rule, drafter):
  """P-values of the first turn and of all later ones, which repeat its seeds."""
  first, *later = served_turns(rule, drafter)
  if rule == "coupling":  # all turns are equal
    return [p_value(answers) for answers in (first, *later)]
  return [p_value(first), p_value([done for answers in later for done in answers])]


def served_turns(rule, drafter):
  """The answers of each turn."""
  if drafter != "learned":
    serving, asked = make_engine(rule, drafter), requests(DRAWS)
    return [serving.run(asked) for _ in range(TURNS)]
  serving, versions, turns = make_engine(rule, drafter, 1), itertools.count(1), []
  for request in requests(LEARNED_DRAWS):
    serving.swap(jnp.asarray(CLOSE), next(versions))
    answers = []
    for _ in range(TURNS):
      answers += serving.run([request])
      serving.swap(learned_from(answers[-1].tokens), next(versions))
    turns.append(answers)
  return list(zip(*turns, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["cache", "adaptive mixture", "learned"])
@pytest.mark.parametrize("rule", RULES)
def test_same_seeds_again_have_the_law_of_the_target(rule, drafter):
  values = p_values(rule, drafter)
  assert min(values) > THRESHOLD, values


@pytest.mark.slow
@pytest.mark.parametrize(
  ("rule", "drafter"),
  [("rejection", "cache"), ("block", "cache"), ("rejection", "learned")],
)
def test_noise_of_the_seed_alone_loses_the_law(monkeypatch, rule, drafter):
  """Control: without the request's number, the second turn is biased."""
  monkeypatch.setattr(sampling, "numbered_seed", lambda seed, number: seed)
  first, later = p_values(rule, drafter)
  assert first > THRESHOLD
  assert later < THRESHOLD, later


def test_numbers_give_a_seed_different_seeds():
  seeds = {sampling.numbered_seed(2**32 - 5, number) for number in range(100_000)}
  assert len(seeds) == 100_000
  assert max(seeds) < 2**32


@pytest.mark.parametrize("rule", RULES)
def test_frozen_draft_without_cache_repeats_a_sample(rule):
  serving, asked = make_engine(rule, "learned"), requests(64)
  first, second = ([done.tokens.tolist() for done in serving.run(asked)] for _ in "12")
  assert first == second


def test_rows_in_flight_at_the_first_swap_draw_with_new_noise():
  """The new draft may have learned an answer that had the seed of a row in flight."""
  draft = jnp.asarray(CLOSE)
  answers = []
  for version in (None, 1):
    serving = make_engine("rejection", "learned")
    for request in requests(64):
      serving.submit(request)
    serving.config = dataclasses.replace(serving.config, max_rounds=1)
    finished = serving.step()
    if version is not None:
      serving.swap(draft, version)
    while serving.in_flight:
      finished += serving.step()
    answers.append({done.number: done.tokens.tolist() for done in finished})
  assert answers[0].keys() == answers[1].keys()
  assert answers[0] != answers[1]


def test_plain_rows_keep_the_noise_of_their_seed():
  serving = make_engine("rejection", "mixture")
  asked = [dataclasses.replace(one, speculative=False) for one in requests(64)]
  first, second = ([done.tokens.tolist() for done in serving.run(asked)] for _ in "12")
  assert first == second
