"""Progress of a run: a live line on a terminal, plain lines elsewhere.

A log file or a notebook, where a live display would need ipywidgets, gets a plain line
every `EVERY` seconds.
"""

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import rich.console
import rich.progress
import rich.status
import rich.table

from osd_jax.loop.rows import Request

WINDOW = 25  # requests of the trailing figures
EVERY = 20.0  # seconds between plain lines
_COMPILED = "/jax/core/compile/backend_compile_duration"  # an event of JAX


def bar(console: rich.console.Console) -> rich.progress.Progress:
  """Makes a bar: tasks show a description, a count, the time left and `figures`."""
  if not _is_live(console):
    return _Lines(console=console, disable=True)
  # On a narrow terminal only the figures are folded.
  whole = lambda: rich.table.Column(no_wrap=True)
  return rich.progress.Progress(
    rich.progress.TextColumn("{task.description}", table_column=whole()),
    rich.progress.MofNCompleteColumn(table_column=whole()),
    rich.progress.TimeRemainingColumn(table_column=whole(), compact=True),
    rich.progress.TextColumn(
      "{task.fields[figures]}", table_column=rich.table.Column(overflow="fold")
    ),
    console=console,
  )


@contextlib.contextmanager
def status(console: rich.console.Console, text: str) -> Iterator[None]:
  """Shows `text` while the body runs, with the number of programs it compiles."""
  live, last_message, compiled = _is_live(console), time.monotonic(), 0
  spinner = console.status(text) if live else contextlib.nullcontext()
  if not live:
    console.print(f"{text} ...", highlight=False)

  def listen(event: str, *_: Any, **__: Any) -> None:
    nonlocal last_message, compiled
    if event != _COMPILED:
      return
    compiled += 1
    line = f"{text} ({compiled} {'program' if compiled == 1 else 'programs'} compiled)"
    if isinstance(spinner, rich.status.Status):
      spinner.update(line)
    elif time.monotonic() - last_message > EVERY:
      last_message = time.monotonic()
      console.print(f"{line} ...", highlight=False)

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    with spinner:
      yield
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)


class Progress:
  """Shows requests, overlap of both drafts, tokens per call and ms per token."""

  def __init__(self, console: rich.console.Console, total: int | None, finished: int):
    """Starts at `finished` of `total` requests; a `total` of None is unknown."""
    self._recent: deque[Request] = deque(maxlen=WINDOW)
    self._finished = finished
    self._bar = bar(console)
    self._task = self._bar.add_task(
      "serve", total=total, completed=finished, figures=""
    )

  def __enter__(self) -> "Progress":
    self._bar.start()
    return self

  def __exit__(self, *_: object) -> None:
    self._bar.stop()

  def show(self, row: Request) -> None:
    """Adds a request to the figures and shows them."""
    self._recent.append(row)
    self._finished += 1

    def mean(name: str) -> str:
      values = [x for one in self._recent if (x := getattr(one, name)) is not None]
      return f"{np.mean(values):.2f}" if values else "-"

    figures = (
      f"{row.source}: overlap {mean('overlap')}, frozen {mean('floor_overlap')};"
      f" {mean('tokens_per_target_call')} tokens/call,"
      f" {mean('online_ms_per_token')} ms/token{_saved(row)}"
    )
    self._bar.update(self._task, completed=self._finished, figures=figures)


def _saved(row: Request) -> str:
  """Measured savings so far, against both rivals; "" before the first comparison."""
  frozen, plain = row.saved_seconds, row.saved_plain_seconds
  if frozen is None or plain is None:
    return ""
  return f"; saved {frozen:+.1f} s against frozen, {plain:+.1f} s against plain"


class _Lines(rich.progress.Progress):
  """Prints a task as a plain line every `EVERY` seconds and at its end."""

  _said = 0.0

  def start(self) -> None:
    self._said = time.monotonic()

  def stop(self) -> None:
    for task in self.tasks:
      if not task.finished:
        self._say(task)

  def update(self, task_id: rich.progress.TaskID, **changes: Any) -> None:
    super().update(task_id, **changes)
    self._changed(task_id)

  def advance(self, task_id: rich.progress.TaskID, advance: float = 1) -> None:
    super().advance(task_id, advance)
    self._changed(task_id)

  def _changed(self, task_id: rich.progress.TaskID) -> None:
    task = self._tasks[task_id]
    # The last line is printed once, also if it comes before `EVERY` seconds.
    ended = task.finished and not task.fields.get("said")
    if ended or time.monotonic() - self._said > EVERY:
      task.fields["said"] = task.finished
      self._say(task)

  def _say(self, task: rich.progress.Task) -> None:
    self._said = time.monotonic()
    seconds_left = task.time_remaining
    figures = task.fields.get("figures", "")
    of_all = "" if task.total is None else f"/{task.total:.0f}"
    parts = [
      f"{task.description} {task.completed:.0f}{of_all}",
      f"{seconds_left:.0f} s left" if seconds_left and not task.finished else "",
      figures,
    ]
    line = ", ".join(part for part in parts if part)
    self.console.print(line, highlight=False, soft_wrap=True, markup=False)


def _is_live(console: rich.console.Console) -> bool:
  return console.is_terminal and not console.is_jupyter and not console.is_dumb_terminal
