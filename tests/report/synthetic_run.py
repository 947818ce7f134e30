"""Rows of an invented run: an online draft learns four topics, one after another."""

import math

import made_rows
import numpy as np

from osd_jax.loop import rows as rows_lib

TOPICS = ("maths", "sql", "python", "finance")
NUM_DRAFT_TOKENS = 7


def rows(requests: int = 800, seed: int = 0) -> list[rows_lib.Row]:
  """Returns the rows of one run."""
  rng = np.random.default_rng(seed)
  per_topic = requests // len(TOPICS)
  made: list[rows_lib.Row] = []
  for index in range(requests):
    topic = min(index // per_topic, len(TOPICS) - 1)
    floor = (0.78, 0.55, 0.75, 0.5)[topic]
    seen = index - topic * per_topic
    online = floor + (0.92 - floor) * (1 - math.exp(-seen / 30))
    paused = seen > 0.75 * per_topic  # updates stop once the draft has learnt
    made.append(_request(rng, index, TOPICS[topic], floor, online, paused))
    if index % 8 == 7 and not paused:
      made.append(_update(rng, index + 1, 1.8 * math.exp(-seen / 40)))
  made.append(rows_lib.Summary(wall_seconds=212.0))
  return made


def _request(
  rng: np.random.Generator,
  index: int,
  source: str,
  floor: float,
  online: float,
  paused: bool,
) -> rows_lib.Request:
  # Most of the noise comes from the request, so both drafts share it.
  noise = rng.normal(0, 0.13) + rng.normal(0, 0.04, 2)
  noisy = np.clip(np.array([floor, online]) + noise, 0, 1)
  calls = int(rng.integers(6, 14))
  accepted = [
    int(rng.binomial(calls, noisy[1] ** (i + 1))) for i in range(NUM_DRAFT_TOKENS)
  ]
  tokens = calls + sum(accepted)
  row = {
    "source": source,
    "paused": paused,
    "target_calls": calls,
    "drafted": calls * NUM_DRAFT_TOKENS - int(rng.integers(0, 2 * calls)),
    "overlap": float(noisy[1]),
    "floor_overlap": float(noisy[0]),
    "draft_acceptance_rate": sum(accepted) / (calls * NUM_DRAFT_TOKENS),
    "acceptance_rate": float(noisy[1]),
    "floor_acceptance_rate": float(noisy[0]),
    "tokens_per_target_call": tokens / calls,
    "accepted_per_position": accepted,
    "output_tokens": tokens,
    "decode_ms": calls * 11.0,
    "metering_ms": 14.0,
    "run_seconds": 0.26 * (index + 1),
    "saved_seconds": 0.04 * index - 5.0,  # negative for the first 125 requests
  }
  if index % 4 == 0:
    frozen = 1 / (1 - noisy[0]) if noisy[0] < 0.85 else 6.0
    row |= {
      "plain_ms_per_token": (4.0 if paused else 7.0) + rng.gamma(2, 0.2),
      "compare_ms": 120.0,
      "floor_ms_per_token": 11.0 / frozen + rng.gamma(2, 0.2),
      "online_ms_per_token": 11.0 * calls / tokens + rng.gamma(2, 0.2),
    }
  if index == 0:
    row["online_ms_per_token"] = 90.0  # an outlier, as from a compilation
  return made_rows.request(index, **row)


def _update(rng: np.random.Generator, finished: int, loss: float) -> rows_lib.Update:
  skipped = finished == 416
  return made_rows.update(
    finished,
    version=finished // 8,
    loss=math.nan if skipped else 0.3 + loss * rng.gamma(20, 0.05),
    update_ms=180.0 + rng.gamma(2, 10),
    wait_ms=rng.gamma(1, 4),
    skipped=int(skipped),
  )
