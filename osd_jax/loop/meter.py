"""Measures the answers of a server.

The floor draft, which never learns, and plain decoding serve the same request right
after the online draft. Only this comparison shows the value of learning.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from osd_jax import background, base, certificate, metrics, pairs, sharding
from osd_jax.data import streams
from osd_jax.engine import agreement
from osd_jax.engine.requests import DecodingConfig, Finished
from osd_jax.engine.server import Server
from osd_jax.loop import rows as rows_lib


class Meter:
  """Makes the row of metrics.jsonl of each finished request."""

  def __init__(
    self,
    pair: pairs.Pair,
    decoding: DecodingConfig,
    floor_every: int,
    compare_every: int,
    partition: sharding.PartitionConfig,
    seed: int = 0,
  ):
    """Compiles nothing yet.

    The draft of the pair is the floor draft. If it is a cache, the floor draft is the
    empty cache: prompt lookup. It is measured on every `floor_every`-th request. One of
    `compare_every` requests, chosen at random by the seed, is also served plainly and
    with the floor draft. 0 measures and compares none.
    """
    self._partition = partition
    self._pair, self._decoding = pair, decoding
    self._floor_every, self._compare_every = floor_every, compare_every
    self._seed = seed
    self._certifier = certificate.Certifier(pair)
    self._rivals: Rivals | None = None
    # The answers measured so far, for a draft that is a cache. When an answer is
    # measured, the server's own cache contains it.
    self._cache: Any = None
    if pairs.adapts_untrained(pair):
      self._cache = pair.draft.init(jax.random.key(0))

  def compares(self, index: int) -> bool:
    """Whether a request is also served, and timed, plainly and with the floor draft.

    One request of every `compare_every` is chosen at random. A fixed position could
    coincide with the requests that updates slow down, and compare all of them or none.
    The choice depends on the index alone, so a resumed run compares the same requests.
    """
    if not self._compare_every:
      return False
    block, place = divmod(index, self._compare_every)
    choice = np.random.default_rng((self._seed, block)).integers(self._compare_every)
    return place == choice

  def warm_up(self) -> None:
    """Compiles the rivals, if any request is compared."""
    if self._compare_every and self._rivals is None:
      self._rivals = Rivals(self._pair, self._decoding, self._partition)

  def resume(self, server: Server) -> None:
    """Gives the n-gram caches here the answers of a restored server."""
    memory = server.engine.memory
    if self._cache is not None and memory is not None:
      self._cache = memory.table
    elif self._rivals is not None:
      self._rivals.resume(server)

  def row(
    self,
    answer: Finished,
    query: streams.Query,
    index: int,
    server: Server,
    beside: bool,
  ) -> rows_lib.Request:
    """Returns the row of one request.

    `index` requests finished before it. The draft of the server may have been swapped
    since. `beside`: this runs on another thread while serving goes on. An answer
    without a batch is not measured.
    """
    started, tokens = time.perf_counter(), len(answer.tokens)
    measured = {} if answer.batch is None else self._agreement(answer, index, server)
    metering_ms = (time.perf_counter() - started) * 1e3
    measured["metering_beside_ms" if beside else "metering_ms"] = metering_ms
    if answer.stop_reason == base.StopReason.NOT_FINITE:
      measured["certificate"] = self._certifier.broken()
    elif answer.batch is not None and self.compares(index):
      measured |= self._compared(answer, query.index, server)
    elif answer.batch is not None and self._rivals is not None:
      self._rivals.observe(answer)
    num_draft_tokens = self._decoding.num_draft_tokens
    return rows_lib.Request(
      index=index,
      query=query.index,
      source=query.task,
      **acceptance([answer]),
      accepted_per_position=answer.accepted_per_position[:num_draft_tokens],
      target_calls=answer.target_calls,
      drafted=answer.drafted,
      accepted=answer.accepted,
      output_tokens=tokens,
      stop_reason=answer.stop_reason.name,
      loops=metrics.loops(answer.tokens),
      draft_version=answer.draft_version,
      decode_ms=answer.milliseconds,
      online_ms_per_token=answer.milliseconds / tokens if tokens else None,
      **measured,
    )

  def _agreement(self, answer: Finished, index: int, server: Server) -> dict[str, Any]:
    """Overlap and acceptance of the draft that serves, and of the floor draft."""
    # The newest draft is measured, which may be newer than the one that answered: it
    # has not trained on this request, so the measurement is prequential.
    newest = server.draft_params if self._cache is None else self._cache
    drafts = [newest]
    if self._floor_every and index % self._floor_every == 0:
      drafts.append(self._pair.draft_params)
    figures = [
      agreement.of_answer(self._pair.draft, params, answer, server.shortlist)
      for params in drafts
    ]
    online, *floors = jax.device_get(figures)
    if self._cache is not None and answer.request.remember:
      self._cache = agreement.absorbed(self._pair.draft, self._cache, answer)
    row = {
      "overlap": float(online.distribution_overlap[0]),
      "overlap_upper": float(online.distribution_overlap_upper[0]),
      "acceptance_rate": float(online.acceptance_rate[0]),
    }
    for floor in floors:
      row["floor_overlap"] = float(floor.distribution_overlap[0])
      row["floor_acceptance_rate"] = float(floor.acceptance_rate[0])
    return row

  def _compared(self, answer: Finished, index: int, server: Server) -> dict[str, Any]:
    """Fields of a request that was served plainly and with the floor draft too."""
    self.warm_up()
    assert self._rivals is not None
    # Plain decoding must not share the cores with an update, so the update runs to its
    # end first. The time that serving would have lost to it is charged to the request.
    waiting, share = time.perf_counter(), _lost_share(server)
    server.wait()
    wait_ms = (time.perf_counter() - waiting) * 1e3
    plain, floor = self._rivals.serve(answer, server.engine.shortlist)
    row = {
      "plain_ms_per_token": plain.milliseconds / len(answer.tokens),
      "floor_ms_per_token": floor.milliseconds / len(answer.tokens),
      **acceptance([floor], "floor_"),
      "update_wait_ms": wait_ms * share,
    }
    if certificate.applies(answer.request.sampling, self._decoding):
      verdict = self._certifier.judge([(plain, answer)], index)
      row["certificate"] = verdict
    total_ms = (time.perf_counter() - waiting) * 1e3
    row["compare_ms"] = total_ms - row["update_wait_ms"]
    return row


def acceptance(answers: Sequence[Finished], prefix: str = "") -> dict[str, Any]:
  """Acceptance rates of several answers, from the sums of their counters."""
  counts = [(x.accepted, x.drafted, len(x.tokens), x.target_calls) for x in answers]
  accepted, drafted, tokens, calls = map(sum, zip(*counts, strict=True))
  rate = metrics.draft_acceptance_rate(accepted, drafted)
  tokens_per_call = metrics.tokens_per_target_call(tokens, calls)
  return {
    f"{prefix}draft_acceptance_rate": rate,
    f"{prefix}tokens_per_target_call": tokens_per_call,
  }


def _lost_share(server: Server) -> float:
  """Share of the running update's time that serving loses; 0 if none is running."""
  if not server.is_learning:
    return 0.0
  costs = server.learner.costs
  if costs is not None and costs.update_ms:
    return min(costs.lost_ms / costs.update_ms, 1.0)
  # Without measured costs: on one core an update stops serving, on several it uses
  # another core.
  return 1.0 if background.cores() == 1 else 0.0


