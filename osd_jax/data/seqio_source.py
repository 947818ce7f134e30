"""Examples from TFDS data sets and registered seqio Tasks, as mappings of fields.

seqio and tensorflow are imported only when a task uses them.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from osd_jax import base

Source = Iterator[tuple[str, dict[str, Any]]]  # location, fields


def import_seqio() -> Any:
  """Imports seqio quietly, without giving tensorflow the GPU.

  Returns:
    The seqio module.

  Raises:
    MissingExtraError: the extra `data` is not installed.
  """
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
  os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # otherwise it prints a notice
  try:
    with _silent_stderr():
      import seqio
      import tensorflow as tf

      # A RuntimeError means that tensorflow has already initialised its devices.
      with contextlib.suppress(RuntimeError):
        tf.config.set_visible_devices([], "GPU")
  except ImportError as error:
    raise base.MissingExtraError(
      f"TaskConfig: seqio cannot be imported ({error}). Install the extra"
      " (pip install 'osd-jax[data]'); JSONL files are read without it."
    ) from error
  return seqio


def tfds_examples(task: str, tfds_name: str, split: str, data_dir: str) -> Source:
  """Yields the examples of a TFDS data set in the order of its files.

  `task` is the name in error messages. An empty `data_dir` means TFDS's default.

  Raises:
    InputError: the data set, version or split cannot be read.
  """
  seqio = import_seqio()
  try:
    source = seqio.TfdsDataSource(tfds_name, data_dir or None, {split: split})
    dataset = source.get_dataset(split, shuffle=False)
  except Exception as error:  # tensorflow_datasets raises many kinds
    raise base.InputError(
      f"TaskConfig.tfds_name (task {task!r}): received {tfds_name!r} with split"
      f" {split!r} and data_dir {data_dir!r}, which cannot be read: {_reason(error)}"
    ) from error
  for location, raw in _located(dataset, f"tfds.{tfds_name}.{split}"):
    yield location, {name: _as_python(value) for name, value in raw.items()}


def task_examples(task: str, seqio_task: str, split: str) -> Source:
  """Yields the examples of a registered seqio Task or Mixture, unshuffled and uncut.

  The fields are the features of the Task. `prompt` and `reference` are the texts of
  its inputs and targets: as they were before tokenisation if the Task keeps them
  (`seqio.preprocessors.tokenize` does), otherwise decoded with its vocabularies.

  Raises:
    InputError: there is no such Task or split, or its data cannot be read.
  """
  seqio = import_seqio()
  try:
    registered = seqio.get_mixture_or_task(seqio_task)
    dataset = registered.get_dataset(None, split, shuffle=False)
  except Exception as error:  # seqio and the Task's own source raise many kinds
    raise base.InputError(
      f"TaskConfig.seqio_task (task {task!r}): received {seqio_task!r} with split"
      f" {split!r}, which cannot be read: {_reason(error)}. Import the module that"
      " registers the Task (in a gin file: `import my_tasks`)."
    ) from error
  features = registered.output_features
  for location, raw in _located(dataset, f"seqio.{seqio_task}.{split}"):
    fields = {name: _as_python(value) for name, value in raw.items()}
    for field, feature in (("prompt", "inputs"), ("reference", "targets")):
      if feature in raw:
        # Prefer the original text: decoding ids loses spaces and unknown characters.
        text = fields.get(f"{feature}_pretokenized", fields[feature])
        if not isinstance(text, str):
          text = features[feature].vocabulary.decode(raw[feature].tolist())
        fields[field] = text
    yield location, fields


def _located(dataset: Any, name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
  """Yields every example with "name:number" as its location."""
  for number, raw in enumerate(dataset.as_numpy_iterator(), 1):
    yield f"{name.replace('/', '.')}:{number}", raw


def _as_python(value: Any) -> Any:
  """Converts a numpy value; bytes become text if they are valid UTF-8."""
  value = value.item() if hasattr(value, "item") and value.ndim == 0 else value
  if isinstance(value, bytes):
    with contextlib.suppress(UnicodeDecodeError):
      return value.decode("utf-8")
  return value


def _reason(error: Exception) -> str:
  """Returns the first line of an error's text, or its type if the text is empty."""
  return next(iter(str(error).strip().splitlines()), type(error).__name__)


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
  """Hides what C++ code writes to stderr while it loads, unless loading fails.

  tensorflow reports missing GPUs before it reads its log level.
  """
  if "tensorflow" in sys.modules:
    yield
    return
  sys.stderr.flush()
  original = os.dup(2)
  try:
    with tempfile.TemporaryFile() as sink:
      # Redirecting sys.stderr would not help: C++ writes to the file descriptor.
      os.dup2(sink.fileno(), 2)
      try:
        yield
      except BaseException:
        # A failing import needs its messages, so they are replayed.
        sink.seek(0)
        os.write(original, sink.read())
        raise
  finally:
    os.dup2(original, 2)
    os.close(original)
