"""Slow and simple float64 numpy versions of functions of the package."""

import numpy as np


def softmax(logits):
  logits = np.asarray(logits, np.float64)
  exps = np.exp(logits - logits.max(-1, keepdims=True))
  return exps / exps.sum(-1, keepdims=True)


def truncate(logits, k):
  """Top-k of a distribution: (log_probs [..., k], ids [..., k], tail [...])."""
  probs = softmax(logits)
  ids = np.argsort(-probs, axis=-1, kind="stable")[..., :k]
  kept = np.take_along_axis(probs, ids, -1)
  others = probs.copy()
  np.put_along_axis(others, ids, 0.0, -1)
  with np.errstate(divide="ignore"):
    return np.log(kept), ids, others.sum(-1)


def bucket(probs, ids):
  """Probabilities of the tokens in `ids`, then the sum of all others: [..., k + 1]."""
  kept = np.take_along_axis(probs, ids, -1)
  others = np.array(probs)
  np.put_along_axis(others, ids, 0.0, -1)
  return np.concatenate([kept, others.sum(-1, keepdims=True)], -1)


def kl(a, b):
  """sum a log(a / b), with 0 log 0 = 0."""
  a, b = np.where(a > 0, a, 1.0), np.where(a > 0, b, 1.0)
  return (a * np.log(a / b)).sum(-1)


def divergence(name, target, draft, beta=0.5):
  """One of four divergences of two probability arrays, over the last axis."""
  mixture = beta * target + (1 - beta) * draft
  return {
    "forward_kl": lambda: kl(target, draft),
    "reverse_kl": lambda: kl(draft, target),
    "jsd": lambda: beta * kl(target, mixture) + (1 - beta) * kl(draft, mixture),
    "total_variation": lambda: np.abs(target - draft).sum(-1) / 2,
  }[name]()


class ListBuffer:
  """The replay buffer as a Python list of (serial number, row)."""

  def __init__(self, capacity):
    self.capacity, self.rows, self.added = capacity, [], 0

  def append(self, rows, weights):
    for row, weight in zip(rows, weights, strict=True):
      if weight > 0:
        self.rows.append((self.added, row, weight))
        self.added += 1
    self.rows = self.rows[-self.capacity :]

  def since(self, serial):
    return [entry for entry in self.rows if entry[0] >= serial]


def processed_probs(
  logits, temperature, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, text=()
):
  """Settings of one row in transformers' order; ties at the cut-off are kept."""
  logits = np.array(logits, np.float64)
  if not (logits.max() < np.inf and logits.max() > -np.inf):
    return np.zeros(len(logits))
  for token in set(text):
    factor = 1 / repetition_penalty if logits[token] > 0 else repetition_penalty
    logits[token] *= factor
  if temperature == 0:
    return np.eye(len(logits))[logits.argmax()]
  logits = logits / temperature
  ranked = np.sort(logits)[::-1]
  if 0 < top_k < len(ranked):
    ranked = ranked[ranked >= ranked[top_k - 1]]
  mass, count = np.cumsum(softmax(ranked)), 1
  while count < len(ranked) and (top_p == 1 or mass[count - 1] < top_p):
    count += 1
  kept = softmax(np.where(logits >= ranked[count - 1], logits, -np.inf))
  kept = np.where(kept >= min_p * kept.max(), kept, 0)
  return kept / kept.sum()


def joint_law(table, count, **settings):
  """Exact law [V] * count of the first `count` tokens of a tabular model.

  End-of-sequence (1) is always followed by padding (0).
  """
  size = len(table)
  law = np.zeros((size,) * count)

  def walk(emitted, mass):
    if len(emitted) == count:
      law[emitted] = mass
    elif 1 in emitted:
      walk((*emitted, 0), mass)
    else:
      before, last = (0, 0, *emitted)[-2:]
      row = processed_probs(table[before, last], text=(0, *emitted), **settings)
      for token in np.flatnonzero(row):
        walk((*emitted, int(token)), mass * row[token])

  walk((), 1.0)
  return law


def joint_counts(tokens, vocab_size):
  """Counts each sequence in tokens [draws, count]; returns [V] * count."""
  counts = np.zeros((vocab_size,) * tokens.shape[1])
  np.add.at(counts, tuple(np.asarray(tokens).T), 1)
  return counts


def chi_square(counts, law, smallest=5.0):
  """P-value of counts under a law; 0 if something of probability 0 occurred.

  Cells whose expected count is below `smallest` are pooled.
  """
  from scipy import stats

  counts, law = np.ravel(counts), np.ravel(law)
  if counts[law == 0].any():
    return 0.0
  expected = law * counts.sum()
  order = np.argsort(expected)
  pooled = int((expected < smallest).sum())
  # If the pool is still too small, it takes the next cells.
  while 0 < pooled < len(law) and expected[order[:pooled]].sum() < smallest:
    pooled += 1
  cells = [order[:pooled], *order[pooled:, None]] if pooled else order[:, None]
  seen = np.array([counts[cell].sum() for cell in cells])
  expects = np.array([expected[cell].sum() for cell in cells])
  if len(cells) == 1:
    return 1.0
  return stats.chi2.sf(((seen - expects) ** 2 / expects).sum(), len(cells) - 1)


def accept(drafted, target_probs, draft_probs, uniforms):
  """The rejection rule for one row: number accepted, and weights of the next token."""
  for index, (token, u) in enumerate(zip(drafted, uniforms, strict=True)):
    target, draft = target_probs[index], draft_probs[index]
    if draft[token] == 0 or u * draft[token] >= target[token]:
      return index, np.maximum(target - draft, 0)
  return len(drafted), target_probs[len(drafted)]


def write(stored, new, length):
  """Cache write: stored [B, H, T, D], new [B, H, n, D] at length [B]."""
  result = np.array(stored)
  for row, start in enumerate(length):
    for offset in range(new.shape[2]):
      result[row, :, start + offset] = new[row, :, offset]
  return result
