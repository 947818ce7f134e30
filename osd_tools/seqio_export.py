"""Registers a task's examples as a seqio Task, for t5x and other users of seqio.

The Task reads its examples through `examples.texts`, so it holds the same examples with
the same ids as a run of this package.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from osd_jax import base
from osd_jax.data import examples
from osd_jax.data.examples import TaskConfig
from osd_jax.data.seqio_source import import_seqio
from osd_jax.data.vocabulary import Vocabulary

_FIELDS = ("inputs", "targets", "example_id", "location")
# The definition of each registered name, to detect a second, different one.
_definitions: dict[str, tuple[Any, ...]] = {}


def register(task: TaskConfig, vocabulary: Vocabulary, name: str | None = None) -> str:
  """Adds a task to `seqio.TaskRegistry`.

  Its examples have `inputs` and `targets` (ids), their texts as `inputs_pretokenized`
  and `targets_pretokenized`, `example_id` and `location`. Both id sequences end in
  end-of-sequence, except the inputs of decoder-only models, which the model continues.
  Cutting to a sequence length keeps the end-of-sequence of inputs but not of targets.
  Unusable examples are left out.

  Args:
    task: source of the examples; its preprocessor is applied.
    vocabulary: encodes prompts and references, and appends end-of-sequence.
    name: the seqio name; None uses `task.name`.

  Returns:
    The seqio name. Registering the same definition again has no effect.

  Raises:
    MissingExtraError: seqio is not installed.
    InputError: the name is registered with another definition, or files are missing.
  """
  seqio = import_seqio()
  name = name or task.name
  identity = (vocabulary.fingerprint, vocabulary.chat_template, vocabulary.variables)
  definition = (task, *identity)
  if name in seqio.TaskRegistry.names():
    if _definitions.get(name) == definition:
      return name
    raise base.InputError(
      f"register: name: {name!r} is already registered with another definition in"
      " seqio; give one of the two another name."
    )
  # Reads one example here, where an error can name the setting.
  next(examples.texts(task), None)
  make = _vocabulary_class()
  add_eos = not vocabulary.is_causal
  seqio.TaskRegistry.add(
    name,
    source=seqio.FunctionDataSource(
      functools.partial(_dataset, task), splits=[task.split]
    ),
    preprocessors=[seqio.preprocessors.tokenize, _append_eos],
    output_features={
      "inputs": seqio.Feature(make(vocabulary, is_prompt=True), add_eos=add_eos),
      "targets": seqio.Feature(make(vocabulary, is_prompt=False), add_eos=True),
    },
  )
  _definitions[name] = definition
  return name


def _dataset(
  task: TaskConfig, split: str, shuffle_files: bool, seed: int | None = None
) -> Any:
  import tensorflow as tf

  del split, shuffle_files, seed  # one split, read in order

  def generate() -> Iterator[dict[str, bytes]]:
    for result in examples.texts(task):
      values = (result.prompt, result.reference, result.example_id, result.location)
      # Encoded here: paths may hold surrogates, which tensorflow cannot encode.
      yield {
        field: value.encode("utf-8", "replace")
        for field, value in zip(_FIELDS, values, strict=True)
      }

  signature = {field: tf.TensorSpec((), tf.string) for field in _FIELDS}
  return tf.data.Dataset.from_generator(generate, output_signature=signature)


def _append_eos(dataset: Any, output_features: Any, sequence_length: Any = None) -> Any:
  """Appends end-of-sequence after cutting inputs, but before cutting targets."""
  import seqio

  # Inputs are complete texts, so they end in end-of-sequence even if they are cut. A
  # cut target does not end there, and a model must not learn that it does.
  cut, whole = ({key: output_features[key]} for key in ("inputs", "targets"))
  dataset = seqio.preprocessors.append_eos_after_trim(dataset, cut, sequence_length)
  return seqio.preprocessors.append_eos(dataset, whole)


@functools.cache
def _vocabulary_class() -> Any:
  """Returns a seqio.Vocabulary that calls ours.

  seqio's own SentencePieceVocabulary encodes in tensorflow-text, whose copy of the
  SentencePiece library resolves ties between segmentations of equal score differently
  ("-------" is one such text), so training and serving would see different ids.
  """
  import seqio
  import tensorflow as tf

  class SeqioVocabulary(seqio.Vocabulary):
    """A `Vocabulary` in seqio's interface, for prompts or for other text."""

    def __init__(self, vocabulary: Vocabulary, is_prompt: bool):
      super().__init__()
      self.vocabulary, self.is_prompt = vocabulary, is_prompt

    bos_id = property(lambda self: None)
    eos_id = property(lambda self: self.vocabulary.eos_ids[0])
    unk_id = property(lambda self: self.vocabulary.processor.unk_id())
    _base_vocab_size = property(lambda self: self.vocabulary.size)

    def __eq__(self, other: object) -> bool:
      return (
        isinstance(other, SeqioVocabulary)
        and self.vocabulary == other.vocabulary
        and self.is_prompt == other.is_prompt
      )

    def __hash__(self) -> int:
      return hash((self.vocabulary.fingerprint, self.is_prompt))

    def _encode(self, s: str) -> Sequence[int]:
      if self.is_prompt and self.vocabulary.is_causal:
        return self.vocabulary.encode_prompt(s).tolist()
      return self.vocabulary.encode(s)  # the Task appends end-of-sequence

    def _decode(self, ids: Iterable[int]) -> str:
      return self.vocabulary.decode(ids)

    def _encode_tf(self, s: Any) -> Any:
      ids = tf.numpy_function(
        lambda text: np.asarray(self._encode(_to_text(text)), np.int32), [s], tf.int32
      )
      # numpy_function loses the rank, which seqio's cutting needs.
      ids.set_shape([None])
      return ids

    def _decode_tf(self, ids: Any) -> Any:
      return tf.numpy_function(lambda row: self.decode(row).encode(), [ids], tf.string)

  return SeqioVocabulary


def _to_text(value: bytes | np.ndarray) -> str:
  """Decodes a string tensor, which numpy_function passes as bytes or as an array."""
  return (value if isinstance(value, bytes) else value.item()).decode("utf-8")
