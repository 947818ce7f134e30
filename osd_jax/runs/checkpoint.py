"""Checkpoints: all that a run needs to continue, in one atomic step.

A step holds two things that are written together or not at all: a pytree of
arrays (draft, optimiser, buffer, rows in flight) and a JSON object for the host
(stream position, schedule, length of metrics.jsonl). Orbax writes into a
temporary folder and renames it, so a killed process leaves either the whole
step or none of it. Beside the arrays stands a table of their shapes, dtypes
and checksums: a step that was damaged later is noticed and skipped.

Who saves waits for a copy in host memory alone: one thread beside it computes the
checksums and writes, one step after the other.
"""

import concurrent.futures
import dataclasses
import errno
import json
import os
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from osd_jax import background, base
from osd_jax.runs import leaves, quiet

_ARRAYS, _HOST = "arrays", "host"


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """Where checkpoints lie, how many are kept, how often one is taken.

  Attributes:
    directory: folder of the steps, made if absent.
    keep: the newest `keep` steps stay on disk; 2 or more survive a damaged one.
    every_requests: a checkpoint is due after this many finished requests.
  """

  directory: str
  keep: int = 2
  every_requests: int = 50

  def __post_init__(self):
    base.check_fields(self, {"directory": (self.directory, "a folder")})
    base.check_counts(self, "keep", "every_requests")


