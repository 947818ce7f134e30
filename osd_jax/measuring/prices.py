"""What a run's own calls take on this machine: measured once, before the first request.

Calls are timed as they serve, on the first prompt of the stream: a request's prefill,
rounds of every K, the steps they consist of, an update alone, and rounds and updates
side by side. From the last pair follows how much of an update another core hides.
"""

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from osd_jax.decoding.rounds import DecodeSpec
from osd_jax.distillation.costs import UpdateCosts
from osd_jax.engine import steps as calls
from osd_jax.engine.engine import Engine
from osd_jax.engine.requests import SamplingConfig
from osd_jax.engine.server import Server
from osd_jax.engine.steps import PaddedPrompt as Prompt
from osd_jax.measuring import operations, timing

ROUNDS = 8  # of a timed call, at most: rows may end before
LEAST, MOST, SECONDS = 4, 40, 0.5  # turns: at least, at most, and for how long else
GREEDY = SamplingConfig()
STEP_CALLS, STEP_REPEATS = 8, 3  # of the loops that time single steps


class Way(NamedTuple):
  """A way to decode.

  Attributes:
    spec: static description of decoding.
    candidates: Ks, ascending; 0 is a plain step.
    served: prepared parameters.
  """

  spec: DecodeSpec
  candidates: tuple[int, ...]
  served: calls.Served


@dataclasses.dataclass(frozen=True)
class CallPrices:
  """Of one way to decode.

  Attributes:
    rows: requests that a round serves.
    num_draft_tokens: Ks, ascending; 0 is a plain step.
    round_ms: milliseconds of a round of all rows, for each of them.
    request_ms: what a request takes beside its rounds: prefill and the call itself.
  """

  rows: int
  num_draft_tokens: tuple[int, ...]
  round_ms: tuple[float, ...]
  request_ms: float

  def at(self, num_draft_tokens: float) -> float:
    """Milliseconds of a round that drafts so many tokens on average."""
    return float(np.interp(num_draft_tokens, self.num_draft_tokens, self.round_ms))


@dataclasses.dataclass(frozen=True)
class Prices:
  """What calls take, in milliseconds, and what they compute.

  Attributes:
    plain: plain decoding of one request, without records.
    frozen: speculative decoding of one request.
    online: speculative decoding as the run does it, with all its rows.
    draft_ms: a step of the draft, all rows.
    step_ms: a plain step of the target, all rows.
    verify_ms: the target on K + 1 tokens, all rows; K is the largest.
    slice_ms: a slice of an update that runs alone; 0 where nothing learns.
    slices: of an update.
    slowdown: time of a round beside an update / alone.
    hidden: share of an update that costs serving nothing, in 0..1.
    flops: floating-point operations of each, an estimate; None where XLA gives none.
  """

  plain: CallPrices
  frozen: CallPrices
  online: CallPrices
  draft_ms: float
  step_ms: float
  verify_ms: float
  slice_ms: float = 0.0
  slices: int = 0
  slowdown: float = 1.0
  hidden: float = 0.0
  flops: operations.Flops | None = None

  @classmethod
  def from_json(cls, fields: Mapping[str, Any]) -> "Prices":
    """The prices that `dataclasses.asdict` made a JSON object of."""
    made = {name: _calls(fields[name]) for name in ("plain", "frozen", "online")}
    flops = fields["flops"] and operations.Flops(**fields["flops"])
    known = {field.name for field in dataclasses.fields(cls)}  # a log adds its own
    rest = {name: value for name, value in fields.items() if name in known}
    return cls(**{**rest, **made, "flops": flops})

  @property
  def lost_ms(self) -> float:
    """What an update takes from serving."""
    return self.slice_ms * self.slices * (1 - self.hidden)

  def table(self) -> list[dict[str, Any]]:
    """One row a price."""
    listed = zip(self.online.num_draft_tokens, self.online.round_ms, strict=True)
    entries = {
      "plain step": self.step_ms,
      f"verification of {max(self.online.num_draft_tokens) + 1} tokens": self.verify_ms,
      "draft step": self.draft_ms,
      **{f"round, K = {k}": ms for k, ms in listed},
      "request, beside its rounds": self.online.request_ms,
    }
    if self.slices:
      entries["slice of an update"] = self.slice_ms
      entries[f"update of {self.slices} slices"] = self.slice_ms * self.slices
      entries["of it taken from serving"] = self.lost_ms
    return [
      {"call": name, "milliseconds": round(ms, 3)} for name, ms in entries.items()
    ]

  def update_costs(self) -> UpdateCosts:
    """The part of it that a schedule goes by."""
    return UpdateCosts(
      round_ms=self.online.round_ms,
      update_ms=self.slice_ms * self.slices,
      num_draft_tokens=self.online.num_draft_tokens,
      rows=self.online.rows,
      hidden=self.hidden,
    )


