"""Which tokens does distillation teach (figure 7)? And alpha before and after.

The hundred most frequent tokens of each topic, on held-out prompts.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from setting import Answers, Cell, Setting, held_out, key_of

from osd_jax import base

COUNT = 100


def frequent(setting: Setting) -> Answers:
  """Yields a cell for each topic, of the first draft and of the distilled one."""
  drafts = {"first draft": setting.pair.draft_params, "distilled": setting.ceiling}
  for name, params in drafts.items():
    if params is None:  # this pair has no distilled draft
      continue
    alphas = functools.cache(functools.partial(held_out, setting, params))
    for topic, label in enumerate(setting.held_out.names):
      key = key_of(setting, "frequent", label, name, 0)

      def compute(params=params, topic=topic, alphas=alphas) -> Cell:
        places = setting.held_out.of_topic(topic)
        answers = setting.held_out.answers(places)
        right, proposals = predictions(setting.pair.draft, params, answers)
        return {"overlap": round(alphas()[topic], 4)} | figures(right, proposals)

      yield key, compute


def predictions(
  draft: base.Model, params: base.Params, answers: list[base.DistillationBatch]
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the tokens of all answers and the draft's predictions of them."""
  pairs = []
  for row in answers:
    tokens = jax.device_get(_named(draft, params, row))[0]
    mask = np.asarray(row.mask[0])
    pairs.append((np.asarray(row.target[0])[mask], tokens[mask]))
  right, tokens = (np.concatenate(part) for part in zip(*pairs, strict=True))
  return right, tokens


@functools.partial(jax.jit, static_argnums=0)
def _named(
  draft: base.Model, params: base.Params, row: base.DistillationBatch
) -> jax.Array:
  arguments = (params, row.source, draft.mask(row.source), row.target)
  return jnp.argmax(draft.score(*arguments, **draft.score_inputs(row)), axis=-1)


def figures(right: np.ndarray, named: np.ndarray, count: int = COUNT) -> Cell:
  """Returns share, recall and precision of the most frequent tokens.

  >>> figures(np.array([1, 1, 2, 3]), np.array([1, 2, 2, 1]), count=1)
  {'share': 0.5, 'recall': 0.5, 'precision': 0.5, 'recall_of_others': 0.5}

  Args:
    right: [N] the target's tokens.
    named: [N] the draft's.
    count: how many tokens are called frequent.
  """
  tokens, counts = np.unique(right, return_counts=True)
  frequent_tokens = tokens[np.argsort(-counts, kind="stable")[:count]]
  often, proposals = np.isin(right, frequent_tokens), np.isin(named, frequent_tokens)
  agree = right == named
  shares = {
    "share": often.mean(),
    "recall": agree[often].mean(),
    "precision": agree[proposals].mean() if proposals.any() else 0.0,
    "recall_of_others": agree[~often].mean() if not often.all() else 0.0,
  }
  return {name: round(float(value), 4) for name, value in shares.items()}
