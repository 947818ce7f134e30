"""The time that a run spent and the time that learning saved, from metrics.jsonl.

The verdict is measured. Some requests, chosen at random, are served again by plain
decoding and by the frozen draft. Each topic's mean time per token, weighted with all
tokens of the topic, says what these would have taken for the whole stream.
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


@dataclasses.dataclass(frozen=True)
class Topic:
  """Sums over the requests of a topic.

  Attributes:
    tokens: emitted tokens of all requests.
    compared: emitted tokens of those that were served again.
    plain_ms: time that plain decoding took for these.
    frozen_ms: time that the frozen draft took for these.
  """

  tokens: int = 0
  compared: int = 0
  plain_ms: float = 0.0
  frozen_ms: float = 0.0


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
    plain, frozen = self.plain_ms, self.frozen_ms
    if plain is None or frozen is None or not self.served_ms:
      return ""
    seconds = [ms / 1e3 for ms in (self.served_ms, plain, frozen)]
    serving, behind = "serving with learning", "learning has not paid"
    if not self.updates:
      serving, behind = "serving", "no draft was trained"
    since = f"ahead of both since request {self.ahead_since}"
    ahead = since if self.ahead_since else behind
    return (
      f"Measured over all {self.requests} requests: {serving} took"
      f" {seconds[0]:.1f} s, waiting for updates included. Plain decoding would have"
      f" taken {seconds[1]:.1f} s ({plain / self.served_ms:.2f}x plain), the frozen"
      f" draft {seconds[2]:.1f} s ({frozen / self.served_ms:.2f}x the frozen draft), as"
      f" {self.compared} requests chosen at random show; {ahead}."
    )

  def _estimated(self, name: str) -> float | None:
    """Each topic's measured time per token, times all its tokens."""
    compared = [topic for topic in self.topics.values() if topic.compared]
    if not compared:
      return None
    # A topic without a comparison yet counts like the mean of the others.
    tokens = sum(topic.compared for topic in compared)
    mean = sum(getattr(topic, name) for topic in compared) / tokens
    return sum(
      topic.tokens * (getattr(topic, name) / topic.compared if topic.compared else mean)
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
      compared=topic.compared + tokens,
      plain_ms=topic.plain_ms + tokens * plain,
      frozen_ms=topic.frozen_ms + tokens * frozen,
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
