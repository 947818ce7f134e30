"""The round's program at the tiny size: what it reports, and what it compares with."""

import argparse

import bench_round
import jax
import numpy as np
import pytest

GIVEN = argparse.Namespace(
  target="tiny", draft="tiny", served="int8", drafted=3, source=8, length=12,
  turns=2, threads=1,
)  # fmt: skip


def test_the_shares_of_a_round_add_up():
  found = {row["figure"]: row["value"] for row in bench_round.rows_of(GIVEN)}
  models, verify = found["both models alone, ms"], found["verification alone, ms"]
  assert verify > 0 and models > 0
  assert found["drafting (the difference), ms"] == pytest.approx(models - verify)
  outside = found["outside the two models, share"]
  assert outside == pytest.approx(1 - models / found["a round, ms"])


def test_the_models_alone_are_fed_as_in_a_round_from_the_same_position(monkeypatch):
  fed = []
  feed = bench_round.feed

  def noted(steps, served, caches, count):
    token, after = feed(steps, served, caches, count)
    lengths = jax.tree.map(lambda x, y: np.array_equal(x, y), *(
      {who: cache.length for who, cache in held.items()} for held in (caches, after)
    ))  # fmt: skip
    fed.append(([(who, width) for who, _, width in steps], lengths))
    return token, after

  monkeypatch.setattr(bench_round, "feed", noted)
  people = bench_round.people_of(GIVEN)
  people[bench_round.MODELS]()
  people[bench_round.VERIFY]()
  drafting = [("draft", 2), ("draft", 1), ("draft", 1)]
  assert [steps for steps, _ in fed] == [[*drafting, ("target", 4)], [("target", 4)]]
  assert all(all(lengths.values()) for _, lengths in fed)
