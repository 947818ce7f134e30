"""The time that a run spent and the time that learning saved, from metrics.jsonl.

The verdict is measured. Some requests, chosen at random, are served again by plain
decoding and by the frozen draft. Each topic's mean time per token, weighted with all
tokens of the topic, says what these would have taken for the whole stream. Few requests
say it roughly, so a speed-up has an interval, and only one that excludes 1 is a result.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from osd_jax.loop import rows as rows_lib

# --- Where the time went ------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Account:
  """Where the seconds of a run went.

  Attributes:
    parts: name -> seconds of the thread that serves, one thing at a time; they add up
      to `wall`. Checkpoints and logs are the "rest".
    wall: seconds from the start of the command to its last request, in all sessions.
    learning: seconds that updates ran, on another thread and so not in `parts`.
    metered: seconds of measuring agreement on another thread, also not in `parts`.
    updates: number of updates.
    skipped: steps of updates that were left out because they were not finite.
  """

  parts: Mapping[str, float]
  wall: float
  learning: float
  metered: float
  updates: int
  skipped: int

  @classmethod
  def of(cls, rows: Iterable[rows_lib.Row]) -> "Account | None":
    """Returns the account of a run; None if it served nothing or has no times."""
    rows = list(rows)
    requests = rows_lib.of(rows_lib.Request, rows)
    updates = rows_lib.of(rows_lib.Update, rows)
    # Both count from the first request, over all sessions.
    clocks = [row.run_seconds for row in requests]
    clocks += [row.wall_seconds for row in rows_lib.of(rows_lib.Summary, rows)]
    served = max(clocks, default=0.0)
    if not requests or not served:
      return None
    starts = rows_lib.of(rows_lib.Start, rows)
    before = {
      "loading": _sum(starts, "loading_ms") / 1e3,
      "compiling": _sum(starts, "compiling_ms") / 1e3,
      "measuring costs": _sum(starts, "measuring_ms") / 1e3,
    }
    parts = {
      "serving": _sum(requests, "decode_ms") / 1e3,
      "waiting for updates": (
        _sum(updates, "wait_ms") + _sum(requests, "update_wait_ms")
      )
      / 1e3,
      "comparing": _sum(requests, "compare_ms") / 1e3,
      "metering": _sum(requests, "metering_ms") / 1e3,
    }
    if gate := _sum(requests, "gate_ms") / 1e3:
      parts["drafts for the gate"] = gate
    spent = sum(parts.values())
    served = max(served, spent)  # the log may hold the last session's time only
    before = {name: seconds for name, seconds in before.items() if seconds}
    return cls(
      parts={**before, **parts, "rest": served - spent},
      wall=sum(before.values()) + served,
      learning=_sum(updates, "update_ms") / 1e3,
      metered=_sum(requests, "metering_beside_ms") / 1e3,
      updates=len(updates),
      skipped=int(_sum(updates, "skipped")),
    )

  @property
  def overlapped(self) -> float:
    """Seconds that updates ran while serving went on."""
    return max(self.learning - self.parts["waiting for updates"], 0.0)

  def sentence(self) -> str:
    """Returns how long the run took, with its longest part apart from serving."""
    others = {name: x for name, x in self.parts.items() if name != "serving"}
    most = max(others, key=lambda name: others[name])
    name = "checkpoints and logs" if most == "rest" else most
    return (
      f"The run took {self.wall:,.1f} s: {self.parts['serving']:,.1f} s of serving,"
      f" {others[most]:,.1f} s of {name}; see Where the time went."
    )

  def table(self) -> list[dict[str, Any]]:
    """Returns rows of the parts, their sum, and learning below it."""
    entries = [*self.parts.items(), ("wall time", self.wall)]
    skipped = f", {self.skipped} steps skipped" if self.skipped else ""
    entries += [
      (f"learning ({self.updates} updates{skipped})", self.learning),
      ("learning while serving went on", self.overlapped),
    ]
    if self.metered:
      entries.append(("metering on another thread", self.metered))
    return [
      {
        "part": name,
        "seconds": round(seconds, 2),
        "share of wall": f"{seconds / self.wall:.1%}",
      }
      for name, seconds in entries
    ]


# --- Whether learning paid ----------------------------------------------------------


CONFIDENCE = 0.99
FEWEST = 10  # compared requests; times of fewer may be alike by chance


@dataclasses.dataclass(frozen=True)
class SpeedUp:
  """How many times as fast as something else; surely between `low` and `high`."""

  value: float
  low: float
  high: float
  requests: int  # compared ones

  @property
  def is_certain(self) -> bool:
    """Whether the interval excludes 1."""
    return not self.low <= 1 <= self.high

  @property
  def is_even(self) -> bool:
    """Whether the interval shows that there is hardly a difference."""
    return 1 / EVEN < self.low <= 1 <= self.high < EVEN

  @property
  def interval(self) -> str:
    """Between which factors it lies."""
    return f"surely {self.low:.2f}x to {self.high:.2f}x"

  @property
  def text(self) -> str:
    """The factor with its interval."""
    text = f"{self.value:.2f}x"
    return text if math.isinf(self.high) else f"{text}, {self.interval}"

  @property
  def too_few(self) -> str:
    """Says that the interval includes 1."""
    verb = "is" if self.requests == 1 else "are"
    return f"{counted(self.requests, 'compared request')} {verb} too few to say"

  @classmethod
  def of(cls, value: float, spread: float, freedom: int, requests: int) -> "SpeedUp":
    """Returns a factor with its standard error, estimated with degrees of freedom."""
    from scipy.special import stdtrit  # a dependency of jax

    if requests < FEWEST or freedom < 1:
      return cls(value, 0.0, math.inf, requests)
    margin = float(stdtrit(freedom, (1 + CONFIDENCE) / 2)) * spread
    return cls(value, max(value - margin, 0.0), value + margin, requests)


EVEN = 1.05  # two speeds that surely differ by less are called equal


def counted(number: int, noun: str) -> str:
  """Returns "1 request" or "2 requests"."""
  return f"{number:,} {noun}{'' if number == 1 else 's'}"


@dataclasses.dataclass(frozen=True)
class Sums:
  """Sums over compared requests, for a mean time per token and its spread."""

  ms: float = 0.0
  ms_squared: float = 0.0
  ms_tokens: float = 0.0

  def add(self, tokens: int, ms: float) -> "Sums":
    """Adds a request."""
    return Sums(self.ms + ms, self.ms_squared + ms * ms, self.ms_tokens + ms * tokens)


@dataclasses.dataclass(frozen=True)
class Topic:
  """Sums over the requests of a topic.

  Attributes:
    tokens: emitted tokens of all requests.
    requests: number of those that were served again.
    compared: their emitted tokens.
    squared: sum of the squares of these.
    plain_ms: time that plain decoding took for them.
    frozen_ms: time that the frozen draft took for them.
  """

  tokens: int = 0
  requests: int = 0
  compared: int = 0
  squared: float = 0.0
  plain_ms: Sums = Sums()
  frozen_ms: Sums = Sums()

  def token_ms(self, name: str) -> float:
    """Mean time per token."""
    return getattr(self, name).ms / self.compared

  def variance(self, name: str) -> float:
    """Sum of squares around that mean."""
    sums, mean = getattr(self, name), self.token_ms(name)
    squares = sums.ms_squared - 2 * mean * sums.ms_tokens + mean**2 * self.squared
    return max(squares, 0.0)


@dataclasses.dataclass(frozen=True)
class Verdict:
  """Learning against plain decoding and against the frozen draft, over all requests.

  A fold over rows in the order of the file, so that a progress line, a resumed run and
  the report say the same. An update that finishes after the last request counts for
  nothing, as no request waited for it.

  Attributes:
    served_ms: decoding as it was, with the time that requests waited for updates.
    waited_ms: time spent waiting for updates since the last request.
    requests: number of finished requests.
    compared: number of those that were served again.
    topics: name -> sums.
    behind: requests up to the last at which learning was not ahead of both.
    updates: updates of the draft.
  """

  served_ms: float = 0.0
  waited_ms: float = 0.0
  requests: int = 0
  compared: int = 0
  topics: Mapping[str, Topic] = dataclasses.field(default_factory=dict)
  behind: int = 0
  updates: int = 0

  @property
  def plain_ms(self) -> float | None:
    """Time that plain decoding would have taken for all requests; None if unknown."""
    return self._estimated("plain_ms")

  @property
  def frozen_ms(self) -> float | None:
    """Time that the frozen draft would have taken; None if unknown."""
    return self._estimated("frozen_ms")

  @property
  def over_plain(self) -> SpeedUp | None:
    """Speed of serving / that of plain decoding; None if unknown."""
    return self._speed_up("plain_ms")

  @property
  def over_frozen(self) -> SpeedUp | None:
    """Speed of serving / that of the frozen draft; None if unknown."""
    return self._speed_up("frozen_ms")

  @property
  def ahead_since(self) -> int | None:
    """Number of requests after which learning stayed ahead of both; None if never."""
    return None if self.behind == self.requests else self.behind + 1

  def fields(self) -> dict[str, Any]:
    """Returns the fields of a request row; none before the first comparison."""
    plain, frozen = self.plain_ms, self.frozen_ms
    if plain is None or frozen is None:
      return {}
    return {
      "saved_seconds": (frozen - self.served_ms) / 1e3,
      "saved_plain_seconds": (plain - self.served_ms) / 1e3,
      "ahead_since": self.ahead_since,
    }

  def sentence(self) -> str:
    """Returns the verdict in words; "" if no request was compared."""
    plain, frozen = self.over_plain, self.over_frozen
    if plain is None or frozen is None:
      return ""
    serving = "serving with learning" if self.updates else "serving"
    seconds = [self.served_ms / 1e3 * x for x in (1.0, plain.value, frozen.value)]
    rival = f", the frozen draft {seconds[2]:.1f} s ({frozen.text})"
    return (
      f"Measured over all {counted(self.requests, 'request')}: {serving} took"
      f" {seconds[0]:.1f} s, waiting for updates included. Plain decoding would have"
      f" taken {seconds[1]:.1f} s ({plain.text}){rival if self.updates else ''}, by"
      f" {counted(self.compared, 'request')} chosen at random;"
      f" {self._conclusion(plain, frozen)}."
    )

  def _conclusion(self, plain: SpeedUp, frozen: SpeedUp) -> str:
    if not self.updates:
      return "no draft was trained"
    if min(plain.low, frozen.low) > 1:
      since = f" since request {self.ahead_since}" if self.ahead_since else ""
      return f"ahead of both{since}"
    if min(plain.high, frozen.high) < 1:
      return "learning has not paid"
    return f"{frozen.too_few} whether learning paid"

  def _speed_up(self, name: str) -> SpeedUp | None:
    rival_ms = self._estimated(name)
    if not rival_ms or not self.served_ms:
      return None
    topics = [topic for topic in self.topics.values() if topic.compared]
    share = sum(topic.tokens for topic in self.topics.values()) / sum(
      topic.tokens for topic in topics
    )
    freedom = self.compared - len(topics)
    # The pooled spread of a token's time; a topic with one request has none of its own.
    squares = sum(topic.variance(name) for topic in topics) / max(freedom, 1)
    squared = sum(
      topic.requests * (share * topic.tokens / topic.compared) ** 2 for topic in topics
    )
    # The times of serving itself spread as much.
    spread = math.sqrt(squares * (squared + self.requests)) / self.served_ms
    value = rival_ms / self.served_ms
    return SpeedUp.of(value, spread, freedom, self.compared)

  def _estimated(self, name: str) -> float | None:
    """Each topic's measured time per token, times all its tokens."""
    compared = [topic for topic in self.topics.values() if topic.compared]
    if not compared:
      return None
    # A topic without a comparison yet counts like the mean of the others.
    tokens = sum(topic.compared for topic in compared)
    mean = sum(getattr(topic, name).ms for topic in compared) / tokens
    return sum(
      topic.tokens * (topic.token_ms(name) if topic.compared else mean)
      for topic in self.topics.values()
    )


