"""Checkpoints: everything a run needs to continue, written in one atomic step.

A step holds a pytree of arrays (draft, optimiser, buffer, rows in flight) and a JSON
object for the host (stream position, schedule). Orbax's CheckpointManager writes both
into a temporary folder and renames it, so a killed process leaves either the whole step
or none of it. The JSON item also holds the shape, dtype and CRC-32 of every array, so
that a damaged step is detected; the number of rows of each log, so that a run continues
with logs that fit; and a fingerprint of the models.

`save` waits only for a copy in host memory. One low-priority thread computes the
checksums and writes, one step after another, so that serving keeps its core.
"""

import concurrent.futures
import contextlib
import errno
import json
import logging
import os
import shutil
import sys
import threading
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from osd_jax import background, base
from osd_jax.runs.log import PRIVATE_FOLDER, JsonLines

KEEP = 2  # steps on disk: if the newest one is damaged, the one before is used
_ARRAYS, _HOST = "arrays", "host"


# What to do when the weights of a run have changed.
OTHER_WEIGHTS = (
  "Continue with the original files, or begin in a new directory. The draft of that run"
  " is a good start there: name its draft.safetensors as PairConfig.draft, with"
  " PairConfig.sibling_draft = True if it is attached to a tuned target."
)


class Checkpointer:
  """Saves and restores the steps in one folder; only one process may write there.

  If a step cannot be written, `due` becomes true, and the next call of `save`, `wait`,
  `restore` or `close` raises the error.
  """

  def __init__(
    self,
    directory: str | Path,
    every: int = 50,
    logs: Sequence[JsonLines] = (),
    models: Mapping[str, Any] | None = None,
  ):
    """Opens a folder of steps, and creates it if needed.

    A checkpoint is due after `every` finished requests. `restore` cuts the logs back to
    the rows that they had. `models` are parameters that a run must continue with, by
    name; see `fingerprint`.
    """
    import orbax.checkpoint as ocp  # imported late, because it takes 0.3 s

    self._every, self._logs = every, logs
    self._models = {name: fingerprint(one) for name, one in (models or {}).items()}
    self._directory = Path(directory).absolute()
    self._directory.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
    self._args = ocp.args
    self._manager = ocp.CheckpointManager(
      self._directory,
      item_names=(_ARRAYS, _HOST),
      options=ocp.CheckpointManagerOptions(
        max_to_keep=KEEP, create=True, enable_async_checkpointing=False
      ),
    )
    # Low priority: checksums of a large draft must not take serving's core.
    self._thread = background.Worker("checkpoints", low_priority=True)
    # While a step is being written, only the thread may use the manager: orbax's
    # manager is not thread-safe.
    self._writing: tuple[int, concurrent.futures.Future] | None = None
    self._restored: int | None = None

  def __enter__(self) -> "Checkpointer":
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def close(self) -> None:
    """Waits as `wait` does, then stops the thread."""
    # Even if the last step failed, the threads must end, or the process would hang.
    try:
      self.wait()
    finally:
      self._thread.shutdown()
      self._manager.close()

  def wait(self) -> None:
    """Waits until the last saved step is complete on disk.

    Raises:
      InputError: that step cannot be written; older steps are complete.
    """
    if self._writing is None:
      return
    _, future = self._writing
    concurrent.futures.wait([future])
    # Cleared before the error is raised, so that it is raised only once.
    self._writing = None
    future.result()

  def steps(self) -> list[int]:
    """Complete steps on disk, oldest first. Waits for the step being written."""
    self.wait()
    return sorted(self._manager.all_steps())

  def resumed(self, unit: str, total: int | None) -> str:
    """Returns a sentence on where the run continues, or "" for a new run.

    `unit` is the name of one counted thing, such as "request"; `total` is the run's
    length, None if it is unknown.
    """
    if self._restored is None:
      return ""
    where = self._directory / str(self._restored)
    of_all = "" if total is None else f" of {total}"
    return f"continues at {unit} {self._restored}{of_all} from checkpoint {where}"

  def due(self, finished: int) -> bool:
    """Whether a checkpoint is due after `finished` requests. Never waits.

    Counts from the newest saved step, also while it is being written, so a run that
    finishes several requests in one call cannot miss a checkpoint. Returns True at
    once if that step could not be written, because `save` then raises the error.
    """
    if self._writing is None:
      newest = max(self.steps(), default=0)
    else:
      newest, future = self._writing
      if future.done() and future.exception() is not None:
        return True
    return finished - newest >= self._every

  def save(
    self, step: int, tree: Any, host: Mapping[str, Any], replace: bool = False
  ) -> None:
    """Copies one step and queues it for writing, unless it is the newest step.

    Later changes to `tree` and `host` do not reach the step. If the step before is
    still being written, `save` waits for it.

    Args:
      step: its number, greater than every step on disk.
      tree: pytree of jax or numpy arrays.
      host: JSON object. Tuples are restored as lists, and keys as text.
      replace: writes the newest step again. If the process is killed meanwhile, the
        step before is the newest one.

    Raises:
      InputError: the step before could not be written. Older steps are complete.
      ValueError: a leaf is not an array, or there is a newer step.
    """
    latest = max(self.steps(), default=-1)
    if step == latest and not replace:
      return
    if step == latest:
      self._manager.delete(step)
    if step < latest:
      raise ValueError(f"checkpoint save: step {step} is older than the last, {latest}")
    leaves = _named(tree)
    # The rows that a step counts must be on disk before the step is.
    for log in self._logs:
      log.sync()
    facts = {
      # A copy, because the caller may change it while the step is written.
      "host": json.loads(json.dumps(host)),
      "arrays": _described(leaves),
      "log_rows": {log.path.name: log.rows for log in self._logs},
      "models": self._models,
    }
    copied = _copied(leaves)
    self._writing = step, self._thread.submit(self._write, step, latest, copied, facts)
    del copied  # so that nothing but the thread holds it
    self._thread.submit(background.return_memory)
    # With several processes orbax runs collectives, which need the same order on all.
    if jax.process_count() > 1:
      self.wait()

  def remove_older(self) -> None:
    """Removes all but the newest step, for data that must leave the disk."""
    for step in self.steps()[:-1]:
      self._manager.delete(step)
    for path in self._directory.glob("unused_*"):
      shutil.rmtree(path)

  def _write(
    self, step: int, latest: int, arrays: Mapping[str, Any], facts: Mapping[str, Any]
  ) -> None:
    # Checksums are of the copy in memory, so they also detect errors of the write.
    checksums = {
      name: _checksum(leaf) if _is_whole(leaf) else None
      for name, leaf in arrays.items()
    }
    payload = {**facts, "checksums": checksums}
    # Orbax refuses empty arrays; `_read_arrays` makes them from their shape.
    non_empty = {name: leaf for name, leaf in arrays.items() if leaf.size}
    whole = self._args.Composite(
      arrays=self._args.StandardSave(non_empty), host=self._args.JsonSave(payload)
    )
    try:
      with _without_echoes():
        self._manager.save(step, args=whole, force=True)
    except Exception as error:  # orbax and tensorstore raise many types
      good = f"is step {latest}" if latest >= 0 else "does not exist"
      raise base.InputError(
        f"checkpoint save: step {step} cannot be written to {self._directory}"
        f" ({_cause(error)}); the last good one {good}. Free some space or allow"
        " writing there, then repeat the command to continue from that step."
      ) from error

  def restore(self, like: Any) -> tuple[Any, dict[str, Any]] | None:
    """Reads the newest readable step whose logs are on disk, and cuts the logs to it.

    A newer step that cannot be used is reported by a warning and renamed to
    `unused_<step>`, so that the run can write that step again. Without any step the
    logs are emptied: a run that was killed before its first checkpoint left rows.

    Args:
      like: pytree of arrays or `jax.ShapeDtypeStruct` with the saved shapes and
        dtypes. Arrays are restored with the sharding of their leaf; a leaf without
        one, or an uncommitted array, gives an uncommitted array. It may also be a
        function from the host object to that pytree, for states whose structure
        depends on what was in progress.

    Returns:
      The arrays, as jax arrays in the structure of `like`, and the host object. None if
      there is no step.

    Raises:
      InputError: no step can be used, or the newest one was taken with other models or
        does not fit `like`.
    """
    # Newest first. An older step only loses some requests; refusing to start would lose
    # the run.
    unused: dict[int, str] = {}
    for step in reversed(self.steps()):
      try:
        args = self._args.Composite(host=self._args.JsonRestore())
        payload = self._manager.restore(step, args=args).host
        self._check_logs(payload["log_rows"])
        shapes = like(payload["host"]) if callable(like) else like
        self._check_fits(step, payload, shapes)
        arrays = self._read_arrays(step, payload["checksums"], shapes)
      except _MisfitError:
        raise  # an error of the config, which must not set the step aside
      except Exception as error:  # orbax raises many types for unreadable files
        unused[step] = _first_line(error)
        continue
      self._set_aside(unused, step)
      for log in self._logs:
        log.truncate(payload["log_rows"][log.path.name])
      self._restored = step
      return arrays, payload["host"]
    if unused:
      reasons = "; ".join(f"step {step}: {reason}" for step, reason in unused.items())
      raise base.InputError(
        f"checkpoint restore: no step in {self._directory} can be used ({reasons})."
        " Put the files back as they were, or begin again with overwrite = True."
      )
    for log in self._logs:
      log.truncate(0)
    return None

  def _check_logs(self, expected: Mapping[str, int]) -> None:
    for log in self._logs:
      if log.rows < expected[log.path.name]:
        raise base.InputError(
          f"{log.path} has {log.rows} of the {expected[log.path.name]} rows that it had"
        )

  def _check_fits(self, step: int, payload: Mapping[str, Any], like: Any) -> None:
    """Refuses a checkpoint of other models; its rows in flight would continue here."""
    saved = payload.get("models")
    if saved is None:
      raise _MisfitError(
        f"checkpoint restore: step {step} in {self._directory} was written by another"
        " version of osd_jax. Continue with that version, or begin in a new directory."
      )
    changed = [
      name for name, weights in self._models.items() if saved.get(name) != weights
    ]
    if changed:
      raise _MisfitError(
        f"checkpoint restore: {self._directory} was written with other weights of the"
        f" {' and the '.join(changed)}; its records and rows in flight do not fit"
        f" these. {OTHER_WEIGHTS}"
      )
    expected, received = _described(_named(like)), payload["arrays"]
    faults = [
      f"{name}: expected {expected.get(name, 'nothing')}, found"
      f" {received.get(name, 'nothing')}"
      for name in sorted(expected.keys() | received.keys())
      if expected.get(name) != received.get(name)
    ]
    if faults:
      more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
      raise _MisfitError(
        f"checkpoint restore: step {step} does not fit this run: "
        + "; ".join(faults[:5])
        + f"{more}. Start with the config that wrote it, or in a new directory."
      )

  def _read_arrays(
    self, step: int, checksums: Mapping[str, int | None], like: Any
  ) -> Any:
    expected = {name: _abstract(leaf) for name, leaf in _named(like).items()}
    one_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    arrays = {
      name: leaf.update(sharding=leaf.sharding or one_device)
      for name, leaf in expected.items()
      if leaf.size
    }
    with _without_echoes():
      restored = self._manager.restore(
        step, args=self._args.Composite(arrays=self._args.StandardRestore(arrays))
      ).arrays
    placed = []
    for name, leaf in expected.items():
      array = restored[name] if leaf.size else np.zeros(leaf.shape, leaf.dtype)
      if checksums[name] is not None and _checksum(array) != checksums[name]:
        raise base.InputError(f"checksum of {name} differs from the one saved")
      placed.append(
        # Uncommitted arrays may meet any mesh inside jit.
        jnp.array(np.asarray(array))
        if leaf.sharding is None
        else jax.device_put(array, leaf.sharding)
      )
    return jax.tree.unflatten(jax.tree.structure(like), placed)

  def _set_aside(self, unused: Mapping[int, str], used: int) -> None:
    for step, reason in unused.items():
      aside = self._directory / f"unused_{step}"
      warnings.warn(
        f"checkpoint restore: step {step} in {self._directory} cannot be used"
        f" ({reason}); renamed to {aside.name}, continuing from step {used}.",
        RuntimeWarning,
        stacklevel=3,
      )
      # An older copy of the same step is kept; it may be worth a look.
      if not aside.exists():
        (self._directory / str(step)).rename(aside)
    if unused:
      self._manager.reload()


