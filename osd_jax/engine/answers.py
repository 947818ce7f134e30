"""What people give and get: a prompt in, its text out, also while it is written."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import numpy as np

from osd_jax import base
from osd_jax.engine.requests import Finished, SamplingConfig


@dataclasses.dataclass(frozen=True)
class Prompt(base.Config):
  """A text to answer, with settings of its own.

  >>> Prompt("Which singers are older than 30?", temperature=0.7, seed=3).sampling.seed
  3

  Attributes:
    text: the prompt.
    temperature: 0 is greedy.
    top_k: 0 keeps all.
    top_p: 1 keeps all.
    seed: of its draws.
    max_length: tokens it may emit; None takes `DecodingConfig.target_length`.
    stop: texts before the first of which the answer ends.
    learn: False keeps it out of the draft's learning.
  """

  text: Annotated[str, base.NonEmpty("a text")]
  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  seed: int = 0
  max_length: base.Count | None = None
  stop: tuple[Annotated[str, base.NonEmpty("a text that is not empty")], ...] = ()
  learn: bool = True

  def checks(self):
    _ = self.sampling  # checks its own fields
    return {}

  @property
  def sampling(self) -> SamplingConfig:
    """How its tokens are drawn."""
    return SamplingConfig(self.temperature, self.top_k, self.top_p, self.seed)

  @classmethod
  def of(cls, given: Any, index: int, settings: Mapping[str, Any]) -> "Prompt":
    """The index-th prompt of a call; a text takes the call's settings and seed + index.

    Raises:
      InputError: it is neither text nor prompt, or a setting cannot be used.
    """
    if isinstance(given, cls):
      return given
    known = {field.name for field in dataclasses.fields(cls)} - {"text"}
    for name in settings:
      if name not in known:
        raise base.InputError(
          f"generate: received a setting {name!r}, expected some of {sorted(known)}."
        )
    prompt = cls(given, **settings)
    return dataclasses.replace(prompt, seed=prompt.sampling.of_request(index).seed)


@dataclasses.dataclass(frozen=True, eq=False)
class Answer:
  """What the target answers to a prompt.

  >>> reason = base.StopReason.EOS
  >>> Answer(0, "Six?", "6", np.array([8, 7, 1]), reason, 2, 3, 1, 4.5, 0)
  Answer('6', EOS, 1.50 tokens per target call)

  Attributes:
    index: place of the prompt in its call.
    prompt: its text.
    text: the answer, up to a stop string.
    tokens: [n] int32, emitted, end-of-sequence included.
    stop_reason: why it ended.
    target_calls: verifications that it took.
    drafted: drafted tokens that were judged.
    accepted: of those, accepted.
    milliseconds: wall time of its prefill and of its share of the calls.
    draft_version: updates that the draft had seen when it ended.
  """

  index: int
  prompt: str
  text: str
  tokens: np.ndarray
  stop_reason: base.StopReason
  target_calls: int
  drafted: int
  accepted: int
  milliseconds: float
  draft_version: int

  @property
  def tokens_per_target_call(self) -> float:
    """Block efficiency: emitted tokens per verification."""
    return len(self.tokens) / max(self.target_calls, 1)

  def __repr__(self) -> str:
    return (
      f"Answer({self.text!r}, {self.stop_reason.name},"
      f" {self.tokens_per_target_call:.2f} tokens per target call)"
    )


class TextSoFar:
  """The text of one request while its tokens are accepted.

  What it gives out is never taken back: the beginning of a stop string, or of a
  character of several tokens, is held until it is clear what becomes of it.
  """

  def __init__(self, decode: Callable[[np.ndarray], str], stop: tuple[str, ...] = ()):
    """Nothing has been read yet.

    Args:
      decode: tokens to text.
      stop: texts before the first of which the answer ends.
    """
    self._decode, self._stop = decode, stop
    self._read = 0  # tokens in which no stop string was found
    self._text, self._given = "", 0

  def watch(self, tokens: np.ndarray) -> int | None:
    """Reads the tokens emitted so far, [n]; see `Request.watch`."""
    if self._stop:
      for count in range(self._read + 1, len(tokens) + 1):
        self._text = self._decode(tokens[:count])
        if self._stop_at() is not None:
          return count
      self._read = len(tokens)
    self._text = self._decode(tokens)
    return None

  def next_piece(self) -> str:
    """What is certain of the text and was not given out yet."""
    text = self._text[: self._stop_at()].rstrip("\ufffd")
    return self._give(text[: len(text) - self._unsure(text)])

  def finish(self, tokens: np.ndarray) -> tuple[str, str]:
    """The whole text, and what of it was not given out yet."""
    self._text = self._decode(tokens)
    text = self._text[: self._stop_at()]
    return text, self._give(text)

  def _give(self, text: str) -> str:
    piece = text[self._given :]
    self._given = max(self._given, len(text))
    return piece

  def _stop_at(self) -> int | None:
    """Where the first stop string begins."""
    places = [self._text.find(stop) for stop in self._stop]
    return min((place for place in places if place >= 0), default=None)

  def _unsure(self, text: str) -> int:
    """Characters at the end that may begin a stop string."""
    return max(
      (
        length
        for stop in self._stop
        for length in range(1, len(stop))
        if text.endswith(stop[:length])
      ),
      default=0,
    )


def answer_of(index: int, prompt: Prompt, text: str, done: Finished) -> Answer:
  """The answer that a finished request is."""
  return Answer(
    index=index,
    prompt=prompt.text,
    text=text,
    tokens=done.tokens,
    stop_reason=done.stop_reason,
    target_calls=done.target_calls,
    drafted=done.drafted,
    accepted=done.accepted,
    milliseconds=done.milliseconds,
    draft_version=done.draft_version,
  )
