"""The n-gram cache: what a lookup names, and decoding with it as the draft."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import harness, tables

from osd_jax import testing
from osd_jax.decoding import ngrams

VOCAB = 6
TARGET = testing.tabular_model(VOCAB)
INSERT, LOOK_UP = jax.jit(ngrams.insert), jax.jit(ngrams.look_up)
ABSORB = jax.jit(ngrams.absorb, static_argnums=0)


def padded(tokens, length, front=False):
  fill = [ngrams.NO_TOKEN] * (length - len(tokens))
  return np.asarray(fill + list(tokens) if front else list(tokens) + fill, np.int32)


def table_of(texts, size=1 << 18, salts=None):
  """A table that has absorbed (context, answer) pairs."""
  table = ngrams.empty(size)
  for number, (context, answer) in enumerate(texts):
    context = padded(context, ngrams.CONTEXT, front=True)
    answer, length = np.maximum(padded(answer, 32), 0), np.int32(len(answer))
    salt = ngrams.NO_SALT if salts is None else np.asarray(salts[number], np.uint32)
    table = INSERT(table, context, answer, length, salt)
  return table


def look_up(table, text, salt=ngrams.NO_SALT):
  """The vote after one text: (token, order, votes, total)."""
  ends = np.asarray([[len(text)]], np.int32)
  vote = LOOK_UP(table, padded(text, 48)[None], ends, np.asarray(salt)[None])
  return tuple(int(x[0, 0]) for x in jax.tree.leaves(vote))


def candidates(texts, text, order):
  """Tokens after the last `order` tokens of `text` in every text, the newest last."""

  def after(before, tokens):
    whole = [*before, *tokens]
    return [
      whole[at]
      for at in range(max(order, len(before)), len(whole))
      if whole[at - order : at] == text[-order:]
    ]

  served = [token for pair in texts for token in after(*pair)]
  return served[-ngrams.WAYS :] + after([], text)[-ngrams.WAYS :]


def expected(texts, text):
  """(order, candidates) of the longest context with a match."""
  for order in reversed(ngrams.ORDERS):
    if order <= len(text):
      found = candidates(texts, text, order)
      if found:
        return order, collections.Counter(found)
  return 0, collections.Counter()


SALTS = [(0, 0), (5, 7), (5, 8), (6, 7)]  # some share one half


def test_each_salt_finds_what_it_would_find_alone():
  rng = np.random.default_rng(2)
  texts = [(random_text(rng, 0, 9), random_text(rng, 1, 30)) for _ in range(20)]
  salts = [SALTS[rng.integers(len(SALTS))] for _ in texts]
  together, differs = table_of(texts, salts=salts), 0
  for _ in range(20):
    text = random_text(rng, 1, 40)
    for salt in SALTS:
      theirs = [pair for pair, name in zip(texts, salts, strict=True) if name == salt]
      found = look_up(together, text, np.asarray(salt, np.uint32))
      longest, counts = expected(theirs, text)
      assert found[1] == longest and counts[found[0]] == found[2]
      assert found[3] == counts.total()
      differs += found[:2] != look_up(table_of(texts), text)[:2]
  assert differs  # control: in a shared table they find more


def test_colliding_hashes_of_salts_are_never_named():
  """Few buckets: the entries of one salt are candidates of the other's lookups."""
  other, text = np.asarray([1, 2], np.uint32), [1, 2]
  table = table_of([([], [1, 2, 3, 4, 5])], 256, [tuple(other)])
  assert look_up(table, text, other)[:2] == (3, 2)
  window = jnp.asarray(padded(text, ngrams.CONTEXT, front=True))
  salts = np.stack([np.arange(500), np.arange(500) % 7], axis=1).astype(np.uint32)
  hashed = functools.partial(ngrams._bucket, order=2, buckets=table.counts.shape[1])
  found = hashed(jnp.tile(window, (500, 1)), salt=salts)
  is_same = np.array(found == hashed(window, salt=other))
  is_same &= np.any(salts != other, axis=1)
  assert is_same.sum() > 3  # of 64 buckets
  for salt in salts[is_same]:
    assert look_up(table, text, salt)[1] == 0


def test_salt_does_not_push_out_the_same_ngram_of_another():
  """Otherwise a slow answer would tell that somebody else asked the same."""
  mine, other = (4, 4), (9, 9)
  texts = [([], [1, 2])] + [([], [1, 3])] * 3 * ngrams.WAYS
  shared = look_up(table_of(texts), [1])
  apart = table_of(texts, salts=[mine] + [other] * 3 * ngrams.WAYS)
  assert shared == (3, 1, ngrams.WAYS, ngrams.WAYS)
  assert look_up(apart, [1], np.asarray(mine, np.uint32)) == (2, 1, 1, 1)


