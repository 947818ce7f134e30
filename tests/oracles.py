"""Slow, obvious numpy versions, in float64, of what the package does fast."""

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
  """Masses of the tokens in `ids` and, last, of all others: [..., k + 1]."""
  kept = np.take_along_axis(probs, ids, -1)
  others = np.array(probs)
  np.put_along_axis(others, ids, 0.0, -1)
  return np.concatenate([kept, others.sum(-1, keepdims=True)], -1)


def kl(a, b):
  """sum a log(a / b), with 0 log 0 = 0."""
  a, b = np.where(a > 0, a, 1.0), np.where(a > 0, b, 1.0)
  return (a * np.log(a / b)).sum(-1)


def divergence(name, target, draft, beta=0.5):
  """The four divergences of two arrays of probabilities, over the last axis."""
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