def measure(
  server: Server,
  prompt: np.ndarray,
  learn: bool,
  sampling: SamplingConfig = GREEDY,
) -> Prices:
  """Times the calls of a server that is warm and idle.

  Args:
    server: with a draft; its rows are left as they are.
    prompt: [n] int32, a prompt of the stream.
    learn: whether updates are timed too; the draft does not change.
    sampling: of the stream's requests.
  """
  slots = server.engine
  bucket, pad_id = slots.config.bucket(len(prompt)), server.pair.target.pad_id
  source = np.full((1, bucket), pad_id, np.int32)
  source[0, : len(prompt)] = prompt
  ways = _ways(slots)
  asked = Prompt(source, sampling.settings(slots.config.target_length))
  plain, *drafting = call_prices(ways, asked)
  steps = timing.measure(
    slots.config,
    server.pair.target,
    server.pair.target_params,
    server.pair.draft,
    server.pair.draft_params,
    np.repeat(source, slots.config.rows, axis=0),
    calls=STEP_CALLS,
    repeats=STEP_REPEATS,
  )
  prices = Prices(
    plain,
    drafting[0],
    drafting[-1],
    steps.draft_step_ms,
    steps.plain_step_ms,
    steps.verify_ms,
    flops=operations.count(server, source, learn),
  )
  return _with_learning(prices, server, ways[-1:], asked) if learn else prices


def call_prices(ways: Sequence[Way], prompt: Prompt) -> list[CallPrices]:
  """Times requests and rounds with each K, all ways by turns; see `usual`.

  What else a machine does then falls on all of them alike.

  Args:
    ways: to decode.
    prompt: of every row.
  """
  turns = [
    functools.partial(_turn, way, prompt, k) for way in ways for k in way.candidates
  ]
  for turn in turns:
    turn()  # compiles
  times = usual(_repeated(lambda: [turn() for turn in turns]))
  ends = np.cumsum([len(way.candidates) for way in ways])
  return [
    _summed_up(way, part)
    for way, part in zip(ways, np.split(times, ends[:-1]), strict=True)
  ]