class Checkpointer:
  """Saves and restores steps of one directory; one writer at a time.

  Where a step cannot be written, `due` becomes true, and the next `save`, `wait`,
  `restore` or `close` raises it.
  """

  def __init__(self, config: CheckpointConfig):
    import orbax.checkpoint as ocp  # imported late: it costs .3 s

    self.config = config
    self._directory = Path(config.directory).absolute()
    self._ocp = ocp
    self._manager = ocp.CheckpointManager(
      self._directory,
      item_names=(_ARRAYS, _HOST),
      options=ocp.CheckpointManagerOptions(
        max_to_keep=config.keep, create=True, enable_async_checkpointing=False
      ),
    )
    self._thread = background.Worker("checkpoints", low_priority=True)
    self._writing: tuple[int, concurrent.futures.Future] | None = None
    self._restored: int | None = None

  def __enter__(self) -> "Checkpointer":
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def close(self) -> None:
    """Waits for the step being written, then ends all threads.

    Raises:
      ValueError: that step cannot be written; the steps before it are whole.
    """
    try:
      self.wait()
    finally:
      self._thread.shutdown()
      self._manager.close()

  def wait(self) -> None:
    """Waits until the step saved last is complete on disk.

    Raises:
      ValueError: it cannot be written; the steps before it are whole.
    """
    if self._writing is None:
      return
    _, written = self._writing
    concurrent.futures.wait([written])
    self._writing = None  # orbax's manager is this thread's again
    written.result()

  def steps(self) -> list[int]:
    """The complete steps on disk, oldest first; waits for the one being written."""
    self.wait()
    return sorted(self._manager.all_steps())

  def latest_step(self) -> int | None:
    """The newest complete step, None if there is none; waits as `steps` does."""
    return max(self.steps(), default=None)

  def resumed(self, unit: str, total: int | None) -> str:
    """Says where a run continues that counts its steps in these units.

    Args:
      unit: what is counted, in the singular.
      total: how many the run has; None where nobody knows.

    Returns:
      One sentence, "" where nothing was restored.
    """
    if self._restored is None:
      return ""
    where = self._directory / str(self._restored)
    of_all = "" if total is None else f" of {total}"
    return f"continues at {unit} {self._restored}{of_all} from checkpoint {where}"

  def due(self, finished: int) -> bool:
    """Whether a checkpoint is due after `finished` requests; waits for nothing.

    Counts from the newest step saved, be it still being written, so a run that
    finishes several requests in one call never steps over a checkpoint. Due at once
    where that step could not be written: `save` then says so.
    """
    if self._writing is None:
      newest = self.latest_step() or 0
    else:
      newest, written = self._writing
      if written.done() and written.exception() is not None:
        return True
    return finished - newest >= self.config.every_requests

  def save(self, step: int, arrays: Any, host: Mapping[str, Any]) -> None:
    """Copies one step and has it written; `wait` until it is complete on disk.

    The step is of this moment, whatever becomes of the arrays and of `host`. A step
    that is still being written is waited for first.

    Args:
      step: number of the step, greater than every step on disk (the number of
        finished requests does well).
      arrays: pytree whose leaves are jax or numpy arrays.
      host: JSON object; tuples come back as lists and keys as text.

    Raises:
      ValueError: a leaf is no array, `host` is no JSON, `step` is not new, or the
        disk did not take the step before; older ones are whole in any case.
    """
    latest = self.latest_step()
    if step < 0 or (latest is not None and step <= latest):
      raise base.InputError(
        f"checkpoint save: received step {step}, expected one greater than the"
        f" latest, {latest}, in {self._directory}; continue from the latest step"
        " or remove the newer ones."
      )
    named = leaves.named(arrays)
    leaves.check_plain(named)
    copied = leaves.copied(named), _copied_json(host)
    self._writing = step, self._thread.submit(self._write, step, latest, *copied)
    if jax.process_count() > 1:  # orbax computes on all: in one order everywhere
      self.wait()

  def _write(
    self,
    step: int,
    latest: int | None,
    arrays: Mapping[str, Any],
    host: Mapping[str, Any],
  ) -> None:
    """Runs on the thread; orbax's manager is that thread's until `wait`."""
    payload = {"host": host, "arrays": leaves.described(arrays)}
    stored = {name: leaf for name, leaf in arrays.items() if leaf.size}
    args = self._ocp.args
    whole = args.Composite(
      arrays=args.StandardSave(stored), host=args.JsonSave(payload)
    )
    try:
      with quiet.echoes_of_failure():
        self._manager.save(step, args=whole, force=True)
    except Exception as error:  # whatever the writers raise: it is not on disk
      raise base.InputError(
        f"checkpoint save: step {step} cannot be written to {self._directory}"
        f" ({_cause(error)}); the last good one is step {latest}. Make room or"
        " allow writing there, then repeat the command to continue from it."
      ) from error

  def restore(self, step: int | None, target: Any) -> tuple[Any, dict[str, Any]]:
    """Reads one step into the structure of `target`.

    With `step=None` the newest readable step is taken. A newer one that cannot
    be read is reported by a warning and moved aside to `damaged_<step>`, so that
    the run can write that step anew.

    Args:
      step: the step to read, None for the newest readable one.
      target: pytree of arrays or `jax.ShapeDtypeStruct`; its shapes and dtypes
        must be those saved. The sharding of a leaf that has one is honoured;
        where it has none, or is an uncommitted array, so is the array returned.
        Or a function that makes that pytree from the host object, for states whose
        structure depends on what was under way.

    Returns:
      The arrays, as jax arrays in the structure of `target`, and the host object.

    Raises:
      ValueError: no such step, none is readable, or `target` does not fit.
    """
    steps = self.steps()
    if not steps or (step is not None and step not in steps):
      raise base.InputError(
        f"checkpoint restore: received step {step}, expected one of {steps} in"
        f" {self._directory}; start the run anew if there is none."
      )
    damaged: dict[int, str] = {}
    for candidate in [step] if step is not None else reversed(steps):
      try:
        payload = self._read_host(candidate)
      except Exception as error:  # whatever the readers raise: it is unreadable
        damaged[candidate] = _first_line(error)
        continue
      wanted = target(payload["host"]) if callable(target) else target
      leaves.check_target(candidate, payload["arrays"], wanted)
      try:
        arrays = self._read_arrays(candidate, payload["arrays"], wanted)
      except Exception as error:
        damaged[candidate] = _first_line(error)
        continue
      self._set_aside(damaged, candidate)
      self._restored = candidate
      return arrays, payload["host"]
    raise base.InputError(
      f"checkpoint restore: no readable step in {self._directory}, tried"
      f" {damaged}; remove the folder to start anew."
    )

  def _read_host(self, step: int) -> dict[str, Any]:
    args = self._ocp.args
    payload = self._manager.restore(
      step, args=args.Composite(host=args.JsonRestore())
    ).host
    if not isinstance(payload, dict) or payload.keys() != {"host", "arrays"}:
      raise base.InputError("the host object is not one that save() wrote")
    return payload

  def _read_arrays(self, step: int, table: Mapping[str, Any], target: Any) -> Any:
    wanted = leaves.abstract(leaves.named(target))
    args = self._ocp.args
    one_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    stored = {
      name: leaf.update(sharding=leaf.sharding or one_device)
      for name, leaf in wanted.items()
      if leaf.size
    }
    restored = self._manager.restore(
      step, args=args.Composite(arrays=args.StandardRestore(stored))
    ).arrays
    placed = []
    for name, leaf in wanted.items():
      array = restored[name] if leaf.size else np.zeros(leaf.shape, leaf.dtype)
      checksum = table[name]["crc32"]
      if checksum is not None and leaves.checksum(array) != checksum:
        raise base.InputError(f"checksum of {name} differs from the one saved")
      placed.append(leaves.placed(array, leaf.sharding))
    return jax.tree.unflatten(jax.tree.structure(target), placed)

  def _set_aside(self, damaged: Mapping[int, str], used: int) -> None:
    for step, reason in damaged.items():
      aside = self._directory / f"damaged_{step}"
      warnings.warn(
        f"checkpoint restore: step {step} in {self._directory} cannot be read"
        f" ({reason}); moved to {aside.name}, continuing from step {used}.",
        RuntimeWarning,
        stacklevel=3,
      )
      if not aside.exists():
        (self._directory / str(step)).rename(aside)
    if damaged:
      self._manager.reload()


