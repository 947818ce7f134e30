"""The loop over rows in flight, shared by `Engine` and `Replicas`."""

import abc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from osd_jax import base
from osd_jax.engine.requests import Finished, Request

_END: Any = object()  # of an iterator; None is a request that is not there yet


class Rows(abc.ABC):
  """Rows that requests are put into and answers come out of.

  Attributes:
    expecting: whether a free row will be asked for soon: calls are short then.
  """

  expecting = False

  @property
  @abc.abstractmethod
  def capacity(self) -> int:
    """Requests that can be in flight."""

  @property
  @abc.abstractmethod
  def in_flight(self) -> int:
    """Requests held or waiting."""

  @abc.abstractmethod
  def check(self, request: Request) -> None:
    """Raises `InputError` where a request cannot be decoded; see `Request.check`."""

  @abc.abstractmethod
  def submit(self, request: Request) -> None:
    """Queues a request, or raises as `check` does."""

  @abc.abstractmethod
  def swap(
    self,
    draft_params: base.Params,
    version: int,
    shortlist: np.ndarray | None = None,
  ) -> None:
    """New draft parameters from the next call on; outputs do not depend on them."""

  def restore_draft(self, host: dict[str, Any], draft_params: base.Params) -> None:
    """`swap` to the draft that served when `host` was kept."""
    kept = host["shortlist"]
    shortlist = None if kept is None else np.asarray(kept, np.int32)
    self.swap(draft_params, host["draft_version"], shortlist)

  @abc.abstractmethod
  def step(self) -> list[Finished]:
    """Fills empty rows, runs one compiled call, returns what finished."""

  @abc.abstractmethod
  def clear(self) -> None:
    """Drops whatever waits or is held."""

  def turns(
    self,
    requests: Iterable[Request | None],
    before_step: Callable[[], object] = lambda: None,
  ) -> Iterator[list[Finished]]:
    """Submits as rows become free and collects: the one loop over `step`.

    Args:
      requests: may be endless; no more are taken than there are free rows. None: at
        present nothing waits, rows in flight go on.
      before_step: called between the filling of rows and the compiled call.

    Yields:
      What finished in each call, perhaps nothing; everything has when it ends. Whoever
      leaves early calls `clear`.
    """
    coming, request = iter(requests), None
    while True:
      while self.in_flight < self.capacity:
        request = next(coming, _END)
        if request is None or request is _END:
          break
        self.submit(request)
      self.expecting = request is None and self.in_flight < self.capacity
      if request is _END and not self.in_flight:
        return
      if self.in_flight:
        before_step()
      yield self.step() if self.in_flight else []

  def run(
    self,
    requests: Sequence[Request],
    on_finished: Callable[[Finished], object] = lambda done: None,
  ) -> list[Finished]:
    """Answers all requests; results in their order, none where one is refused.

    Args:
      requests: what to answer.
      on_finished: called as each one finishes, for progress.
    """
    for request in requests:
      self.check(request)
    answers: dict[int, Finished] = {}
    for finished in self.turns(requests):
      for done in finished:
        on_finished(done)
        answers[id(done.request)] = done
    return [answers[id(request)] for request in requests]

  def messages(self) -> list[str]:
    """What a run's log should say of these rows since it last asked."""
    return []

  def close(self) -> None:
    """Leaves nothing running."""
    self.clear()
