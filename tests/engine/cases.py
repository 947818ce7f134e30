"""Requests, engines and expected outputs that the engine tests share.

Everything runs on `harness.READER`, a tabular model whose outputs depend on the prompt.
`test_families.py` runs T5 and Llama.
"""

import dataclasses
import functools
import itertools
import operator

import jax
import numpy as np
from decoding import harness

from osd_jax import testing
from osd_jax.base import EOS_ID
from osd_jax.decoding import drafters
from osd_jax.engine import controller, engine
from osd_jax.engine.requests import DecodingConfig, Request, SamplingConfig

VOCAB, LENGTH, K = harness.READER_VOCAB, 12, 3
BUCKETS = (6, 10)
LIMITS = (None, 1, 7, None, 3, 12, None, 5, 2)
TARGET = harness.READER
target_params = draft_params = harness.reader_params  # target, same, close, far


def config_of(rows, **changes):
  config = DecodingConfig(
    rows=rows,
    num_draft_tokens=K,
    source_lengths=BUCKETS,
    target_length=LENGTH,
    record_top_k=VOCAB,
    max_rounds=2,
  )
  return dataclasses.replace(config, **changes)


@functools.cache
def decoder(rows, kind="close"):
  """A shared engine; it is empty again after each use."""
  return engine.Engine(
    config_of(rows), TARGET, target_params(), TARGET, draft_params(kind)
  )


class Scheduled(controller.Controller):
  """Follows a cycle of Ks, negative for probes; notes what its engine reports.

  Attributes:
    turns: K of every call.
    reported: (chunks, prefills) that a call that drafts was said to need.
    needed: the same chunks, computed from the state of the rows.
    charged: prefills of the draft when a request was inserted.
    late: numbers of the requests whose draft was prefilled later.
    results: what `observe` received.
  """

  def __init__(self, decoder, cycle):
    """Replaces the controller of an engine."""
    self._decoder, self._cycle = decoder, cycle
    self._has_widths = bool(decoder.spec.widths)
    super().__init__(decoder.config, True, by_survival=self._has_widths)
    decoder.controller = self

  def reset(self):
    super().reset()
    self._turns = itertools.cycle(self._cycle)
    self.turns, self.reported, self.needed, self.results = [], [], [], []
    self.charged, self.late = 0, []

  def charge_prefill(self, bucket):
    del bucket
    self.charged += 1

  def choose(self, bucket, is_sampled, rows, chunks, prefills, undrafted=()):
    del bucket, is_sampled, undrafted
    k = next(self._turns)
    self.turns.append(k)
    self.state = dataclasses.replace(self.state, num_draft_tokens=abs(k), probing=k < 0)
    if k:
      self.reported.append((chunks, prefills))
      self.needed.append(self._chunks(rows))
      self.late += [s["number"] for s in self._slots() if s and s["lacks_draft"]]
    prices = np.full(max(self.candidates), 0.1, np.float32)
    by_cache = self._has_widths and not k
    k = max(self.candidates) if by_cache else abs(k)
    return controller.Choice(k, 2, prices if self._has_widths else None, by_cache)

  def observe(self, result):
    self.results.append(result)

  def _slots(self):
    return self._decoder.state()[1]["slots"]

  def _chunks(self, rows):
    """Chunks until the draft has read as much as it would have by drafting always."""
    state, drafter = self._decoder.state()[0]["rows"], self._decoder.spec.drafter
    lacks = np.asarray([self._slots()[row]["lacks_draft"] for row in rows])
    length, fed = (
      np.asarray(counts)[list(rows)]
      for counts in (state.length, drafter.fed(state.draft_cache))
    )
    lag = length - 1 - fed * ~lacks  # the newest token is never fed
    return max(-(-int(np.max(lag)) // drafters.CHUNK), 0)


def prompts(count=9, seed=0):
  """Prompts of different lengths, some for each of the two buckets."""
  source, mask = testing.random_sources(count, BUCKETS[-1], VOCAB, seed, TARGET.pad_id)
  return [row[keep] for row, keep in zip(source, mask, strict=True)]


def greedy_requests(seed=0):
  return [
    Request(tokens, max_new_tokens=limit, tag=index)
    for index, (tokens, limit) in enumerate(
      zip(prompts(seed=seed), LIMITS, strict=True)
    )
  ]


_score = jax.jit(lambda model, *args: model.score(*args), static_argnums=0)


def score(tokens, written):
  """Teacher-forced logits [T, V] of the target for one prompt, without a cache."""
  source = np.full((1, BUCKETS[-1]), TARGET.pad_id, np.int32)
  source[0, : len(tokens)] = tokens
  target = np.zeros((1, LENGTH), np.int32)
  target[0, : len(written)] = written
  return np.asarray(
    _score(TARGET, target_params(), source, TARGET.mask(source), target)
  )[0]


@functools.cache
def expected(seed=0):
  """Greedy outputs of the target, from one whole forward pass per token."""
  found = []
  for request in greedy_requests(seed):
    written = []
    while len(written) < (request.max_new_tokens or LENGTH) and EOS_ID not in written:
      written.append(int(score(request.tokens, written)[len(written)].argmax()))
    found.append(written)
  return found


def texts(finished):
  return [done.tokens.tolist() for done in finished]


def by_tag(finished):
  return texts(sorted(finished, key=lambda done: done.request.tag))


def drained(decoder_):
  found = []
  while decoder_.in_flight:
    found += decoder_.step()
  return found


def check_records(done):
  """Checks the mask, the tokens and the recorded distributions of an answer."""
  count = len(done.tokens)
  source = np.asarray(done.batch.source)[0]
  assert source[: len(done.request.tokens)].tolist() == done.request.tokens.tolist()
  assert (source[len(done.request.tokens) :] == TARGET.pad_id).all()
  target = np.asarray(done.batch.target)[0]
  assert target[:count].tolist() == done.tokens.tolist()
  assert (target[count:] == TARGET.pad_id).all()
  assert np.asarray(done.batch.mask)[0].tolist() == [t < count for t in range(LENGTH)]
  logits = score(done.request.tokens, done.tokens)[:count]
  log_probs = np.asarray(jax.nn.log_softmax(logits))
  records = jax.tree.map(lambda leaf: np.asarray(leaf)[0], done.batch.records)
  records = jax.tree.map(operator.itemgetter(slice(count)), records)
  kept = np.take_along_axis(log_probs, records.ids.astype(int), axis=-1)
  np.testing.assert_allclose(records.log_probs, kept, atol=2e-4)
  np.testing.assert_array_equal(
    np.sort(records.ids), np.broadcast_to(np.arange(VOCAB), records.ids.shape)
  )
  np.testing.assert_allclose(records.tail, 0, atol=1e-6)


def sampled_requests(count=12):
  return [
    Request(
      np.array([3, EOS_ID], np.int32),
      SamplingConfig(
        temperature=(0.0, 0.7, 1.0)[i % 3],
        top_k=(0, 3)[i % 2],
        top_p=0.9,
        min_p=(0.0, 0.1)[i % 2],
        repetition_penalty=(1.0, 1.3, 1.0, 0.8)[i % 4],
        seed=i,
      ),
      max_new_tokens=LIMITS[i % len(LIMITS)],
    )
    for i in range(count)
  ]
