"""Rows of metrics.jsonl with invented values."""

from osd_jax.loop import rows


def request(index: int = 0, **changes) -> rows.Request:
  """Returns a request of 30 tokens: 10 rounds, 120 ms."""
  fields = {
    "query": index,
    "source": "maths",
    "overlap": 0.8,
    "overlap_upper": 0.9,
    "acceptance_rate": 0.8,
    "draft_acceptance_rate": 2 / 7,
    "tokens_per_target_call": 3.0,
    "accepted_per_position": [8, 6, 4, 2, 0, 0, 0],
    "target_calls": 10,
    "drafted": 70,
    "accepted": 20,
    "output_tokens": 30,
    "stop_reason": "EOS",
    "loops": False,
    "draft_version": 0,
    "decode_ms": 120.0,
    "online_ms_per_token": 4.0,
    "run_seconds": 0.0,
  }
  return rows.Request(index=index, **{**fields, **changes})


def update(finished: int = 0, **changes) -> rows.Update:
  """Returns an update of two slices that nothing waited for."""
  times = {"update_ms": 180.0, "wait_ms": 0.0}
  fields = {"launched": finished, "version": 1, "loss": 1.0, "grad_norm": 1.0}
  counts = {"steps": 2, "skipped": 0}
  return rows.Update(finished=finished, **{**fields, **counts, **times, **changes})
