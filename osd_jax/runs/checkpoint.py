"""Checkpoints: everything a run needs to continue, written in one atomic step.

A step holds a pytree of arrays (draft, optimiser, buffer, rows in flight) and a JSON
object for the host (stream position, schedule, lengths of the logs). Orbax's
CheckpointManager writes both into a temporary folder and renames it, so a killed
process leaves either the whole step or none of it. The JSON item also holds the shape,
dtype and CRC-32 of every array: a step that was damaged later is detected and skipped.

`save` waits only for a copy in host memory. One low-priority thread computes the
checksums and writes, one step after another, so that serving keeps its core.
"""

import concurrent.futures
import contextlib
import errno
import json
import logging
import os
import sys
import threading
import warnings
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from osd_jax import background, base

KEEP = 2  # steps on disk: if the newest one is damaged, the one before is used
_ARRAYS, _HOST = "arrays", "host"


class Checkpointer:
  """Saves and restores the steps in one folder; only one process may write there.

  If a step cannot be written, `due` becomes true, and the next call of `save`, `wait`,
  `restore` or `close` raises the error.
  """

  def __init__(self, directory: str | Path, every: int = 50):
    """Opens a folder of steps, and creates it if needed.

    Args:
      directory: the folder that holds one folder per step.
      every: a checkpoint is due after this many finished requests.
    """
    import orbax.checkpoint as ocp  # imported late, because it takes 0.3 s

    self._every = every
    self._directory = Path(directory).absolute()
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
    """Waits for the step being written, then stops the thread.

    Raises:
      InputError: that step cannot be written; older steps are complete.
    """
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
    _, written = self._writing
    concurrent.futures.wait([written])
    # Cleared before the error is raised, so that it is raised only once.
    self._writing = None
    written.result()

  def steps(self) -> list[int]:
    """Complete steps on disk, oldest first. Waits for the step being written."""
    self.wait()
    return sorted(self._manager.all_steps())

  def latest_step(self) -> int | None:
    """The newest complete step, or None. Waits like `steps`."""
    return max(self.steps(), default=None)

  def resumed(self, unit: str, total: int | None) -> str:
    """Returns a sentence on where the run continues, or "" for a new run.

    Args:
      unit: name of one counted thing, such as "request".
      total: the run's length; None if it is unknown.
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
      newest = self.latest_step() or 0
    else:
      newest, written = self._writing
      if written.done() and written.exception() is not None:
        return True
    return finished - newest >= self._every

  def save(self, step: int, tree: Any, host: Mapping[str, Any]) -> None:
    """Copies one step and queues it for writing.

    Later changes to `tree` and `host` do not reach the step. If the step before is
    still being written, `save` waits for it.

    Args:
      step: its number, greater than every step on disk.
      tree: pytree of jax or numpy arrays.
      host: JSON object. Tuples are restored as lists, and keys as text.

    Raises:
      InputError: a leaf is not an array, `host` is not JSON, `step` is not new, or the
        step before could not be written. Older steps are complete in any case.
    """
    latest = self.latest_step()
    if step < 0 or (latest is not None and step <= latest):
      raise base.InputError(
        f"checkpoint save: received step {step}, expected one greater than the"
        f" latest, {latest}, in {self._directory}; continue from the latest step"
        " or remove the newer ones."
      )
    named = _named(tree)
    _check_plain(named)
    copied = _copied(named), _copied_json(host)
    self._writing = step, self._thread.submit(self._write, step, latest, *copied)
    # With several processes orbax runs collectives, which need the same order on all.
    if jax.process_count() > 1:
      self.wait()

  def _write(
    self,
    step: int,
    latest: int | None,
    arrays: Mapping[str, Any],
    host: Mapping[str, Any],
  ) -> None:
    # Checksums are of the copy in memory, so they also detect errors of the write.
    payload = {"host": host, "arrays": _described(arrays)}
    # Orbax refuses empty arrays; `_read_arrays` makes them from their shape.
    stored = {name: leaf for name, leaf in arrays.items() if leaf.size}
    whole = self._args.Composite(
      arrays=self._args.StandardSave(stored), host=self._args.JsonSave(payload)
    )
    try:
      with _without_echoes():
        self._manager.save(step, args=whole, force=True)
    except Exception as error:  # orbax and tensorstore raise many types
      raise base.InputError(
        f"checkpoint save: step {step} cannot be written to {self._directory}"
        f" ({_cause(error)}); the last good one is step {latest}. Free some space or"
        " allow writing there, then repeat the command to continue from that step."
      ) from error

  def restore(self, step: int | None, like: Any) -> tuple[Any, dict[str, Any]]:
    """Reads one step.

    With `step=None` the newest readable step is used. A newer step that cannot be
    read is reported by a warning and renamed to `damaged_<step>`, so that the run can
    write that step again.

    Args:
      step: the step to read, or None.
      like: pytree of arrays or `jax.ShapeDtypeStruct` with the saved shapes and
        dtypes. Arrays are restored with the sharding of their leaf; a leaf without
        one, or an uncommitted array, gives an uncommitted array. It may also be a
        function from the host object to that pytree, for states whose structure
        depends on what was in progress.

    Returns:
      The arrays, as jax arrays in the structure of `like`, and the host object.

    Raises:
      InputError: the step does not exist, no step is readable, or `like` does not fit.
    """
    steps = self.steps()
    if not steps or (step is not None and step not in steps):
      raise base.InputError(
        f"checkpoint restore: received step {step}, expected one of {steps} in"
        f" {self._directory}; start the run again if there is none."
      )
    # Newest first. An older step only loses some requests; refusing to start would lose
    # the run.
    damaged: dict[int, str] = {}
    for candidate in [step] if step is not None else reversed(steps):
      try:
        payload = self._read_host(candidate)
      except Exception as error:  # orbax raises many types for unreadable files
        damaged[candidate] = _first_line(error)
        continue
      wanted = like(payload["host"]) if callable(like) else like
      # A mismatch is an error of the config. It must not set the step aside.
      _check_fits(candidate, payload["arrays"], wanted)
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
      f" {damaged}; remove the folder to start again."
    )

  def _read_host(self, step: int) -> dict[str, Any]:
    payload = self._manager.restore(
      step, args=self._args.Composite(host=self._args.JsonRestore())
    ).host
    if not isinstance(payload, dict) or payload.keys() != {"host", "arrays"}:
      raise base.InputError("the host object was not written by save()")
    return payload

  def _read_arrays(self, step: int, table: Mapping[str, Any], like: Any) -> Any:
    wanted = {name: _abstract(leaf) for name, leaf in _named(like).items()}
    one_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    stored = {
      name: leaf.update(sharding=leaf.sharding or one_device)
      for name, leaf in wanted.items()
      if leaf.size
    }
    restored = self._manager.restore(
      step, args=self._args.Composite(arrays=self._args.StandardRestore(stored))
    ).arrays
    placed = []
    for name, leaf in wanted.items():
      array = restored[name] if leaf.size else np.zeros(leaf.shape, leaf.dtype)
      checksum = table[name]["crc32"]
      if checksum is not None and _checksum(array) != checksum:
        raise base.InputError(f"checksum of {name} differs from the one saved")
      placed.append(
        # Uncommitted arrays may meet any mesh inside jit.
        jnp.array(np.asarray(array))
        if leaf.sharding is None
        else jax.device_put(array, leaf.sharding)
      )
    return jax.tree.unflatten(jax.tree.structure(like), placed)

  def _set_aside(self, damaged: Mapping[int, str], used: int) -> None:
    for step, reason in damaged.items():
      aside = self._directory / f"damaged_{step}"
      warnings.warn(
        f"checkpoint restore: step {step} in {self._directory} cannot be read"
        f" ({reason}); renamed to {aside.name}, continuing from step {used}.",
        RuntimeWarning,
        stacklevel=3,
      )
      # An older damaged copy of the same step is kept; it may be worth a look.
      if not aside.exists():
        (self._directory / str(step)).rename(aside)
    if damaged:
      self._manager.reload()


def fingerprint(models: Any) -> int:
  """A checksum of the first row of every array, to tell models of one shape apart.

  Arrays that are spread over several processes are skipped.
  """
  # One row per array is enough to detect another training, and takes no time.
  found = 0
  for name, leaf in _named(models).items():
    if not _is_whole(leaf):
      continue
    data = np.asarray(leaf[:1] if leaf.ndim > 1 else leaf).tobytes()
    # The names are included, so that equal arrays in other places differ.
    found = zlib.crc32(data, zlib.crc32(name.encode(), found))
  return found


def check_fingerprint(saved: int | None, own: int) -> None:
  """Refuses a checkpoint of other models, whose rows in flight would continue here.

  Raises:
    InputError: the fingerprints differ. A `saved` of None is accepted.
  """
  if saved not in (None, own):
    raise base.InputError(
      f"checkpoint restore: it was taken with other models (fingerprint {saved},"
      f" expected {own}): the weights of the target or of the first draft have changed."
      " Continue with the original files, or start in a new directory."
    )


# --- Arrays by name -------------------------------------------------------------------


def _named(tree: Any) -> dict[str, Any]:
  """Leaves by dotted path, in the order of `jax.tree.leaves`."""
  paths = jax.tree_util.tree_flatten_with_path(tree)[0]
  found = {
    jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in paths
  }
  if len(found) != len(paths) or not found:
    raise base.InputError(
      f"checkpoint: received a tree of {len(paths)} leaves with {len(found)}"
      " distinct paths, expected at least one leaf and no '.' that makes two"
      " paths equal; rename the keys."
    )
  return found


def _check_plain(arrays: Mapping[str, Any]) -> None:
  for name, leaf in arrays.items():
    # Orbax would store a Python scalar, and restore it as an array: a resumed run would
    # then differ from an uninterrupted one.
    plain = isinstance(leaf, (jax.Array, np.ndarray, np.generic))
    if plain and not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
      if jax.dtypes.canonicalize_dtype(leaf.dtype) == leaf.dtype:
        continue
    typed = hasattr(leaf, "dtype")
    found = f"{leaf.dtype.name} array" if typed else type(leaf).__name__
    raise base.InputError(
      f"checkpoint save: received {found} at {name}, expected an array of a dtype"
      " that jax keeps (at most 32 bits, no typed random key); put Python values"
      " into `host`."
    )


def _copied(arrays: Mapping[str, Any]) -> dict[str, Any]:
  """Copies to numpy, or on the device if other processes hold parts of an array."""
  here = {name: leaf for name, leaf in arrays.items() if _is_whole(leaf)}
  # On a CPU, device_get returns views of buffers that may be donated later.
  here = jax.device_get(here)
  return {
    name: np.array(here[name]) if name in here else leaf.copy()
    for name, leaf in arrays.items()
  }


def _described(arrays: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
  """Shape, dtype and checksum of each array; no checksum if it is not whole here."""
  return {
    name: {
      "shape": list(leaf.shape),
      "dtype": leaf.dtype.name,
      "crc32": _checksum(leaf) if _is_whole(leaf) else None,
    }
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


def _check_fits(step: int, table: Mapping[str, Any], like: Any) -> None:
  """Raises InputError unless names, shapes and dtypes are those saved."""
  wanted = {
    name: f"{jnp.dtype(leaf.dtype).name}{list(leaf.shape)}"
    for name, leaf in _named(like).items()
  }
  saved = {name: f"{row['dtype']}{row['shape']}" for name, row in table.items()}
  faults = [
    f"{name}: expected {wanted.get(name, 'nothing')}, found"
    f" {saved.get(name, 'nothing')}"
    for name in sorted(wanted.keys() | saved.keys())
    if wanted.get(name) != saved.get(name)
  ]
  if faults:
    more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
    raise base.InputError(
      f"checkpoint restore: step {step} does not fit this run: "
      + "; ".join(faults[:5])
      + f"{more}. Start with the config that wrote it, or in a new directory."
    )


def _copied_json(value: Mapping[str, Any]) -> dict[str, Any]:
  try:
    return json.loads(json.dumps(value))
  except (TypeError, ValueError) as error:
    raise base.InputError(
      f"checkpoint save: received a host object that is not JSON ({error}),"
      " expected text, numbers, booleans, None, lists and dicts; convert it."
    ) from error


# --- Errors ---------------------------------------------------------------------------


def _cause(error: Exception) -> str:
  """The operating system's message, which tensorstore hides in a long text."""
  # tensorstore wraps the message in its own error, without an errno.
  codes = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)
  words = [os.strerror(code) for code in codes if os.strerror(code) in str(error)]
  return words[0] if words else _first_line(error)


def _first_line(error: Exception) -> str:
  text = str(error).strip().splitlines()
  return f"{type(error).__name__}: {text[0][:200] if text else ''}"


@contextlib.contextmanager
def _without_echoes() -> Iterator[None]:
  """Suppresses orbax's tracebacks of a failed write.

  If one array cannot be written, orbax closes its event loop while the other arrays
  are still being written. Each of them then prints a traceback from its own thread,
  after the error that matters has been raised.
  """
  before = sys.unraisablehook

  def hook(echo: Any) -> None:
    closed = "Event loop is closed" in str(echo.exc_value)
    if not (isinstance(echo.exc_value, RuntimeError) and closed):
      before(echo)

  sys.unraisablehook = hook
  older = {thread.ident for thread in threading.enumerate()}
  older.discard(threading.get_ident())

  def keep(record: logging.LogRecord) -> bool:
    """Keeps everything below ERROR, and all records of threads that ran before."""
    return record.levelno < logging.ERROR or record.thread in older

  logger = logging.getLogger("absl")  # orbax logs through absl
  logger.addFilter(keep)
  try:
    yield
    # After a failure the hook stays, because more echoes may follow.
    sys.unraisablehook = before
  finally:
    logger.removeFilter(keep)
