"""Rounds of writes and rewinds against a list per row; writing at the very end."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from osd_jax import cache as cache_lib

ROWS, HEADS, LIMIT, BLOCK, SIZE = 3, 2, 10, 4, 2  # BLOCK is K + 1
EXAMPLES = hypothesis.settings(
  max_examples=40, deadline=None, derandomize=True, database=None
)
write = jax.jit(cache_lib.write)
insert_row = jax.jit(cache_lib.insert_row)

# What each row keeps of the block that it writes, round by round.
KEPT = st.lists(
  st.lists(st.integers(0, BLOCK), min_size=ROWS, max_size=ROWS),
  min_size=1,
  max_size=8,
)


def block_of(number):
  """[B, H, n, D] of values that occur in no other round, row, head or place."""
  shape = (ROWS, HEADS, BLOCK, SIZE)
  return (1 + number * np.prod(shape) + np.arange(np.prod(shape))).reshape(shape)


def play(rounds, length, keep=lambda kept: kept):
  """Writes and rewinds; returns (cache, lengths, what a list of entries holds).

  A finished row (length LIMIT) goes on writing, as a row that waits for others does.
  """
  stored = jnp.zeros((ROWS, HEADS, length, SIZE), jnp.float32)
  lengths = np.zeros(ROWS, np.int32)
  entries = [[] for _ in range(ROWS)]
  for number, kept in enumerate(rounds):
    block = block_of(number)
    stored = write(stored, jnp.asarray(block, jnp.float32), jnp.asarray(lengths))
    for row in range(ROWS):
      count = min(kept[row], LIMIT - int(lengths[row]))
      entries[row] += [block[row, :, place] for place in range(count)]
      lengths[row] += keep(count)
  return np.asarray(stored), lengths, entries


def agrees(stored, lengths, entries):
  return all(
    len(entries[row]) == lengths[row]
    and all(
      np.array_equal(stored[row, :, place], entry)
      for place, entry in enumerate(entries[row])
    )
    for row in range(ROWS)
  )


@EXAMPLES
@hypothesis.given(rounds=KEPT)
def test_valid_entries_are_those_that_were_kept(rounds):
  assert agrees(*play(rounds, LIMIT + BLOCK))


@pytest.mark.parametrize(
  ("length", "keep"),
  [
    (LIMIT, lambda kept: kept),  # no room behind the limit: writes are clamped
    (LIMIT + BLOCK, lambda kept: max(kept - 1, 0)),  # the length one behind
  ],
)
def test_a_short_cache_and_a_wrong_length_are_told_apart(length, keep):
  """Negative controls: the rounds above would notice."""
  hypothesis.find(
    KEPT,
    lambda rounds: not agrees(*play(rounds, length, keep)),
    settings=hypothesis.settings(EXAMPLES, max_examples=300),
  )


@EXAMPLES
@hypothesis.given(rounds=KEPT, slot=st.integers(0, ROWS - 1), row=st.integers(0, 2))
def test_a_refilled_slot_leaves_its_mates_alone(rounds, slot, row):
  stored, lengths, entries = play(rounds, LIMIT + BLOCK)
  fresh, started, begun = play([[1, 2, 3]], LIMIT + BLOCK)
  batch = {"keys": jnp.asarray(stored), "length": jnp.asarray(lengths)}
  one = {"keys": fresh[row : row + 1], "length": started[row : row + 1]}
  found = insert_row(batch, one, jnp.asarray([slot]))
  entries[slot] = begun[row]
  assert agrees(np.asarray(found["keys"]), np.asarray(found["length"]), entries)
