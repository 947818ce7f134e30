"""The rows that the tools write to metrics.jsonl; see `osd_jax.loop.rows`."""

import dataclasses
from typing import Annotated

from osd_jax.loop.rows import Doc, Note, Row, row

_TOKENS_S = "tokens / s"


@row("advice")
class Advice(Row):
  """One per system of osd advise, with the K that is fastest for it."""

  heading = "Advice"

  system: Annotated[
    str,
    Doc(
      "text",
      "plain decoding, a drafter, or a draft mixed with the cache if the right one were"
      " always asked",
    ),
  ]
  tokens_per_call: Annotated[
    float, Doc("tokens", "emitted / target calls, from the log's answers")
  ]
  num_draft_tokens: Annotated[int, Doc("tokens", "K")]
  ms_per_token: Annotated[
    float,
    Doc("ms", "from the calls and the costs on this machine, learning included"),
  ]
  updates: Annotated[int, Doc("count", "updates of the draft")]
  over_plain: Annotated[
    float, Doc("ratio", "`ms_per_token` of plain decoding / this one's")
  ]
  is_bound: Annotated[
    bool, Doc("true or false", "a mixture: its figures are upper bounds")
  ]


@dataclasses.dataclass(frozen=True)
class Made:
  """Counts of a compiled program, per round or, outside of rounds, per call.

  All rows are greedy: operations that only sampled rows need are not counted.

  Attributes:
    compile_s: seconds of compilation.
    kernels: kernels outside of inner loops.
    inner_loops: number of inner loops.
    copies: blocking copies.
    sorts: sorts, including inner loops.
    collectives: collectives outside of inner loops.
    inner_collectives: collectives in inner loops, that is, in drafting.
    moved_mb: megabytes that collectives return on one chip, one iteration per loop.
    foreign_calls: calls of code that XLA did not generate.
    arguments_gb: gigabytes of the arguments on one chip.
    temporaries_gb: gigabytes of temporaries on one chip.
    in_place_gb: gigabytes of arguments that are updated in place.
    read_again: bytes accessed according to XLA, divided by bytes of the arguments.
    least_ms: estimated lower bound from the chip's published figures.
    cycles: estimate of a TPU's compiler outside of inner loops; None on others.
  """

  compile_s: float
  kernels: int
  inner_loops: int
  copies: int
  sorts: int
  collectives: int
  inner_collectives: int
  moved_mb: float
  foreign_calls: int
  arguments_gb: float
  temporaries_gb: float
  in_place_gb: float
  read_again: float | None
  least_ms: float | None
  cycles: int | None


@row("program")
class Program(Made, Row):
  """One per program of osd compile."""

  heading = "Programs, each on one chip"

  program: Annotated[str, Doc("text", "its name")]


@row("refused")
class Refused(Note):
  """One per program that the compiler of osd compile refuses; `text` says why."""

  program: Annotated[str, Doc("text", "its name")]


@row("memory")
class Memory(Row):
  """One per thing that a chip holds, by osd compile."""

  heading = "Memory of a chip"

  what: Annotated[str, Doc("text", "its name")]
  gigabytes_a_chip: Annotated[float, Doc("GB", "its size on each chip")]


@row("fits")
class Fits(Note):
  """Whether a run of osd compile fits the chips."""

  needed_gb: Annotated[float, Doc("GB", "memory that it needs on each chip")]
  memory_gb: Annotated[float, Doc("GB", "memory of a chip")]
  advice: Annotated[str, Doc("text", 'the setting to change, "" if everything fits')]


@row("estimate")
class Estimate(Row):
  """Highest speeds at one acceptance, by osd compile, from the chip's own figures."""

  heading = "Highest speeds, estimated"

  acceptance: Annotated[float, Doc("0..1", "acceptance of every position")]
  tokens_a_call: Annotated[float, Doc("tokens", "emitted / target calls")]
  plain_tokens_s: Annotated[float, Doc(_TOKENS_S, "plain decoding")]
  frozen_tokens_s: Annotated[float, Doc(_TOKENS_S, "with a draft that does not learn")]
  online_tokens_s: Annotated[float, Doc(_TOKENS_S, "with a draft that learns")]
  c: Annotated[float, Doc("ratio", "draft step / plain step")]
  v: Annotated[float, Doc("ratio", "verification / plain step")]
  break_even_acceptance: Annotated[
    float | None, Doc("0..1", "acceptance at which drafting pays")
  ]
