"""Progress: complete counters in a narrow terminal, plain lines in a log file."""

import io

import jax
import made_rows
import numpy as np
import pytest
import rich.console

from osd_jax.report import progress


def console(width=80, **named):
  return rich.console.Console(file=io.StringIO(), width=width, **named)


def served(index):
  return made_rows.request(
    index,
    source="generated_finance",
    overlap=0.5,
    tokens_per_target_call=3.25,
    online_ms_per_token=12.5,
  )


@pytest.mark.parametrize("width", [50, 80])
def test_terminal_shows_complete_counters_and_figures(width, monkeypatch):
  monkeypatch.setenv("TERM", "xterm")
  live = console(width, force_terminal=True, legacy_windows=False)
  with progress.Progress(live, 1200, 799) as bar:
    bar.show(served(0))
  last = live.file.getvalue()
  assert "800/1200" in last and "…" not in last
  for figure in ("0.50", "3.25", "12.50"):
    assert figure in last
  assert "\x1b[" in last  # a live display


def test_log_file_gets_plain_lines_at_intervals(monkeypatch):
  clock = [0.0]
  monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
  plain = console()
  with progress.Progress(plain, 100, 0) as bar:
    for index in range(100):
      clock[0] += progress.EVERY / 30
      bar.show(served(index))
  lines = plain.file.getvalue().splitlines()
  assert [line.split(",")[0] for line in lines] == [
    "serve 31/100",
    "serve 62/100",
    "serve 93/100",
    "serve 100/100",
  ]
  assert all("\x1b" not in line and "3.25 tokens/call" in line for line in lines)


def test_status_counts_compiled_programs(monkeypatch):
  monkeypatch.setattr(progress, "EVERY", -1.0)
  plain = console()
  with progress.status(plain, "compiling"):
    for size in (3, 4):
      jax.jit(lambda x: x + 1).lower(np.zeros(size)).compile()
  jax.jit(lambda x: x + 2).lower(np.zeros(3)).compile()  # not counted any more
  assert plain.file.getvalue().splitlines() == [
    "compiling ...",
    "compiling (1 program compiled) ...",
    "compiling (2 programs compiled) ...",
  ]


def test_interrupted_run_prints_its_progress():
  plain = console()
  with pytest.raises(KeyboardInterrupt):
    with progress.Progress(plain, 10, 2) as bar:
      bar.show(served(2))
      raise KeyboardInterrupt
  assert plain.file.getvalue().startswith("serve 3/10, ")


def test_finished_task_is_printed_once():
  plain = console()
  with progress.bar(plain) as bar:
    task = bar.add_task("texts", total=2, figures="")
    for _ in range(2):
      bar.advance(task)
    bar.update(task, description="renamed")
    bar.remove_task(task)
  assert plain.file.getvalue() == "texts 2/2\n"


def test_notebook_uses_plain_lines(monkeypatch):
  """In a notebook without ipywidgets, rich's live displays would print warnings."""
  book = console(force_jupyter=False, force_terminal=True)
  book.is_jupyter = True
  monkeypatch.setattr(rich.console.Console, "_check_buffer", lambda self: None)
  assert isinstance(progress.bar(book), progress._Lines)
  with progress.status(book, "timing"):
    pass
