"""Alarms: what an online run must not go through in silence.

Exactness hides faults of the draft: outputs stay the target's while nothing drafted is
accepted, or while no update changes anything. Each alarm is told twice, when it starts
and when it ends. What is known is a fold over the rows of metrics.jsonl, so a run that
is resumed rebuilds it from the rows that survived.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

WINDOW = 25  # trailing requests that acceptance and loops are judged over

# What each alarm says when it starts.
MEANINGS = {
  "acceptance_pinned_at_0": (
    f"nothing that was drafted in {WINDOW} requests was accepted; the draft costs"
    " time and saves none. Look at its updates, or start it anew"
  ),
  "acceptance_pinned_at_1": (
    f"all that was drafted in {WINDOW} requests was accepted; right for a draft"
    " that equals the target, else a sign that nothing is judged"
  ),
  "update_not_finite": (
    "an update had steps with a loss, gradient or step that was not finite, and"
    " left them out; lower the learning rate if it goes on"
  ),
  "output_loops": (
    "an output repeats itself; the target does so alone too (outputs are its"
    " own), and loops flatter the acceptance"
  ),
}


@dataclasses.dataclass(frozen=True)
class Alarm:
  """The start or the end of an alarm: a row of kind "alarm".

  Attributes:
    alarm: a key of `MEANINGS`.
    active: True at its start, False at its end.
    text: one line for people.
  """

  alarm: str
  active: bool
  text: str


@dataclasses.dataclass(frozen=True)
class AlarmState:
  """What alarms remember.

  Attributes:
    recent: (drafted, accepted, loops) of the last `WINDOW` requests, oldest first.
    active: names of the alarms that have started and not ended.
  """

  recent: tuple[tuple[int, int, bool], ...] = ()
  active: frozenset[str] = frozenset()


def observe(
  state: AlarmState, kind: str, row: Mapping[str, Any]
) -> tuple[AlarmState, list[Alarm]]:
  """Takes in one row of metrics.jsonl, in the order of the file.

  Args:
    state: what is known.
    kind: of the row; others than "request" and "update" change nothing.
    row: its `drafted`, `accepted` and `loops`, or its `skipped`, are read.

  Returns:
    What is known now, and the alarms that start or end here.
  """
  judged: dict[str, bool] = {}
  recent = state.recent
  if kind == "request":
    entry = (row["drafted"], row["accepted"], bool(row.get("loops")))
    recent = (*recent, entry)[-WINDOW:]
    judged = _judge_requests(recent)
  elif kind == "update":
    judged = {"update_not_finite": row["skipped"] > 0}
  changed = [name for name, holds in judged.items() if holds != (name in state.active)]
  found = [_alarm(name, judged[name]) for name in changed]
  return AlarmState(recent, state.active.symmetric_difference(changed)), found


def replay(rows: Iterable[Mapping[str, Any]]) -> AlarmState:
  """What is known after the rows of a log."""
  state = AlarmState()
  for row in rows:
    state, _ = observe(state, row["kind"], row)
  return state


def sentence(rows: Iterable[Mapping[str, Any]]) -> str:
  """The alarms of a run in words, in the order of their start.

  Args:
    rows: of metrics.jsonl.

  Returns:
    "Alarms: ..." with the numbers of finished requests between which each held.
  """
  spans: list[str] = []
  open_spans: dict[str, int] = {}
  for row in rows:
    if row["kind"] != "alarm":
      continue
    name, finished = row["alarm"], row["finished"]
    if row["active"]:
      open_spans[name] = len(spans)
      spans.append(f"{_words(name)} from request {finished}")
    elif name in open_spans:
      spans[open_spans.pop(name)] += f" to {finished}"
  for place in open_spans.values():
    spans[place] += " to the end"
  return f"Alarms: {'; '.join(spans) or 'none'}."


def _judge_requests(recent: tuple[tuple[int, int, bool], ...]) -> dict[str, bool]:
  drafted = sum(entry[0] for entry in recent)
  accepted = sum(entry[1] for entry in recent)
  enough = len(recent) == WINDOW and drafted > 0
  return {
    "acceptance_pinned_at_0": enough and accepted == 0,
    "acceptance_pinned_at_1": enough and accepted == drafted,
    "output_loops": any(loops for _, _, loops in recent),
  }


def _alarm(name: str, active: bool) -> Alarm:
  said = MEANINGS[name] if active else "over"
  kind = "notice" if name == "acceptance_pinned_at_1" else "alarm"
  return Alarm(name, active, f"{kind}: {_words(name)}: {said}.")


def _words(name: str) -> str:
  return name.replace("_", " ")