def usual(times: Sequence[Any]) -> np.ndarray:
  """Mean over the first axis without the highest and the lowest tenth.

  What else the machine does will slow serving too, so that it counts, but for hiccups:
  a median would leave it out where it comes in bursts.

  Args:
    times: of [turns, ...].
  """
  ordered = np.sort(np.asarray(times, float), axis=0)
  cut = -(-len(ordered) // 10) if len(ordered) > 2 else 0
  return ordered[cut : len(ordered) - cut].mean(axis=0)


def hidden_share(
  slowdown: float, alone_ms: float, beside_ms: float, handing_ms: float = 0.0
) -> float:
  """Share of an update that serving does not pay for.

  Args:
    slowdown: time of a round beside an update / alone.
    alone_ms: of an update without serving.
    beside_ms: of an update beside serving; meanwhile serving does 1 / slowdown of its
      work.
    handing_ms: of drawing its rows and swapping its draft in, which serving does.
  """
  lost = beside_ms * (1 - 1 / max(slowdown, 1.0)) + handing_ms
  return float(np.clip(1 - lost / alone_ms, 0.0, 1.0))


def _ways(slots: Engine) -> list[Way]:
  """As rivals are served, plainly and with a draft, one row each; and as the run is."""
  alone = dataclasses.replace(slots.spec, rows=1)
  plainly = dataclasses.replace(alone, record_top_k=0, drafter=None)
  found = [
    Way(plainly, (0,), calls.Served(slots.served.target)),
    Way(alone, slots.candidates, slots.served),
    Way(slots.spec, slots.candidates, slots.served),
  ]
  return found[:2] if alone == slots.spec else found


def _summed_up(way: Way, times: np.ndarray) -> CallPrices:
  """The prices from [candidates, 3] of what `_turn` times."""
  insert, idle, round_ms = times.T
  rows = way.spec.rows
  return CallPrices(
    rows=rows,
    num_draft_tokens=tuple(way.candidates),
    round_ms=tuple(np.maximum(round_ms, 1e-3).tolist()),
    request_ms=float(insert.mean() + idle.mean() / rows),
  )


def _with_learning(
  prices: Prices, server: Server, ways: Sequence[Way], prompt: Prompt
) -> Prices:
  """The prices with those of updates; rounds alone are timed before and after."""
  learner = server.learner
  learner.try_update()
  alone = float(usual(_repeated(lambda: _ms(learner.try_update), 2, 5)))
  slices = learner.update_config.steps_per_update
  prices = dataclasses.replace(prices, slice_ms=alone / slices, slices=slices)
  if not learner.in_background:
    return prices  # nothing of it is hidden
  with _again_and_again(learner.try_update) as beside:
    busy = call_prices(ways, prompt)[0].round_ms[-1]
  idle = call_prices(ways, prompt)[0].round_ms[-1]
  slowdown = max(2 * busy / (idle + prices.online.round_ms[-1]), 1.0)
  handing = float(usual(_repeated(lambda: _ms(lambda: _hand_over(server)))))
  hidden = hidden_share(slowdown, alone, float(usual(beside)), handing)
  return dataclasses.replace(prices, slowdown=slowdown, hidden=hidden)


def _hand_over(server: Server) -> None:
  """What serving itself does for an update: draws rows, swaps the draft in."""
  jax.block_until_ready(server.learner.slice_inputs())
  slots = server.engine
  slots.swap(server.draft_params, slots.draft_version, slots.shortlist)
  jax.block_until_ready(slots.served.draft)


def _turn(
  way: Way, prompt: Prompt, num_draft_tokens: int
) -> tuple[float, float, float]:
  """Milliseconds of a prefill, of a call without rounds, and of a round."""
  spec, _, served = way
  everywhere = dict.fromkeys(range(spec.rows), prompt)
  state = calls.empty(spec, served, prompt.source.shape[1])
  jax.block_until_ready(state)
  started = time.perf_counter()
  bucket = prompt.source.shape[1]
  for batch in calls.prefill_batches(everywhere, bucket, spec.rows, spec.parts):
    state = calls.insert(spec, served, state, batch)
    jax.block_until_ready(state)
  inserted = time.perf_counter()
  state = calls.advance(spec, num_draft_tokens, served, np.int32(0), state)
  jax.block_until_ready(state)
  idle = time.perf_counter()
  state = calls.advance(spec, num_draft_tokens, served, np.int32(ROUNDS), state)
  jax.block_until_ready(state)
  ended = time.perf_counter()
  rounds = int(np.max(state.counters.rounds))
  spent = (ended - idle) - (idle - inserted)
  insert = (inserted - started) / spec.rows
  return insert * 1e3, (idle - inserted) * 1e3, spent / max(rounds, 1) * 1e3


def _repeated(
  call: Callable[[], Any], least: int = LEAST, most: int = MOST
) -> list[Any]:
  """What the call gave each time; it is made `least` to `most` times."""
  started, made = time.perf_counter(), []
  while len(made) < least or (
    len(made) < most and time.perf_counter() - started < SECONDS
  ):
    made.append(call())
  return made


@contextlib.contextmanager
def _again_and_again(call: Callable[[], Any]) -> Iterator[list[float]]:
  """Calls on another thread meanwhile; the list has the milliseconds of each call."""
  ended, times = threading.Event(), []

  def work():
    while not ended.is_set() or not times:
      times.append(_ms(call))

  thread = threading.Thread(target=work)
  thread.start()
  try:
    yield times
  finally:
    ended.set()
    thread.join()


def _ms(call: Callable[[], Any]) -> float:
  started = time.perf_counter()
  call()
  return (time.perf_counter() - started) * 1e3


def _calls(fields: Mapping[str, Any]) -> CallPrices:
  lists = {name: tuple(fields[name]) for name in ("num_draft_tokens", "round_ms")}
  return CallPrices(**{**fields, **lists})
