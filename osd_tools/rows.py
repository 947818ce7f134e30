"""The rows that the tools write to metrics.jsonl; see `osd_jax.loop.rows`."""

import dataclasses

from osd_jax.loop.rows import Note, Row, row


@row("advice", "Advice")
class Advice(Row):
  """One per system of osd advise, with the K that is fastest for it.

  Attributes:
    system: text | plain decoding, a drafter, or a draft mixed with the cache
    tokens_per_call: tokens | emitted / target calls, from the log's answers
    num_draft_tokens: tokens | K
    ms_per_token: ms | from the calls and the costs on this machine, learning included
    updates: count | updates of the draft
    over_plain: ratio | `ms_per_token` of plain decoding / this one's
  """

  system: str
  tokens_per_call: float
  num_draft_tokens: int
  ms_per_token: float
  updates: int
  over_plain: float


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
    over_bound: `cycles` / those that reading the arguments takes; None for rounds.
      Prefetches have no cycles, so a program below 1 waits for memory.
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
  over_bound: float | None


@row("program", "Programs, each on one chip")
class Program(Made, Row):
  """One per program of osd compile.

  Attributes:
    program: text | its name
  """

  program: str


@row("refused")
class Refused(Note):
  """One per program that the compiler of osd compile refuses; `text` says why.

  Attributes:
    program: text | its name
  """

  program: str


@row("memory", "Memory of a chip")
class Memory(Row):
  """One per thing that a chip holds, by osd compile.

  Attributes:
    what: text | its name
    gigabytes_a_chip: GB | its size on each chip
  """

  what: str
  gigabytes_a_chip: float


@row("fits")
class Fits(Note):
  """Whether a run of osd compile fits the chips.

  Attributes:
    needed_gb: GB | memory that it needs on each chip
    memory_gb: GB | memory of a chip
    advice: text | the setting to change, "" if everything fits
  """

  needed_gb: float
  memory_gb: float
  advice: str


@row("estimate", "Highest speeds, estimated")
class Estimate(Row):
  """Highest speeds at one acceptance, by osd compile, from the chip's own figures.

  Attributes:
    acceptance: 0..1 | acceptance of every position
    tokens_a_call: tokens | emitted / target calls
    plain_tokens_s: tokens / s | plain decoding
    frozen_tokens_s: tokens / s | with a draft that does not learn
    online_tokens_s: tokens / s | with a draft that learns
    c: ratio | draft step / plain step
    v: ratio | verification / plain step
    break_even_acceptance: 0..1 | acceptance at which drafting pays
  """

  acceptance: float
  tokens_a_call: float
  plain_tokens_s: float
  frozen_tokens_s: float
  online_tokens_s: float
  c: float
  v: float
  break_even_acceptance: float | None
