"""Outputs equal plain decoding: greedy ones always, sampled ones if coupled.

One matrix runs over all drafters and rules, and one over the families of models.
tests/engine and tests/test_sharding.py add the engine's scheduling and meshes.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import harness, tables

from osd_jax import testing
from osd_jax.decoding import accept as accept_lib

LENGTH = 40
LIMITS = (40, 1, 9, 40, 33, 39)
SAMPLED = {
  "temperature": (0.3, 0.7, 1.0, 1.5, 0.0, 1.0),
  "top_k": (0, 0, 0, 3, 0, 4),
  "top_p": (1.0, 1.0, 0.8, 1.0, 1.0, 0.9),
  "min_p": (0.0, 0.1, 0.0, 0.0, 0.0, 0.0),
}
PENALTIES = (1.0, 1.2, 2.0, 0.6, 5.0, 0.7)
DRAFTS = {
  "target": tables.TARGET,
  "other": tables.DRAFT,
  "nan": np.full_like(tables.TARGET, np.nan),
}


def by_row(*arguments):
  """Rejection in the first half of the rows, and the block rule in the second."""
  rules = (accept_lib.RULES[name].accept for name in ("rejection", "block"))
  both = (rule(*arguments) for rule in rules)
  half = len(arguments[-1]) // 2
  return jax.tree.map(lambda a, b: jnp.concatenate([a[:half], b[half:]]), *both)


# One program tests two rules.
BY_ROW = accept_lib.Rule(by_row, exact=True, noise_per_round=True)


def settings_of(rows, rule, **more):
  """Rows with their own limits and penalties, sampled under the coupling rule."""
  columns = {"max_length": LIMITS, "repetition_penalty": PENALTIES, **more}
  if accept_lib.resolve(rule).coupled:
    columns |= SAMPLED
  return harness.settings_of(
    rows, **{name: np.resize(column, rows) for name, column in columns.items()}
  )


@functools.cache
def plain(rows, rule):
  settings = settings_of(rows, rule)
  return harness.outputs(
    harness.tabular_steps(tables.TARGET, settings, LENGTH, rule=rule)
  )


@functools.cache
def served(name, draft):
  return tables.CASES[name].served(DRAFTS[draft])


@pytest.mark.parametrize(
  ("name", "rule", "k", "rows"),
  [
    *((name, BY_ROW, 3, 12) for name in tables.CASES),
    *((name, "coupling", 3, 6) for name in tables.CASES),
    *((name, "coupling", 8, 1) for name in ("model", "cache")),
  ],
  ids=lambda value: "by row" if value is BY_ROW else None,
)
def test_tables_equal_plain_decoding_with_any_drafter(name, rule, k, rows):
  case, settings = tables.CASES[name], settings_of(rows, rule)
  for draft in DRAFTS:
    found = tables.decoded(
      case.drafter, served(name, draft), settings, LENGTH, rule, k, case.prices
    )
    assert harness.outputs(found) == plain(rows, rule), draft


def test_rejection_rule_emits_other_sampled_tokens_than_plain_decoding():
  """Negative control: the coupling rule is what makes sampled outputs equal."""
  settings, case = settings_of(6, "coupling"), tables.CASES["model"]
  found = tables.decoded(case.drafter, tables.DRAFT, settings, LENGTH)
  assert harness.outputs(found) != plain(6, "coupling")


@pytest.mark.parametrize("rule", ["rejection", "coupling"])
@pytest.mark.parametrize("family", harness.FAMILIES)
def test_models_equal_plain_decoding_with_any_batch(family, rule):
  """The draft has the penalty as well, so that many of its tokens are accepted."""
  target, _ = harness.FAMILIES[family]
  params = harness.lively_params(target)
  source, mask = testing.random_sources(5, 7, target.vocab_size, 0, target.pad_id)
  params, draft = map(target.prepare, (params, harness.perturbed(params, 0.03)))
  settings = settings_of(5, rule, max_length=16)
  plain = harness.plain(target, params, source, mask, settings, 16)
  for rows in (5, 1) if rule == "coupling" else (5,):
    found = harness.speculate(
      *(target, target, 3, params, draft, source[:rows], mask[:rows]),
      *(harness.take(settings, range(rows)), 16),
      rule=rule,
    )
    assert harness.outputs(found) == harness.outputs(plain)[:rows]
    assert rows == 1 or 0.2 < harness.draft_acceptance(found) < 1