class _MisfitError(base.InputError):
  """A readable checkpoint belongs to another run."""


def fingerprint(models: Any) -> int:
  """A checksum of some numbers of every array, to tell models of one shape apart.

  Arrays that are spread over several processes are skipped.
  """
  # A few numbers per array are enough to detect another training, and take no time. A
  # run may go on with another layout of the same target. So those of a matrix are on
  # its diagonal, and kernels that may be joined are skipped.
  joined = {part for pair in base.JOINED.items() for part in (pair[0], *pair[1])}
  total = 0
  for name, leaf in _named(models).items():
    if _is_whole(leaf) and joined.isdisjoint(name.split(".")):
      part = np.asarray(leaf[:8] if leaf.ndim else leaf)
      data = (np.diagonal(part) if leaf.ndim == 2 else part).tobytes()
      # The names are included, so that equal arrays in other places differ.
      total = zlib.crc32(data, zlib.crc32(name.encode(), total))
  return total


# --- Arrays by name -------------------------------------------------------------------


def _named(tree: Any) -> dict[str, Any]:
  """Arrays by dotted path, in the order of `jax.tree.leaves`."""
  leaves = {}
  for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    # A Python number would be restored as an array, and 64 bits as 32: a resumed run
    # would then differ from an uninterrupted one.
    dtype = getattr(leaf, "dtype", None)
    is_kept = dtype is not None and not jax.dtypes.issubdtype(
      dtype, jax.dtypes.extended
    )
    if not is_kept or jax.dtypes.canonicalize_dtype(dtype) != dtype or name in leaves:
      raise ValueError(
        f"checkpoint: {name} is {dtype or type(leaf).__name__}, expected an array of a"
        " dtype that jax keeps, with a path of its own."
      )
    leaves[name] = leaf
  return leaves