def observe(state: Verdict, row: rows_lib.Row) -> Verdict:
  """Adds one row of metrics.jsonl; all but updates and requests are ignored."""
  if isinstance(row, rows_lib.Update):
    waited = state.waited_ms + _ms(row, "wait_ms")
    return dataclasses.replace(state, waited_ms=waited, updates=state.updates + 1)
  if not isinstance(row, rows_lib.Request):
    return state
  tokens, name = row.output_tokens, row.source
  topic = state.topics.get(name, Topic())
  plain, frozen = row.plain_ms_per_token, row.floor_ms_per_token
  is_compared = bool(plain and frozen)
  topic = dataclasses.replace(topic, tokens=topic.tokens + tokens)
  if plain and frozen:
    topic = dataclasses.replace(
      topic,
      requests=topic.requests + 1,
      compared=topic.compared + tokens,
      squared=topic.squared + tokens**2,
      plain_ms=topic.plain_ms.add(tokens, tokens * plain),
      frozen_ms=topic.frozen_ms.add(tokens, tokens * frozen),
    )
  # Waiting is charged to the next request, which is the one that was delayed.
  waited = state.waited_ms + _ms(row, "update_wait_ms") + _ms(row, "gate_ms")
  state = dataclasses.replace(
    state,
    served_ms=state.served_ms + _ms(row, "decode_ms") + waited,
    waited_ms=0.0,
    requests=state.requests + 1,
    compared=state.compared + is_compared,
    # By topic, because compared requests are few: a topic with slow answers that was
    # compared often would otherwise shift the mean of the stream.
    topics={**state.topics, name: topic},
  )
  saved = [state.plain_ms, state.frozen_ms]
  # Behind until proven ahead: without a comparison nothing has been shown.
  if all(ms is not None and ms > state.served_ms for ms in saved):
    return state
  return dataclasses.replace(state, behind=state.requests)


def verdict(rows: Iterable[rows_lib.Row]) -> Verdict:
  """Returns the verdict of a log."""
  state = Verdict()
  for row in rows:
    state = observe(state, row)
  return state


def _ms(row: rows_lib.Row, name: str) -> float:
  value = getattr(row, name) or 0.0
  return value if math.isfinite(value) else 0.0


def _sum(rows: Iterable[rows_lib.Row], name: str) -> float:
  return float(sum(_ms(row, name) for row in rows))
