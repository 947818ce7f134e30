"""Seconds per block, and the request at which learning has paid for itself."""

import accounts
import pytest

ENDS = [10, 20, 30, 40]


class Clock:
  """A clock that advances only when a test adds to `now`."""

  def __init__(self):
    self.now = 100.0

  def __call__(self):
    return self.now


def test_systems_are_timed_separately_and_alternate_in_order():
  clock, calls = Clock(), []

  def system(name, seconds):
    def serve(start, stop):
      calls.append((name, start, stop))
      clock.now += seconds * (stop - start)

    return serve

  compared = {"slow": system("slow", 2.0), "fast": system("fast", 0.5)}
  spent = accounts.by_blocks(compared, 25, 10, clock)
  assert spent.block_ends == [10, 20, 25]
  assert spent.seconds == {"slow": [20, 40, 50], "fast": [5, 10, 12.5]}
  assert spent.total("slow") == 50
  assert calls == [
    ("slow", 0, 10), ("fast", 0, 10),
    ("fast", 10, 20), ("slow", 10, 20),
    ("slow", 20, 25), ("fast", 20, 25),
  ]  # fmt: skip


@pytest.mark.parametrize(
  ("learned", "expected"),
  [
    ([1.5, 2.5, 3.5, 4.5], None),
    ([0.5, 1.5, 2.5, 4.5], None),  # cheaper for three blocks, but not at the end
    ([0.5, 1.5, 2.5, 3.5], 10),
    ([1.5, 2.5, 2.9, 3.5], 30),
    ([0.5, 2.5, 2.9, 3.5], 30),  # the second crossing counts
    ([0.5, 2.0, 2.9, 3.5], 30),  # an equal time is not cheaper
    ([1.5, 2.5, 3.5, 3.9], 40),
  ],
)
def test_break_even_is_where_learning_becomes_and_stays_cheaper(learned, expected):
  assert accounts.break_even(ENDS, learned, [1.0, 2.0, 3.0, 4.0]) == expected
  spent = accounts.Accounts(ENDS, {"online": learned, "frozen": [1.0, 2.0, 3.0, 4.0]})
  assert spent.break_even("online", "frozen") == expected
