"""Tasks: registration with seqio, by an explicit call.

`register` adds a `TaskConfig` to seqio: source, then prompt and reference, then
tokens, then end-of-sequence. `texts` reads the same source without tokens. seqio
and tensorflow are imported only when they are needed.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from osd_jax import base
from osd_jax.data.sources import (
  TaskConfig,
  Text,
  generated_rows,
  line_text,
  paths,
  raw_text,
  source_lines,
)
from osd_jax.data.vocabulary import Vocabulary, as_seqio


def texts(task: TaskConfig) -> Iterator[Text]:
  """Reads a task in order, unusable examples included, `rows` usable ones at most.

  Args:
    task: what to read. JSONL and generated topics need neither seqio nor
      tensorflow.

  Yields:
    Every example until so many are usable.

  Raises:
    InputError: missing files.
  """
  usable = 0
  readers = {"tfds": _tfds_texts, "generated": _generated_texts, "jsonl": _jsonl_texts}
  for text in readers[task.kind](task):
    if usable == task.rows:
      return
    usable += not text.problem
    yield text


def _jsonl_texts(task: TaskConfig) -> Iterator[Text]:
  for line in source_lines(task):
    yield line_text(task, line.location, line.data)


def _generated_texts(task: TaskConfig) -> Iterator[Text]:
  for location, fields in generated_rows(task):
    yield raw_text(task, location, fields)


def import_seqio() -> Any:
  """Imports seqio quietly, with tensorflow kept off the accelerators.

  Returns:
    The seqio module.

  Raises:
    ImportError: the extra `data` is not installed.
  """
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
  os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # else it prints a notice
  try:
    with _silent_stderr():
      import seqio
      import tensorflow as tf

      with contextlib.suppress(RuntimeError):  # it already chose its devices
        tf.config.set_visible_devices([], "GPU")
  except ImportError as error:
    raise base.MissingExtraError(
      f"tasks: seqio cannot be imported ({error}). Install the extra"
      " (pip install 'osd-jax[data]'), or set reader='plain', the default, which"
      " reads JSONL and generated topics without it."
    ) from error
  return seqio


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
  """Keeps what C++ writes to stderr while it loads, and shows it only on an error.

  tensorflow reports missing GPUs before it reads its log level.
  """
  if "tensorflow" in sys.modules:
    yield
    return
  sys.stderr.flush()
  kept = os.dup(2)
  try:
    with tempfile.TemporaryFile() as sink:
      os.dup2(sink.fileno(), 2)
      try:
        yield
      except BaseException:
        sink.seek(0)
        os.write(kept, sink.read())
        raise
  finally:
    os.dup2(kept, 2)
    os.close(kept)


def registered_name(task: TaskConfig, vocabulary: Vocabulary) -> str:
  """Returns a seqio name that no other definition of `task.name` can take."""
  definition = repr((task, vocabulary.fingerprint, vocabulary.chat_template))
  return f"{task.name}:{hashlib.sha256(definition.encode()).hexdigest()[:12]}"


def register(task: TaskConfig, vocabulary: Vocabulary, name: str | None = None) -> str:
  """Adds a task to `seqio.TaskRegistry`.

  Its examples hold `inputs` and `targets` (ids, each ending in end-of-sequence but for
  the inputs of decoder-only models;
  a sequence length cuts inputs before it and targets through it), their texts
  as `inputs_pretokenized` and `targets_pretokenized`, `row_id` and `location`.
  Unusable lines are left out.

  Args:
    task: what to register.
    vocabulary: writes the ids.
    name: the seqio name; None takes `task.name`.

  Returns:
    The seqio name. Registering the same definition again changes nothing.

  Raises:
    ImportError: seqio is not installed.
    ValueError: the name stands for another definition, or files are missing.
  """
  seqio = import_seqio()
  name = name or task.name
  definition = (task, vocabulary.fingerprint, vocabulary.chat_template)
  if name in seqio.TaskRegistry.names():
    if _DEFINITIONS.get(name) == definition:
      return name
    raise base.InputError(
      f"register: name: {name!r} already stands for another definition in seqio"
      f" ({_DEFINITIONS.get(name, 'made elsewhere')}); received {definition}. Give"
      " one of the two another name."
    )
  if task.kind == "jsonl":
    paths(task)  # here, not inside tensorflow, where its error would be another
  ends = not vocabulary.is_causal  # a decoder-only model writes on
  prompts = seqio.Feature(as_seqio(vocabulary, is_prompt=True), add_eos=ends)
  answers = seqio.Feature(as_seqio(vocabulary), add_eos=True)
  seqio.TaskRegistry.add(
    name,
    source=_seqio_source(task),
    preprocessors=[
      _to_texts(task),
      _keep_usable(task.rows),
      seqio.preprocessors.tokenize,
      _append_eos,
    ],
    output_features={"inputs": prompts, "targets": answers},
  )
  _DEFINITIONS[name] = definition
  return name


_CHUNK = 256  # lines that cross between tensorflow and Python at once
# Features of an example while it is read, in the order of the fields of Text.
_FIELDS = ("location", "row_id", "inputs", "targets", "problem")
_DEFINITIONS: dict[str, tuple[Any, ...]] = {}  # what each seqio name stands for


def _seqio_source(task: TaskConfig) -> Any:
  """TFDS as it is; JSON lines as elements with `location` and `data`."""
  import seqio
  import tensorflow as tf

  if task.kind == "tfds":
    splits = {task.split: task.split}
    return seqio.TfdsDataSource(task.tfds_name, task.data_dir or None, splits)

  def chunks() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    lines = source_lines(task)
    while chunk := list(itertools.islice(lines, _CHUNK)):
      yield _strings(x.location for x in chunk), _strings(x.data for x in chunk)

  def dataset_fn(split: str, shuffle_files: bool, seed: int | None = None) -> Any:
    del split, shuffle_files, seed  # one split, read in order
    spec = tf.TensorSpec((None,), tf.string)
    dataset = tf.data.Dataset.from_generator(chunks, output_signature=(spec, spec))
    return dataset.map(
      lambda location, data: {"location": location, "data": data}
    ).unbatch()

  return seqio.FunctionDataSource(dataset_fn, splits=[task.split])


def _tfds_texts(task: TaskConfig) -> Iterator[Text]:
  import_seqio()
  try:
    dataset = _seqio_source(task).get_dataset(task.split, shuffle=False)
  except Exception as error:  # tensorflow_datasets raises many kinds
    raise base.InputError(
      f"TaskConfig.tfds_name (task {task.name!r}): received {task.tfds_name!r} with"
      f" split {task.split!r} and data_dir {task.data_dir!r}, which cannot be read:"
      f" {str(error).strip().splitlines()[0]}"
    ) from error
  for example in _to_texts(task)(dataset).as_numpy_iterator():
    yield Text(*(example[field].decode() for field in _FIELDS))


def _to_texts(task: TaskConfig) -> Callable[[Any], Any]:
  """The first seqio preprocessor: raw elements to the fields of `Text`."""
  import tensorflow as tf

  place = f"tfds.{task.tfds_name}.{task.split}".replace("/", ".")

  def read_lines(locations: np.ndarray, data: np.ndarray) -> list[Text]:
    return [
      line_text(task, location.decode(), line)
      for location, line in zip(locations, data, strict=True)
    ]

  def from_lines(raw: Mapping[str, Any]) -> Any:
    return _in_python(read_lines, [raw["location"], raw["data"]])

  def from_features(number: Any, raw: Mapping[str, Any]) -> Any:
    names = [key for key, value in raw.items() if isinstance(value, tf.Tensor)]

    def read_features(number: int, *values: Any) -> list[Text]:
      fields = dict(zip(names, map(_plain, values), strict=True))
      return [raw_text(task, f"{place}:{number}", fields)]

    return _in_python(read_features, [number, *(raw[key] for key in names)])

  def to_texts(dataset: Any) -> Any:
    if task.kind == "tfds":
      return dataset.enumerate(1).map(from_features).unbatch()
    return dataset.batch(_CHUNK).map(from_lines).unbatch()

  return to_texts


def _in_python(
  read: Callable[..., list[Text]], arguments: Sequence[Any]
) -> dict[str, Any]:
  """Calls `read` inside a tf.data map; returns the fields as [n] strings."""
  import tensorflow as tf

  def fields(*values: Any) -> list[np.ndarray]:
    return [
      _strings(column) for column in zip(*map(dataclasses.astuple, read(*values)))
    ]

  results = tf.numpy_function(fields, arguments, [tf.string] * len(_FIELDS))
  for result in results:
    result.set_shape([None])
  return dict(zip(_FIELDS, results, strict=True))


def _strings(values: Iterable[str | bytes]) -> np.ndarray:
  """Returns [n] bytes as objects: numpy's own strings would lose trailing NULs."""
  encoded = [
    value if isinstance(value, bytes) else value.encode("utf-8", "replace")
    for value in values
  ]
  array = np.empty(len(encoded), object)
  array[:] = encoded
  return array


def _plain(value: Any) -> Any:
  """A TFDS value as Python: text where it is text."""
  value = value.item() if hasattr(value, "item") and value.ndim == 0 else value
  if isinstance(value, bytes):
    with contextlib.suppress(UnicodeDecodeError):
      return value.decode("utf-8")
  return value


def _keep_usable(rows: int | None) -> Callable[[Any], Any]:
  """The second seqio preprocessor: drops unusable rows, keeps the first so many."""

  def keep_usable(dataset: Any) -> Any:
    dataset = dataset.filter(lambda example: example["problem"] == b"").map(
      lambda example: {key: example[key] for key in example if key != "problem"}
    )
    return dataset if rows is None else dataset.take(rows)

  return keep_usable


def _append_eos(dataset: Any, output_features: Any, sequence_length: Any = None) -> Any:
  """The last seqio preprocessor: inputs keep end-of-sequence when cut."""
  import seqio

  cut, whole = ({key: output_features[key]} for key in ("inputs", "targets"))
  dataset = seqio.preprocessors.append_eos_after_trim(dataset, cut, sequence_length)
  return seqio.preprocessors.append_eos(dataset, whole)
