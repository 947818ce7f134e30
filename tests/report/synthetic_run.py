"""Rows of an invented run: an online draft learns four topics, one after another."""

import math

import made_rows
import numpy as np

from osd_jax.loop import rows as rows_lib

TOPICS = ("maths", "sql", "python", "finance")
FLOORS = (0.78, 0.55, 0.75, 0.5)  # overlap of the frozen draft with each
NUM_DRAFT_TOKENS = 7


def rows(requests: int = 800, seed: int = 0) -> list[rows_lib.Row]:
  """Returns the rows of one run."""
  rng = np.random.default_rng(seed)
  per_topic = requests // len(TOPICS)
  made: list[rows_lib.Row] = []
  for index in range(requests):
    topic = min(index // per_topic, len(TOPICS) - 1)
    seen = index - topic * per_topic
    paused = seen > 0.75 * per_topic  # updates stop once the draft has learned
    online = FLOORS[topic] + (0.92 - FLOORS[topic]) * (1 - math.exp(-seen / 30))
    # Most of the noise comes from the request, so both drafts share it.
    noise = rng.normal(0, 0.13) + rng.normal(0, 0.04, 2)
    frozen, overlap = np.clip([FLOORS[topic], online] + noise, 0, 1).tolist()
    calls = int(rng.integers(6, 14))
    accepted = [
      rng.binomial(calls, overlap ** (i + 1)) for i in range(NUM_DRAFT_TOKENS)
    ]
    tokens = calls + sum(accepted)
    row = {
      "source": TOPICS[topic],
      "paused": paused,
      "overlap": overlap,
      "floor_overlap": frozen,
      "target_calls": calls,
      "accepted_per_position": accepted,
      "output_tokens": tokens,
      "tokens_per_target_call": tokens / calls,
      "decode_ms": calls * 11.0,
      "run_seconds": 0.26 * (index + 1),
      "saved_seconds": 0.04 * index - 5.0,  # negative for the first 125 requests
    }
    if index % 4 == 0:
      noises = rng.gamma(2, 0.2, 3)
      row["plain_ms_per_token"] = (4.0 if paused else 7.0) + noises[0]
      row["floor_ms_per_token"] = 11.0 * max(1 - frozen, 0.15) + noises[1]
      row["online_ms_per_token"] = 11.0 * calls / tokens + noises[2]
    if index == 0:
      row["online_ms_per_token"] = 90.0  # an outlier, as from a compilation
    made.append(made_rows.request(index, **row))
    if index % 8 == 7 and not paused:
      skipped = index == 415
      loss = 0.3 + 1.8 * math.exp(-seen / 40) * rng.gamma(20, 0.05)
      loss = math.nan if skipped else loss
      made.append(made_rows.update(index + 1, loss=loss, skipped=int(skipped)))
  return [*made, rows_lib.Summary(wall_seconds=212.0)]
