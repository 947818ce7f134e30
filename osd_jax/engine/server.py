"""The front door: prompts in, the target's answers out, by a draft that may learn.

Commands and services stand on this object: it alone submits requests, collects answers
and swaps drafts. `generate` and `stream` speak text; `turns` and `run` speak tokens.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from osd_jax import base, pairs, sharding
from osd_jax.distillation.learner import Learner, LearningConfig, Outcome
from osd_jax.engine import agreement
from osd_jax.engine.answers import Answer, Prompt, TextSoFar, answer_of
from osd_jax.engine.defaults import DECODING, LEARNING
from osd_jax.engine.engine import Engine
from osd_jax.engine.replicas import ReplicaConfig, Replicas
from osd_jax.engine.requests import DecodingConfig, Finished, Request
from osd_jax.engine.statistics import Statistics

SHIPPED, ONE_DEVICE = pairs.PairConfig(), sharding.PartitionConfig()
HERE = ReplicaConfig()


class Server:
  """A target and its draft, answering.

  >>> prompt = "What is the average rating and the total price of hotels with price"
  >>> prompt += " above 44 and country 'Italy'?"
  >>> with Server() as server:
  ...   for answer in server.generate([prompt]):
  ...     print(answer.text)
  SELECT AVG(rating), SUM(price) FROM hotels WHERE price > 44 AND country = 'Italy';

  One thread at a time may use it, for one call at a time; another one may call `learn`
  meanwhile, `beside` it.

  Attributes:
    pair: target, draft and vocabulary.
    engine: the rows in flight, `Engine` or `Replicas`.
    statistics: what was done so far.
  """

  def __init__(
    self,
    pair: pairs.PairConfig | pairs.Pair = SHIPPED,
    decoding: DecodingConfig = DECODING,
    learning: LearningConfig = LEARNING,
    partition: sharding.PartitionConfig = ONE_DEVICE,
    replicas: ReplicaConfig = HERE,
  ):
    """Loads the pair; what a prompt needs is compiled when one of its length comes.

    Args:
      pair: files of the pair, the shipped one by default, or a loaded pair; one
        without a draft decodes plainly.
      decoding: rows, K, lengths.
      learning: how the draft learns where it is asked to.
      partition: mesh; of every replica, where there are some.
      replicas: processes that serve in place of this one, which learns.

    Raises:
      InputError: a file is missing or broken, or the three do not belong together.
    """
    partitioner = sharding.make(partition)
    self.pair = pairs.load_pair(pair, partitioner)
    self.engine: Any = (
      Replicas(replicas, decoding, pair, self.pair, partition)
      if replicas.count
      else Engine(
        decoding,
        self.pair.target,
        self.pair.target_params,
        self.pair.draft,
        self.pair.draft_params,
        partitioner,
      )
    )
    self.statistics = Statistics()
    self._learning = learning
    self._learner: Learner | None = None
    # The newest draft: parameters, version, shortlist. Set by who learns, in one go.
    self._pending_draft: tuple[base.Params, int, Any] | None = None
    self._is_answering = self._is_closed = False

  def __enter__(self) -> "Server":
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  @property
  def learner(self) -> Learner:
    """The draft that learns, made at its first use.

    Raises:
      InputError: there is no draft, or nothing is recorded to learn from.
    """
    if self._learner is None:
      config = self.engine.config
      if self.pair.draft is None or config.record_top_k < 1:
        raise base.InputError(
          "Server: a draft that learns needs a pair with a draft, and"
          f" DecodingConfig.record_top_k >= 1 (received {config.record_top_k})."
        )
      self._learner = Learner(
        self.pair.draft,
        self.pair.draft_params,
        self._learning,
        config.source_lengths[-1],
        config.target_length,
        config.record_top_k,
      )
    return self._learner

  @property
  def draft_params(self) -> base.Params:
    """Parameters of the draft that serves."""
    return self.pair.draft_params if self._learner is None else self._learner.serving

  @property
  def shortlist(self) -> Any:
    """[N] int32, the tokens that this draft's output head covers; None: all."""
    return (
      self.engine.shortlist if self._pending_draft is None else self._pending_draft[2]
    )

  @property
  def is_learning(self) -> bool:
    """Whether an update is under way at this moment."""
    return self._learner is not None and self._learner.is_running

  def generate(
    self,
    prompts: str | Prompt | Iterable[str | Prompt | None],
    *,
    learn: bool = False,
    ordered: bool = False,
    **settings: Any,
  ) -> Iterator[Answer]:
    """Answers prompts; lazily, so that neither they nor the answers need an end.

    Args:
      prompts: texts, or `Prompt`s with settings of their own. As many are taken ahead
        of the answers as there are rows. None says that at present nothing waits: an
        iterator over a queue yields it, so that answers under way go on.
      learn: the draft learns from the answers.
      ordered: answers come in the order of the prompts, not as they finish.
      **settings: fields of `Prompt` for the texts; the i-th draws with seed + i.

    Yields:
      An answer a prompt.

    Raises:
      InputError: a prompt or a setting cannot be used; says which.
    """
    if isinstance(prompts, str | Prompt):
      prompts = [prompts]
    early: dict[int, Answer] = {}
    place = 0
    for finished in self._turns(self._requests(prompts, settings)):
      for done in finished:
        answer = self._conclude(done, learn)
        if not ordered:
          yield answer
          continue
        early[answer.index] = answer
        while place in early:
          yield early.pop(place)
          place += 1

  def stream(
    self, prompt: str | Prompt, *, learn: bool = False, **settings: Any
  ) -> Iterator[str]:
    """The text of one answer, piece by piece while its tokens are accepted.

    Args:
      prompt: the text, or a `Prompt`.
      learn: the draft learns from the answer.
      **settings: as in `generate`.

    Yields:
      Pieces that together are the answer's text.
    """
    request = self._request(0, prompt, settings, read_along=True)
    _, _, text = request.tag
    for finished in self._turns([request]):
      piece = text.next_piece()
      for done in finished:
        piece += self._conclude(done, learn, piece=True)
      if piece:
        yield piece

  def turns(self, requests: Iterable[Request | None]) -> Iterator[list[Finished]]:
    """Answers requests of tokens and counts them; see `Engine.turns`."""
    for finished in self.engine.turns(requests, self._keep_pace):
      for done in finished:
        self.statistics.count(done)
      yield finished

  def run(
    self,
    requests: Sequence[Request],
    on_finished: Callable[[Finished], object] = lambda done: None,
  ) -> list[Finished]:
    """Answers all requests of tokens, in their order; see `Engine.run`."""

    def counted(done):
      self.statistics.count(done)
      on_finished(done)

    return self.engine.run(requests, counted)

  def learn(
    self, done: Finished, overlap: float | None = None, beside: bool = False
  ) -> Outcome | None:
    """The draft learns from an answer; a draft that is due serves from now on.

    Args:
      done: the answer.
      overlap: of the serving draft with it; None measures it.
      beside: another thread serves meanwhile; it swaps the draft in at its next call.

    Returns:
      The update that was swapped in, if one was.
    """
    if done.stop_reason == base.StopReason.NOT_FINITE or not len(done.tokens):
      return None  # says nothing of the target
    if overlap is None:
      measured = agreement.of_answer(
        self.pair.draft, self.learner.serving, done, self.shortlist
      )
      overlap = float(jax.device_get(measured.distribution_overlap)[0])
    return self._swapped(self.learner.observe(done.batch, overlap), beside)

  def finish_learning(self) -> Outcome | None:
    """Takes the update under way, if there is one."""
    return None if self._learner is None else self._swapped(self._learner.finish())

  def seed(self, batches: Iterable[base.DistillationBatch]) -> None:
    """Fills the buffer before the first request; a short head is chosen by it."""
    self.learner.seed(batches)
    self.engine.swap(self.draft_params, 0, self.learner.shortlist())

  def warm_up(self, learn: bool = False) -> None:
    """Compiles everything now, for every bucket, so that no request waits for it."""
    answers = self.engine.warm_up()
    if learn:
      self.learner.warm_up(done.batch for done in answers)
    if self.pair.draft is not None and self.engine.config.record_top_k:
      for done in answers:
        for length in agreement.lengths(self.engine.config.target_length):
          agreement.agreement(
            self.pair.draft,
            self.draft_params,
            done.batch,
            done.settings,
            length,
            self.engine.shortlist,
          )

  def save(self, path: str | Path) -> Path:
    """Writes the draft that serves now; `PairConfig.draft` reads the file."""
    notes = f"adapted, after {self.statistics.requests} requests"
    return self.pair.save_draft(path, self.draft_params, notes)

  def wait(self) -> None:
    """Waits until nothing runs beside serving."""
    if self._learner is not None:
      self._learner.wait()

  def close(self) -> None:
    """Ends learning and drops what is in flight; nothing is left running."""
    self._is_closed = True
    self.engine.close()
    if self._learner is not None:
      self._learner.close()

  def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a checkpoint keeps: arrays, and what the host knows."""
    parts: dict[str, tuple[Any, dict[str, Any]]] = {"slots": self.engine.state()}
    if self._learner is not None:
      parts["learner"] = self._learner.state()
    arrays = {name: part[0] for name, part in parts.items()}
    return arrays, {name: part[1] for name, part in parts.items()}

  def structure(self, host: dict[str, Any]) -> dict[str, Any]:
    """Shapes of the arrays that `state` gave with `host`."""
    shapes = {"slots": self.engine.structure(host["slots"])}
    if "learner" in host:
      shapes["learner"] = self.learner.structure(host["learner"])
    return shapes

  def restore(
    self,
    arrays: dict[str, Any],
    host: dict[str, Any],
    request_of: Callable[[Any], Request],
  ) -> None:
    """Continues from what `state` gave; `request_of` makes a tag's request again."""
    if "learner" in host:
      self.learner.restore(arrays["learner"], host["learner"])
    self.engine.restore(arrays["slots"], host["slots"], request_of, self.draft_params)

  def _turns(self, requests: Iterable[Request | None]) -> Iterator[list[Finished]]:
    """`turns`, for one call at a time; whoever leaves early leaves nothing behind."""
    if self._is_closed or self._is_answering:
      state = "closed" if self._is_closed else "answering another call"
      raise base.InputError(
        f"Server: this server is {state}; read that call to its end, or make another"
        " server."
      )
    self._is_answering = True
    try:
      yield from self.turns(requests)
    finally:
      self._is_answering = False
      self.engine.clear()

  def _requests(
    self, prompts: Iterable[str | Prompt | None], settings: dict[str, Any]
  ) -> Iterator[Request | None]:
    index = 0
    for prompt in prompts:
      if prompt is None:
        yield None
        continue
      yield self._request(index, prompt, settings)
      index += 1

  def _request(
    self,
    index: int,
    given: str | Prompt,
    settings: dict[str, Any],
    read_along: bool = False,
  ) -> Request:
    """The request of a prompt; its tag says what becomes of the answer."""
    try:
      prompt = Prompt.of(given, index, settings)
      text = TextSoFar(self.pair.vocabulary.decode, prompt.stop)
      request = Request(
        tokens=self.pair.vocabulary.encode_prompt(prompt.text),
        sampling=prompt.sampling,
        max_length=prompt.max_length,
        tag=(index, prompt, text),
        watch=text.watch if prompt.stop or read_along else None,
      )
      self.engine.check(request)
    except base.InputError as error:
      raise base.InputError(f"prompt {index}: {error}") from None
    return request

  def _conclude(self, done: Finished, learn: bool, piece: bool = False) -> Any:
    """The answer, or the last piece of its text; the draft learns from it if asked."""
    index, prompt, text = done.request.tag
    whole, rest = text.finish(done.tokens)
    if learn and prompt.learn:
      self.learn(done)
    return rest if piece else answer_of(index, prompt, whole, done)

  def swap_pending(self) -> None:
    """Swaps in what was learnt beside serving; called by whoever serves."""
    handed = self._pending_draft
    if handed is not None and handed[1] != self.engine.draft_version:
      self.engine.swap(*handed)

  def _keep_pace(self) -> None:
    self.swap_pending()
    if self._learner is not None:
      self._learner.wait_if_behind(self.engine.in_flight)

  def _swapped(self, outcome: Outcome | None, beside: bool = False) -> Outcome | None:
    if outcome is not None:
      self.statistics.updates += 1
      if outcome.changed:
        shortlist = self.learner.shortlist()
        self._pending_draft = self.learner.serving, outcome.version, shortlist
        if not beside:
          self.swap_pending()
    return outcome
