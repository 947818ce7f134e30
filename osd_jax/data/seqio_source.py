"""Examples from TFDS data sets and registered seqio Tasks, as mappings of fields.

seqio and tensorflow are imported only when a task uses them.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from osd_jax import base

Source = Iterator[tuple[str, dict[str, Any]]]  # location, fields


def import_seqio() -> Any:
  """Imports seqio without giving tensorflow the GPU."""
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
  os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # otherwise it prints a notice
  try:
    import seqio
    import tensorflow as tf
  except ImportError as error:
    raise base.MissingExtraError(
      f"TaskConfig: seqio cannot be imported ({error}); files are read without it."
      ' pip install "osd_jax[data]" adds it.'
    ) from error
  # A RuntimeError means that tensorflow has already initialized its devices.
  with contextlib.suppress(RuntimeError):
    tf.config.set_visible_devices([], "GPU")
  return seqio


def tfds_examples(setting: str, name: str, split: str, data_dir: str) -> Source:
  """Yields the examples of a TFDS data set in the order of its files.

  `setting` is named in errors. An empty `data_dir` means TFDS's default.

  Raises:
    InputError: the data set, version or split cannot be read.
  """
  seqio = import_seqio()
  with _errors(setting, f"TFDS set {name!r} in data_dir {data_dir!r}", split):
    source = seqio.TfdsDataSource(name, data_dir or None, {split: split})
    dataset = source.get_dataset(split, shuffle=False)
  for location, raw in _located(dataset, f"tfds.{name}.{split}"):
    yield location, {name: _as_python(value) for name, value in raw.items()}


def task_examples(setting: str, name: str, split: str) -> Source:
  """Yields the examples of a registered seqio Task or Mixture, unshuffled and uncut.

  The fields are the features of the Task. `prompt` and `reference` are the texts of
  its inputs and targets: as they were before tokenization if the Task keeps them
  (`seqio.preprocessors.tokenize` does), otherwise decoded with its vocabularies.

  Raises:
    InputError: there is no such Task or split, or its data cannot be read.
  """
  seqio = import_seqio()
  advice = "; in a gin file, `import` the module that registers it"
  with _errors(setting, f"seqio Task {name!r}", split, advice):
    registered = seqio.get_mixture_or_task(name)
    dataset = registered.get_dataset(None, split, shuffle=False)
  features = registered.output_features
  for location, raw in _located(dataset, f"seqio.{name}.{split}"):
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


@contextlib.contextmanager
def _errors(setting: str, what: str, split: str, advice: str = "") -> Iterator[None]:
  """Turns the many kinds of errors of seqio and TFDS into InputError."""
  try:
    yield
  except Exception as error:
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    raise base.InputError(
      f"{setting}: {what} with split {split!r} cannot be read: {reason}{advice}."
    ) from error