def _copied(arrays: Mapping[str, Any]) -> dict[str, Any]:
  """Copies to numpy, or on the device if other processes hold parts of an array."""
  here = {name: leaf for name, leaf in arrays.items() if _is_whole(leaf)}
  # On a CPU, device_get returns views of buffers that may be donated later.
  here = jax.device_get(here)
  return {
    name: np.array(here[name]) if name in here else leaf.copy()
    for name, leaf in arrays.items()
  }


def _described(arrays: Mapping[str, Any]) -> dict[str, str]:
  """Type and shape of each array, such as "float32[2, 3]"."""
  return {
    name: f"{jnp.dtype(leaf.dtype).name}{list(leaf.shape)}"
    for name, leaf in arrays.items()
  }


def _checksum(leaf: Any) -> int:
  # Viewed as bytes, since crc32 does not accept bfloat16.
  data = np.ascontiguousarray(np.asarray(leaf))
  return zlib.crc32(data.reshape(-1).view(np.uint8)) if data.size else 0


def _is_whole(leaf: Any) -> bool:
  return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
  sharding = getattr(leaf, "sharding", None)
  if isinstance(leaf, jax.Array) and not leaf.committed:
    sharding = None
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


# --- Errors ---------------------------------------------------------------------------


def _cause(error: Exception) -> str:
  """The operating system's message, which tensorstore hides in a long text."""
  # tensorstore wraps the message in its own error, without an errno.
  codes = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)
  words = [os.strerror(code) for code in codes if os.strerror(code) in str(error)]
  return words[0] if words else _first_line(error)


