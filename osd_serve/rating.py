"""Rates decoding against plain decoding on the same machine, under the same load.

Clients, learning and other programs slow a server down, and plain calls not as much as
those that draft. So the times of plain calls at the idle start are multiplied by what
they take now / what they took then. That is measured on calls of undrafted requests or,
where all requests draft, on plain calls that are timed now and then in between.
"""

from collections import deque
from typing import Protocol

import numpy as np

from osd_jax.engine.engine import CallTime
from osd_serve.scheduler import Turn

RECENT = 32  # measurements whose mean counts
# Turns between them: plain calls, which answer nobody, take at most 2 % of the time.
# Seconds would count a high load too much, because less is done in them.
EVERY = 200
FIRST, FIRST_EVERY = 8, 40  # the first ones come earlier
LARGEST = 4.0  # a time counts as at most so many medians: a single pause is no load


class Plain(Protocol):
  """Times of plain calls, see `measurement.PlainRounds`."""

  def call_ms(self, call: CallTime) -> float:
    """Returns what a call of plain rounds took at the start."""
    ...

  def again(self, call: CallTime, rounds: int) -> float:
    """Times plain calls; returns their time / that at the start."""
    ...


class Rating:
  """Adds to every job what plain decoding would have taken for it."""

  def __init__(self, plain: Plain, rounds: int):
    """Times nothing yet; `rounds` are those of a call while clients wait."""
    self._plain, self._rounds = plain, rounds
    self._loads: deque[float] = deque(maxlen=RECENT)
    # The host's time of turns in which no answer ended.
    self._host: deque[float] = deque([0.0], maxlen=RECENT)
    self._turns = EVERY  # since the last measurement
    self._call: CallTime | None = None

  @property
  def load(self) -> float:
    """Time of a plain call now / that at the start; 1 before the first is timed."""
    if not self._loads:
      return 1.0
    return float(np.minimum(self._loads, LARGEST * np.median(self._loads)).mean())

  def add(self, turn: Turn, call: CallTime) -> None:
    """Adds a turn, whose compiled call was `call`, to its jobs."""
    self._call, rows = call, len(turn.emitted)
    self._turns += 1
    host_ms = max(turn.milliseconds - call.milliseconds - call.prefill_ms, 0.0)
    if not turn.ends:
      self._host.append(host_ms)
    if not call.drafted:  # it took the time of plain decoding, exactly
      for job in turn.emitted:
        job.plain_ms += turn.milliseconds / rows
      return
    plain = call._replace(rows=rows, rounds=self._rounds)
    turn_ms = float(np.median(self._host))
    plain_ms = self._plain.call_ms(plain) * self.load + turn_ms
    # Prompts are read and answers end as often in plain decoding.
    once_ms = call.prefill_ms + max(host_ms - turn_ms, 0.0) * turn.ends
    for job, tokens in turn.emitted.items():
      job.plain_ms += (tokens * plain_ms / self._rounds + once_ms) / rows

  def time_again(self) -> None:
    """Measures the load, after a turn, if that is due."""
    call, every = self._call, EVERY if len(self._loads) > FIRST else FIRST_EVERY
    if call is None or self._turns < every:
      return
    if call.drafted:
      self._loads.append(self._plain.again(call, self._rounds))
    else:
      self._loads.append(call.milliseconds / self._plain.call_ms(call))
    self._call, self._turns = None, 0
