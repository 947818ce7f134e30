"""Memory per chip and upper bounds of tokens per second, from compiled programs."""

from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np

from osd_jax import pairs
from osd_jax.costs.table import RoundCosts, expected_tokens
from osd_jax.loop import rows as rows_lib
from osd_tools import rows as tool_rows
from osd_tools.ahead_of_time.plan import Plan
from osd_tools.ahead_of_time.programs import Made

TOKENS = 64  # length of the answers that estimates assume
ACCEPTANCE = (0.5, 0.7, 0.8, 0.9)  # their acceptance rates, one row each

_NOTE = (
  "The programs were compiled for a machine that is not here, and did not run. Counts"
  " come from the compiler's text; estimates are upper bounds from the chip's published"
  " figures."
)


def conclusions(
  plan: Plan, made: Mapping[str, Made], acceptance: Sequence[float] = ACCEPTANCE
) -> list[rows_lib.Row]:
  """Returns rows on memory and on estimated speed."""
  memory = plan.memory()
  # Programs run one after another, so only the largest temporaries count.
  largest = max((program.temporaries_gb for program in made.values()), default=0.0)
  memory["temporaries"] = largest
  limit = plan.topology.chip.memory / 1e9
  total = sum(memory.values())
  setting = advice(plan, memory)
  text = f"It needs {total:.2f} GB of a chip's {limit:.0f} GB."
  if setting:
    text = (
      f"It does not fit: {total - limit:.2f} GB more than a chip's {limit:.0f} GB;"
      f" {setting}."
    )
  return [
    *(tool_rows.Memory(what=name, gigabytes_a_chip=gb) for name, gb in memory.items()),
    tool_rows.Fits(needed_gb=total, memory_gb=limit, advice=setting, text=text),
    *estimates(plan, made, acceptance),
    rows_lib.Note(text=_NOTE),
  ]


def advice(plan: Plan, held: Mapping[str, float]) -> str:
  """Names a setting that shrinks the largest part; "" if everything fits."""
  if sum(held.values()) <= plan.topology.chip.memory / 1e9:
    return ""
  largest = max(held, key=lambda name: held[name])
  if largest.startswith(("target", "draft")):
    pair = plan.run.pair
    # A target that is stored in bfloat16 is not widened in memory.
    types = {leaf.dtype for leaf in jax.tree.leaves(plan.target_params)}
    is_wide = largest.startswith("draft") or np.dtype(np.float32) in types
    if isinstance(pair, pairs.PairConfig) and pair.dtype == "float32" and is_wide:
      return 'PairConfig.dtype = "bfloat16" halves the weights'
    wider = 2 * plan.run.partition.model
    return f"PartitionConfig.model = {wider} halves them a chip"
  settings = {
    "caches and rows": "DecodingConfig.rows, source_lengths or target_length",
    "replay buffer": "BufferConfig.capacity, BufferConfig.keep_target_states",
    "temporaries": "DecodingConfig.rows, UpdateConfig.num_new or num_replay",
  }
  setting = settings.get(
    largest, 'OptimizerConfig.name = "adafactor", which stores less'
  )
  return f"smaller: {setting}"


def estimates(
  plan: Plan, made: Mapping[str, Made], acceptance: Sequence[float]
) -> Iterator[tool_rows.Estimate]:
  """Yields upper bounds of tokens per second, one row per acceptance rate.

  Yields nothing if one of the programs did not fit into memory.
  """
  drafted = plan.run.decoding.num_draft_tokens
  verify = f"verification of {drafted + 1} tokens"
  # A program that does not fit into memory is missing from `made`.
  names = ("prefill", "plain step", verify, "draft step")
  if not all(name in made for name in names):
    return
  prefill, plain_ms, verify_ms, draft_ms = (
    float(made[name].least_ms or 0) for name in names
  )
  prefill /= plan.spec.parts  # each part reads one prompt
  rows = plan.spec.rows
  schedule = plan.run.learning.schedule
  learns = "slice" in made
  # K draft steps run one after another, then the target verifies all at once.
  round_ms = drafted * draft_ms + verify_ms
  online = RoundCosts(
    (round_ms,), num_draft_tokens=(drafted,), rows=rows, request_ms=prefill
  )
  plain = RoundCosts((plain_ms,), num_draft_tokens=(0,), rows=rows, request_ms=prefill)
  slices = plan.run.learning.update.steps_per_update if learns else 0
  slice_ms = float(made["slice"].least_ms or 0) if learns else 0.0
  # All devices take part in an update, so serving waits until it ends.
  lost_ms = slice_ms * slices / schedule.update_interval
  for rate in acceptance:
    tokens_a_call = expected_tokens(rate, drafted)
    calls = TOKENS / tokens_a_call
    # The frozen draft has the same acceptance here: the estimate shows what updates
    # cost, and cannot know what they gain.
    yield tool_rows.Estimate(
      acceptance=rate,
      tokens_a_call=tokens_a_call,
      plain_tokens_s=predict(plain, TOKENS, TOKENS),
      frozen_tokens_s=predict(online, TOKENS, calls, drafted * calls),
      online_tokens_s=predict(online, TOKENS, calls, drafted * calls, lost_ms),
      c=draft_ms / plain_ms,
      v=verify_ms / plain_ms,
      break_even_acceptance=break_even(drafted, round_ms / plain_ms),
    )


def predict(
  costs: RoundCosts, tokens: float, calls: float, drafted: float = 0, lost_ms: float = 0
) -> float:
  """Returns tokens per second of one way to decode, all rows together.

  Args:
    costs: of this way to decode.
    tokens: emitted per request, mean.
    calls: target calls per request, mean.
    drafted: drafted tokens per request, mean.
    lost_ms: time that updates take from a request.
  """
  ms = costs.request_ms + calls * costs.at(drafted / calls) / costs.rows
  return tokens * 1e3 / (ms + lost_ms)


def break_even(num_draft_tokens: int, round_over_step: float) -> float | None:
  """Returns the lowest acceptance rate at which a round pays, None if none does."""
  # The expected tokens grow with the rate, so the first rate that pays is the lowest.
  rates = np.linspace(0, 1, 1001)
  pays = [expected_tokens(rate, num_draft_tokens) >= round_over_step for rate in rates]
  return float(rates[int(np.argmax(pays))]) if any(pays) else None
