"""Tables of measured costs, and the expected number of tokens per round."""

import dataclasses
import json

import numpy as np
import pytest

from osd_jax.costs import table

ROUNDS = table.RoundCosts((4.0, 7.0, 11.0), num_draft_tokens=(0, 3, 7))


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3, 8])
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.85, 1.0])
def test_expected_tokens_match_a_simulation(acceptance, num_draft_tokens):
  rng = np.random.default_rng(0)
  accepted = rng.random((20_000, num_draft_tokens)) < acceptance
  emitted = 1 + np.cumprod(accepted, axis=1).sum(axis=1).mean()
  found = table.expected_tokens(acceptance, num_draft_tokens)
  assert found == pytest.approx(emitted, rel=0.02)
  if acceptance < 1:
    closed = (1 - acceptance ** (num_draft_tokens + 1)) / (1 - acceptance)
    assert found == pytest.approx(closed)


def test_round_time_is_interpolated_between_measured_ks():
  assert ROUNDS.at(1.5) == pytest.approx(5.5) and ROUNDS.at(7) == 11.0


# [source, sampled, rows, K]; sampled rounds take as long as greedy ones.
WHOLE = table.RoundCosts(
  ((((10, 20), (40, 100)),), (((10, 11), (40, 80)),)), num_draft_tokens=(0, 3), rows=4
)


@pytest.mark.parametrize(("rows", "share"), [(1, 0), (2, 1 / 3), (4, 1), (9, 1)])
def test_rounds_of_some_rows_lie_between_those_of_one_and_of_all(rows, share):
  rounds_ms, alone_ms = WHOLE.rounds(rows=rows).tolist()
  assert rounds_ms == pytest.approx((10 + 30 * share, 20 + 80 * share))
  assert alone_ms == pytest.approx((10 + 30 * share, 11 + 69 * share))
  assert ROUNDS.rounds(rows=rows).tolist() == [[4, 7, 11]]  # only all rows were timed


def test_sampled_rows_have_times_of_their_own():
  costs = dataclasses.replace(ROUNDS, round_ms=(((4, 7, 11),), ((5, 9, 14),)))
  assert costs.rounds(is_sampled=True).tolist() == [[5, 9, 14]]
  assert costs.flat(False) == ROUNDS
  assert costs.flat(True).token_ms(0.0) == 5


def test_first_ks_keep_all_other_axes():
  first = WHOLE.of((0,))
  assert first.num_draft_tokens == (0,)
  np.testing.assert_array_equal(first.ms, WHOLE.ms[..., :1])


def test_prices_are_differences_in_tokens():
  prices = table.prices((0, 1, 3), (4.0, 5.0, 9.0), token_ms=2.0)
  assert prices.tolist() == [0.5, 1.0, 1.0]
  assert (table.prices((0, 3), (4.0, 4.0), 2.0) > 0).all()  # never free


def test_predicted_speed_up_follows_the_paper():
  assert table.predicted_speed_up(3.0, 5, 0.1) == pytest.approx(2.0)
  assert table.predicted_speed_up(3.0, 5, 0.1, 1.5) == pytest.approx(1.5)


def test_token_time_uses_the_fastest_k_and_all_rows():
  fixed = table.RoundCosts((11.0,), num_draft_tokens=(7,))
  assert fixed.token_ms(0.0) == 11.0
  assert fixed.token_ms(1.0) == pytest.approx(11.0 / 8)
  assert fixed.token_ms(0.5) == pytest.approx(11.0 / (2 - 0.5**7))
  both = table.RoundCosts((4.0, 6.0, 11.0), num_draft_tokens=(0, 1, 7), rows=2)
  assert both.token_ms(0.1) == 2.0  # K = 0 is fastest: 4 ms for 2 rows
  assert both.token_ms(1.0) == pytest.approx(11.0 / 8 / 2)


def test_costs_round_trip_through_json():
  costs = table.Costs(ROUNDS, 60.0, update_ms=120.0, slices=6)
  fields = json.loads(json.dumps(dataclasses.asdict(costs)))
  assert table.Costs.from_json({"kind": "costs", **fields}) == costs


def test_table_has_update_costs_only_with_learning():
  calls = [row["call"] for row in table.Costs(ROUNDS).table()]
  assert "round, K = 3" in calls and not any("update" in call for call in calls)
  learning = table.Costs(ROUNDS, 60.0, update_ms=120.0, slices=6).table()
  assert learning[-1]["milliseconds"] == 60.0