class Rivals:
  """Servers for plain decoding and for the floor draft, with one row each."""

  def __init__(
    self,
    pair: pairs.Pair,
    decoding: DecodingConfig,
    partition: sharding.PartitionConfig,
  ):
    """Makes both servers from the run's decoding config, with one row, and compiles."""
    single = decoding.with_rows(1)
    self._pair = pair
    # Plain decoding has no use for records, so it does not pay for them.
    unrecorded = dataclasses.replace(
      single, record_top_k=0, max_rounds=decoding.target_length
    )
    self._plain = Server(pair.plain(), unrecorded, partition=partition)
    self._floor = Server(pair, single, partition=partition)
    for server in (self._plain, self._floor):
      server.warm_up()

  def serve(
    self, online: Finished, shortlist: np.ndarray | None = None
  ) -> tuple[Finished, Finished]:
    """Serves the request of an online answer again, plainly and with the floor draft.

    The floor draft's head covers the tokens of `shortlist` too, so that only learning
    distinguishes it from the online draft.
    """
    present = self._floor.engine.shortlist
    if present is not None and present.tolist() != np.asarray(shortlist).tolist():
      self._floor.engine.swap(self._pair.draft_params, 0, shortlist)
    request, length = online.request, len(online.tokens)
    if request.watch is not None:  # it belongs to a client, who has the answer already
      request = dataclasses.replace(request, watch=None, max_new_tokens=length)
    # A floor draft that is a cache never changes either: it sees the prompt alone.
    remembers = request.remember and not pairs.adapts_untrained(self._pair)
    unchanged = dataclasses.replace(request, remember=remembers)
    return self._plain.run([request])[0], self._floor.run([unchanged])[0]

  def resume(self, server: Server) -> None:
    """Copies the n-gram cache of a server, whose answers both draft from."""
    self._floor.engine.copy_memory(server.engine)

  def observe(self, online: Finished) -> None:
    """Lets the floor draft's n-gram cache see an answer that it is not compared on.

    So both caches have seen the same answers, and only learning distinguishes them.
    """
    if not pairs.adapts_untrained(self._pair):
      self._floor.engine.absorb(online)