def _first_line(error: Exception) -> str:
  text = next(iter(str(error).strip().splitlines()), "")
  text = text.partition(". See full TensorStore details")[0][:200]
  is_ours = isinstance(error, base.InputError)
  return text if is_ours else f"{type(error).__name__}: {text}"


@contextlib.contextmanager
def _without_echoes() -> Iterator[None]:
  """Suppresses orbax's tracebacks of a failed write or read.

  If one array cannot be written or read, orbax closes its event loop while others are
  still in progress. Each of them then prints a traceback from its own thread, coroutine
  or task, after the error that matters has been raised.
  """
  before = sys.unraisablehook

  def hook(echo: Any) -> None:
    code = getattr(echo.object, "cr_code", None)  # a coroutine has one
    is_closed = "Event loop is closed" in str(echo.exc_value)
    if not is_closed and "orbax" not in getattr(code, "co_filename", ""):
      before(echo)

  sys.unraisablehook = hook
  tasks = logging.getLogger("asyncio")
  tasks.addFilter(_is_not_orbax_task)
  older = {thread.ident for thread in threading.enumerate()}
  older.discard(threading.get_ident())

  def keep(record: logging.LogRecord) -> bool:
    """Keeps everything below ERROR, and all records of threads that ran before."""
    return record.levelno < logging.ERROR or record.thread in older

  logger = logging.getLogger("absl")  # orbax logs through absl
  logger.addFilter(keep)
  try:
    yield
    # After a failure these two stay, because more echoes may follow.
    sys.unraisablehook = before
    tasks.removeFilter(_is_not_orbax_task)
  finally:
    logger.removeFilter(keep)


def _is_not_orbax_task(record: logging.LogRecord) -> bool:
  """False for the error of a task of orbax that nobody has awaited."""
  text = record.getMessage()
  return "never retrieved" not in text or "orbax" not in text
