"""Alarms: faults of an online run that would otherwise go unnoticed.

Outputs are exact, so they hide faults of the draft: they stay the target's even if no
drafted token is accepted or no update changes anything. Every alarm is logged when it
starts and when it ends. The state is a fold over the rows of metrics.jsonl, so that a
resumed run rebuilds it from the rows it kept.
"""

import dataclasses
from collections.abc import Iterable

from osd_jax.loop import rows as rows_lib

WINDOW = 25  # acceptance and loops are judged over this many trailing requests

# The text of each alarm when it starts.
MEANINGS = {
  "acceptance_pinned_at_0": (
    f"no token drafted in the last {WINDOW} requests was accepted, so the draft costs"
    " time and saves none. Look at its updates, or start it again"
  ),
  "acceptance_pinned_at_1": (
    f"every token drafted in the last {WINDOW} requests was accepted. This is right"
    " for a draft that equals the target; otherwise drafts are not being verified"
  ),
  "update_not_finite": (
    "an update skipped steps because their loss, gradient or step was not finite;"
    " lower the learning rate if this continues"
  ),
  "output_loops": (
    "an output repeats itself. The outputs are the target's own, so the target does"
    " this without a draft too, but loops inflate the acceptance rate"
  ),
}


@dataclasses.dataclass(frozen=True)
class AlarmState:
  """State of the alarms.

  Attributes:
    recent: (drafted, accepted, loops) of the last `WINDOW` requests, oldest first.
    active: names of the alarms that have started and not ended.
  """

  recent: tuple[tuple[int, int, bool], ...] = ()
  active: frozenset[str] = frozenset()


def observe(
  state: AlarmState, row: rows_lib.Row
) -> tuple[AlarmState, list[rows_lib.Alarm]]:
  """Updates the state with one row of metrics.jsonl, in the order of the file.

  Only requests and updates change anything. Returns the new state, and the rows of the
  alarms that start or end here.
  """
  recent = state.recent
  if isinstance(row, rows_lib.Request):
    recent = (*recent, (row.drafted, row.accepted, row.loops))[-WINDOW:]
    verdicts, finished = _judge_requests(recent), row.index + 1
  elif isinstance(row, rows_lib.Update):
    verdicts, finished = {"update_not_finite": row.skipped > 0}, row.finished
  else:
    return state, []
  # Only changes are reported. A condition that lasts would otherwise log a row for
  # every request.
  changes = [
    name for name, holds in verdicts.items() if holds != (name in state.active)
  ]
  alarms = [_alarm(name, verdicts[name], finished) for name in changes]
  return AlarmState(recent, state.active.symmetric_difference(changes)), alarms


def replay(rows: Iterable[rows_lib.Row]) -> AlarmState:
  """Computes the state after the rows of a log."""
  state = AlarmState()
  for row in rows:
    state, _ = observe(state, row)
  return state


def sentence(rows: Iterable[rows_lib.Row]) -> str:
  """Lists the alarms of a log, with the requests between which each was active."""
  spans: list[str] = []
  open_spans: dict[str, int] = {}
  for row in rows_lib.of(rows_lib.Alarm, rows):
    if row.active:
      open_spans[row.alarm] = len(spans)
      spans.append(f"{_words(row.alarm)} from request {row.finished}")
    elif row.alarm in open_spans:
      spans[open_spans.pop(row.alarm)] += f" to {row.finished}"
  for place in open_spans.values():
    spans[place] += " to the end"
  return f"Alarms: {'; '.join(spans) or 'none'}."


def _judge_requests(recent: tuple[tuple[int, int, bool], ...]) -> dict[str, bool]:
  drafted = sum(entry[0] for entry in recent)
  accepted = sum(entry[1] for entry in recent)
  # Plain decoding drafts nothing, and then neither rate means anything.
  enough = len(recent) == WINDOW and drafted > 0
  return {
    "acceptance_pinned_at_0": enough and accepted == 0,
    "acceptance_pinned_at_1": enough and accepted == drafted,
    "output_loops": any(loops for _, _, loops in recent),
  }


def _alarm(name: str, active: bool, finished: int) -> rows_lib.Alarm:
  meaning = MEANINGS[name] if active else "over"
  # A draft that equals its target is a valid run, so this one is not a fault.
  kind = "notice" if name == "acceptance_pinned_at_1" else "alarm"
  text = f"{kind}: {_words(name)}: {meaning}."
  return rows_lib.Alarm(finished=finished, alarm=name, active=active, text=text)


def _words(name: str) -> str:
  return name.replace("_", " ")