def test_own_prompt_is_looked_up_whatever_the_salt():
  salt = np.asarray([3, 4], np.uint32)
  assert look_up(ngrams.empty(256), [3, 4, 5, 1, 3, 4], salt)[:2] == (5, 2)


def random_text(rng, least, most):
  return rng.integers(0, VOCAB, rng.integers(least, most)).tolist()


def test_lookup_equals_a_search_through_all_texts():
  rng = np.random.default_rng(0)
  texts, checked = [], collections.Counter()
  for _ in range(12):
    texts.append((random_text(rng, 0, 9), random_text(rng, 1, 30)))
    table = table_of(texts)
    for _ in range(4):
      text = random_text(rng, 1, 40)
      token, order, votes, total = look_up(table, text)
      longest, counts = expected(texts, text)
      assert order == longest
      if longest:
        assert total == counts.total() and votes == max(counts.values())
        assert counts[token] == votes
      checked[order] += 1
  assert len(checked) > 3  # several orders were met


def test_text_of_one_repeated_token_writes_every_place_once():
  table = table_of([([], [2] * 32)])
  places = np.unique(np.asarray(table.places))
  assert set(range(ngrams.CONTEXT + 28, ngrams.CONTEXT + 32)) <= set(places.tolist())
  assert look_up(table, [2] * 20) == (2, 8, 8, 8)


def test_colliding_and_overwritten_ngrams_are_never_named():
  """A table of 256 tokens and few buckets sees 6,000: every vote has a witness."""
  rng = np.random.default_rng(1)
  texts, named = [], 0
  table = ngrams.empty(256)
  for _ in range(300):
    texts.append((random_text(rng, 0, 9), random_text(rng, 1, 30)))
    context = padded(texts[-1][0], ngrams.CONTEXT, front=True)
    answer = padded(texts[-1][1], 32)
    table = INSERT(table, context, np.maximum(answer, 0), np.int32(len(texts[-1][1])))
    text = random_text(rng, 1, 20)
    token, order, *_ = look_up(table, text)
    if order:
      named += 1
      recent = texts[-40:]  # more than the ring can hold
      assert token in candidates_anywhere(recent, text, order)
  assert named > 250


def candidates_anywhere(texts, text, order):
  found = set(candidates([], text, order))
  for pair in texts:
    found |= set(candidates([pair], [-2, *text], order))
    whole = [*pair[0], *pair[1]]
    found |= {
      whole[at]
      for at in range(order, len(whole))
      if whole[at - order : at] == text[-order:]
    }
  return found


def with_answers(model, answers, source):
  table = model.init(jax.random.key(0))
  for answer in answers:
    length = np.int32(len(answer))
    answer = np.maximum(padded(answer, 64), 0)
    table = ABSORB(TARGET, table, source, answer, length)
  return table


@pytest.mark.parametrize("k", [1, 8])
def test_answers_that_were_seen_are_drafted_whole(k):
  served = tables.remembering(tables.CACHE, None, 1)
  settings = harness.settings_of(1, max_length=40)
  final = tables.decoded(tables.CACHE, served, settings, 40, k=k)
  assert int(final.counters.rounds[0]) == -(-40 // (k + 1))


def test_teacher_forcing_names_the_same_tokens_as_decoding():
  model = ngrams.build(TARGET, 1 << 12)
  source, mask = map(jnp.asarray, testing.random_sources(2, 9, VOCAB, seed=3))
  answers = np.random.default_rng(4).integers(2, VOCAB, (2, 20)).astype(np.int32)
  table = with_answers(model, answers.tolist(), source[:1])
  scored = model.score(table, source, mask, jnp.asarray(answers))
  text = model.prefill(table, source, mask, 24)
  fed = jnp.pad(jnp.asarray(answers)[:, :-1], ((0, 0), (1, 0)))
  steps = []
  for at in range(20):
    # A rejected token is fed first, and rewound.
    _, wrong = model.decode(table, (fed[:, at : at + 1] + 1) % VOCAB, text)
    text = wrong.replace(length=text.length)
    logits, text = model.decode(table, fed[:, at : at + 1], text)
    steps.append(logits[:, 0])
  np.testing.assert_array_equal(np.stack(steps, axis=1), np.asarray(scored))


def test_answers_of_decoder_only_models_follow_the_prompt():
  """Their first input is the prompt's last token, which is not repeated."""

  def last(source, mask):
    end = jnp.sum(mask, axis=1, keepdims=True) - 1
    return jnp.take_along_axis(source, end, axis=1)[:, 0]

  target = dataclasses.replace(TARGET, start=last)
  table = ABSORB(target, ngrams.empty(256), jnp.asarray([[3, 4, 5, 0]]), *answer([2]))
  assert look_up(table, [3, 4, 5])[:2] == (2, 3)


def answer(tokens):
  return np.maximum(padded(tokens, 32), 0), np.int32(len(tokens))
