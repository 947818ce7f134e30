"""The frame of all commands: start a run directory, run, finish, write the report.

A command passes `run` a function with its own work. Commands that go step by step also
pass their loop to `run_steps`, which shows progress and handles signals.
"""

import dataclasses
import signal
import threading
from collections.abc import Callable
from typing import Any, Protocol

import rich.console

from osd_jax import base, certificate, pairs, runs, sharding
from osd_jax.engine import generation_config
from osd_jax.engine.requests import OwnSampling, SamplingConfig
from osd_jax.report import page

# Does the work of a command with its config, in its run directory. Returns the verdict
# over the outputs that were checked, and a sentence to print if there were none.
Body = Callable[
  [Any, runs.RunDirectory, rich.console.Console], tuple[certificate.Certificate, str]
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(base.Config):
  """Settings that the configs of several commands have: `OnlineConfig.overwrite`.

  Attributes:
    sampling: prompt or request i draws with seed + i. `OwnSampling` takes the settings
      in the target's generation_config.json.
    partition: device mesh.
    overwrite: remove the run in the run directory and start over.
  """

  sampling: SamplingConfig | OwnSampling = SamplingConfig()
  partition: sharding.PartitionConfig = sharding.PartitionConfig()
  overwrite: bool = False


def run(config: Any, operative_config: str, seed: int, body: Body) -> runs.RunResult:
  """Runs a command in its run directory, unless that run is already finished.

  The directory stores the config, which has `run_directory` and `overwrite`, the
  `operative_config` as gin text, and the seed. The sampling of a `RunConfig` is
  resolved first, so that a run continues with the same.

  Returns:
    The run directory, and whether all checked outputs equal the target's.
  """
  if isinstance(config, RunConfig):
    if getattr(config.pair, "draft", None) == pairs.NONE:
      raise base.InputError(
        f"{type(config).__name__}.pair: received the draft {pairs.NONE!r}, expected one"
        " to measure; plain decoding is measured in any case."
      )
    sampling = generation_config.resolved(config.sampling, config.pair)
    config = dataclasses.replace(config, sampling=sampling)
  console = rich.console.Console(stderr=True)
  with runs.RunDirectory.start(
    config.run_directory,
    config,
    operative_config=operative_config,
    seed=seed,
    overwrite=config.overwrite,
  ) as directory:
    if directory.finished:
      return page.report_finished(directory, console)
    if sentence := getattr(getattr(config, "pair", None), "padding", ""):
      console.print(sentence, highlight=False, soft_wrap=True)
    verdict, sentence = body(config, directory, console)
    return page.finish(verdict, directory, console, sentence)


class Loop(Protocol):
  """A command that goes step by step."""

  def step(self) -> Any:
    """Makes one step; returns what `run_steps` shows, or None after the last step."""

  def checkpoint(self) -> None:
    """Saves the current step if it has not been saved yet."""

  def wait(self) -> None:
    """Waits for all background work, the write of the last checkpoint included."""


def run_steps(loop: Loop, show: Callable[[Any], object]) -> None:
  """Calls `loop.step` until it returns None.

  A SIGINT or SIGTERM takes effect after the current step and a checkpoint of it, a
  second one at once. Outside the main thread they are left alone, because Python
  delivers signals only to the main thread.
  """
  arrived: list[int] = []
  handlers: dict[int, Any] = {}

  def restore() -> None:
    while handlers:
      signal.signal(*handlers.popitem())

  def note(number: int, frame: object) -> None:
    del frame
    arrived.append(number)
    if len(arrived) > 1:
      restore()
      signal.raise_signal(number)

  if threading.current_thread() is threading.main_thread():
    handlers |= {n: signal.signal(n, note) for n in (signal.SIGINT, signal.SIGTERM)}
  try:
    while (rows := loop.step()) is not None:
      show(rows)
      if arrived:
        loop.checkpoint()
        loop.wait()
        # With its own handler, the signal has the effect it would have had at first.
        restore()
        signal.raise_signal(arrived[0])
  finally:
    restore()
    # If a step raised an error, the last checkpoint is still written completely.
    loop.wait()