def fingerprint(models: Any) -> int:
  """A number that tells parameters of equal shapes apart, from a row of each leaf.

  Args:
    models: pytree of arrays; what other processes hold is left out.
  """
  found = 0
  for name, leaf in leaves.named(models).items():
    if not leaves.is_whole(leaf):
      continue
    data = np.asarray(leaf[:1] if leaf.ndim > 1 else leaf).tobytes()
    found = zlib.crc32(data, zlib.crc32(name.encode(), found))
  return found


def check_fingerprint(saved: int | None, own: int) -> None:
  """Refuses a checkpoint of other models; their rows in flight would go on here.

  Args:
    saved: `fingerprint` of the models that it was taken with; None was not noted.
    own: that of the models of this run.

  Raises:
    ValueError: they differ.
  """
  if saved not in (None, own):
    raise base.InputError(
      f"checkpoint restore: it was taken with other models (fingerprint {saved},"
      f" expected {own}): the weights of target or first draft have changed since."
      " Continue with the files that the run began with, or in a new directory."
    )


def _copied_json(value: Mapping[str, Any]) -> dict[str, Any]:
  try:
    return json.loads(json.dumps(value))
  except (TypeError, ValueError) as error:
    raise base.InputError(
      f"checkpoint save: received a host object that is no JSON ({error}),"
      " expected text, numbers, booleans, None, lists and dicts; convert it."
    ) from error


def _cause(error: Exception) -> str:
  """The system's own words, which tensorstore puts far behind."""
  codes = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)
  words = [os.strerror(code) for code in codes if os.strerror(code) in str(error)]
  return words[0] if words else _first_line(error)


def _first_line(error: Exception) -> str:
  text = str(error).strip().splitlines()
  return f"{type(error).__name__}: {text[0][:200] if text else ''}"
