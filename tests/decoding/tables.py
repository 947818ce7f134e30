"""Drafters of every kind for a target that is a table of logits.

The matrices in test_equals_plain.py and test_law.py run over `CASES`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from decoding import harness

from osd_jax import base, testing
from osd_jax.decoding import drafters, mixed, ngrams, rounds

VOCAB, K, SIZE = 6, 3, 1 << 12
MODEL = testing.tabular_model(VOCAB)
TARGET = testing.random_table(VOCAB, 1, sharpness=1.5)
DRAFT = testing.random_table(VOCAB, 2, sharpness=1.5)
SOURCE = jnp.full((1, 1), 3, jnp.int32)  # tabular models ignore it
WIDTHS = (1, 3, 7, 16)
CHEAP, FAIR, DEAR = (np.full(16, price, np.float32) for price in (1e-6, 0.3, 3.0))
# One row with a price of .3 and a thousand rows with one of 300 stop alike.
TOO_DEAR = np.full(16, 6_000, np.float32)
RUN = jax.jit(rounds.run_rounds, static_argnums=(0, 1), compiler_options=harness.QUICK)


@dataclasses.dataclass(frozen=True)
class Varying(drafters.ModelDrafter):
  """Proposes a number of tokens that depends on the row and its position."""

  def propose(self, params, state, rows, num_draft_tokens, noise):
    proposal, state = super().propose(params, state, rows, num_draft_tokens, noise)
    row = jnp.arange(rows.length.shape[0])
    lengths = (row + rows.length) % (num_draft_tokens + 1)
    # The proposal still holds K tokens. Those after a row's length would often be
    # accepted if the lengths were ignored.
    return proposal.replace(lengths=lengths.astype(jnp.int32)), state


@dataclasses.dataclass(frozen=True)
class Guessing(drafters.ModelDrafter):
  """Proposes each model's arg max without logits, as a lookup drafter would."""

  def propose(self, params, state, rows, num_draft_tokens, noise):
    cold = jnp.zeros_like(rows.length, jnp.float32)
    greedy = rows.replace(settings=rows.settings.replace(temperature=cold))
    proposal, state = super().propose(params, state, greedy, num_draft_tokens, noise)
    return base.Proposal(proposal.tokens, None), state


MIXTURE = mixed.Mixture(MODEL, target=MODEL, size=SIZE)
CACHE = mixed.drafter(ngrams.build(MODEL, SIZE), False, MODEL, 0)
ABSORB = jax.jit(
  lambda drafter, *args: drafter.absorb(*args),
  static_argnums=0,
  compiler_options=harness.QUICK,
)


def decoded(
  drafter,
  served,
  settings,
  length,
  rule="rejection",
  k=K,
  prices=None,
  run=RUN,
  widths=WIDTHS,
):
  """The final state of rows that are drafted for in blocks of K or by price."""
  if prices is None:
    widths = ()
  else:
    k, prices = widths[-1], prices[: widths[-1]]
  source = jnp.tile(SOURCE, (settings.seed.shape[0], 1))
  rows = MODEL, jnp.asarray(TARGET), source, source > 0, settings, length
  return harness.drafted_by(
    drafter, served, k, *rows, prices=prices, run=run, rule=rule, widths=widths
  )


def absorbed(drafter, memory, state, row=0):
  """The memory after one row of a final state."""
  one = jax.tree.map(lambda leaf: leaf[row : row + 1], state.draft_cache)
  return ABSORB(drafter, memory, one, SOURCE, state.tokens[row], state.length[row])


def remembering(drafter, draft, answers=0, preferred=None):
  """A mixture or cache after some greedy answers of 40 tokens.

  `preferred` "cache" or "draft" makes the scores of that source perfect.
  """
  memory = drafter.memory()
  draft = None if drafter is CACHE else jnp.asarray(draft)
  for _ in range(answers):
    settings = harness.settings_of(1, max_length=40)
    final = decoded(drafter, drafter.with_memory(draft, memory), settings, 40)
    memory = absorbed(drafter, memory, final)
  if preferred is not None:
    index = np.arange(mixed.BINS + 1)
    of_cache = (index >= mixed.DRAFT_BINS) & (index < mixed.SAMPLED_BINS)
    right = of_cache if preferred == "cache" else ~of_cache
    memory = memory.replace(right=memory.scored * right)
  return drafter.with_memory(draft, memory)


class Case(NamedTuple):
  """A drafter, what it is given for a table of its draft, and the price of tokens."""

  drafter: drafters.ModelDrafter
  served: Callable[[Any], Any] = jnp.asarray
  prices: np.ndarray | None = None


def mixture(prices=None, drafter=MIXTURE, answers=2, preferred=None):
  memory = functools.partial(
    remembering,
    drafter if drafter is CACHE else MIXTURE,
    answers=answers,
    preferred=preferred,
  )
  return Case(drafter, memory, prices)


CASES = {
  "model": Case(drafters.ModelDrafter(MODEL)),
  "lengths vary": Case(Varying(MODEL)),
  "no logits": Case(Guessing(MODEL)),
  "empty cache": mixture(drafter=CACHE, answers=0),
  "cache": mixture(drafter=CACHE),
  "mixture": mixture(),
  "mixture, by the cache": mixture(preferred="cache"),
  "mixture, by the draft": mixture(preferred="draft"),
  "mixture, cheap": mixture(CHEAP),
  "mixture, fair": mixture(FAIR),
  "mixture, dear": mixture(DEAR),
  "mixture, too dear": mixture(TOO_DEAR),
  "draft rests, cheap": mixture(CHEAP, MIXTURE.resting()),
  "draft rests, too dear": mixture(TOO_DEAR, MIXTURE.resting()),
}
