"""What is measured of a request that the online loop has answered.

The floor draft, which never learns, and plain decoding are measured on the same
request: what learning is worth shows only beside them.
"""

import dataclasses
import time
from typing import Any

import jax
import numpy as np

from osd_jax import base, pairs
from osd_jax.data import streams
from osd_jax.measuring import certificate, comparison, metrics
from osd_jax.serving import slots


class Meter:
  """Makes one row of metrics.jsonl of each finished request."""

  def __init__(
    self,
    pair: pairs.Pair,
    decoding: slots.DecodingConfig,
    sampling: slots.SamplingConfig,
    floor: bool,
    compare_every: int,
  ):
    """Compiles nothing yet.

    Args:
      pair: target and floor draft.
      decoding: shapes of decoding.
      sampling: says whether a certificate applies.
      floor: measure the floor draft on every request.
      compare_every: serve every n-th request plainly and with the floor draft too;
        0 never.
    """
    self._pair, self._decoding, self._sampling = pair, decoding, sampling
    self._floor, self._compare_every = floor, compare_every
    self._certifier = certificate.Certifier(pair)
    self._rivals: comparison.Rivals | None = None

  def row(
    self,
    done: slots.Finished,
    query: streams.Query,
    index: int,
    serving: base.Params,
    decoder: slots.Slots,
  ) -> dict[str, Any]:
    """The row of one request.

    Args:
      done: the answer.
      query: what it answers.
      index: requests finished before it.
      serving: parameters of the draft that serves.
      decoder: who answered; its draft may have been swapped since.
    """
    started = time.perf_counter()
    draft = self._pair.draft
    found = metrics.agreement(draft, serving, done.batch, done.settings)
    floor = None
    if self._floor:
      floor = metrics.agreement(
        draft, self._pair.draft_params, done.batch, done.settings
      )
    found, floor = jax.device_get((found, floor))
    tokens = len(done.tokens)
    row = {
      "index": index,
      "query": query.index,
      "source": query.task,
      "overlap": float(found.distribution_overlap[0]),
      "overlap_upper": float(found.distribution_overlap_upper[0]),
      "acceptance_rate": float(found.acceptance_rate[0]),
      "draft_acceptance_rate": metrics.draft_acceptance_rate(
        done.accepted, done.drafted
      ),
      "tokens_per_target_call": metrics.tokens_per_target_call(
        tokens, done.target_calls
      ),
      "accepted_per_position": done.accepted_per_position[
        : self._decoding.num_draft_tokens
      ],
      "target_calls": done.target_calls,
      "drafted": done.drafted,
      "accepted": done.accepted,
      "output_tokens": tokens,
      "stop_reason": done.stop_reason.name,
      "loops": metrics.loops(done.tokens),
      "draft_version": decoder.draft_version,
      "decode_ms": done.milliseconds,
      "online_ms_per_token": done.milliseconds / tokens,
    }
    if floor is not None:
      row["floor_overlap"] = float(floor.distribution_overlap[0])
      row["floor_acceptance_rate"] = float(floor.acceptance_rate[0])
    row["metering_ms"] = (time.perf_counter() - started) * 1e3
    if self._compare_every and index % self._compare_every == 0:
      row.update(self._compared(done, decoder.shortlist))
    return row

  def _compared(
    self, done: slots.Finished, shortlist: np.ndarray | None
  ) -> dict[str, Any]:
    """Fields of a request that was served plainly and with the floor draft too."""
    if self._rivals is None:
      self._rivals = comparison.Rivals(
        self._decoding,
        self._pair.target,
        self._pair.target_params,
        self._pair.draft,
        self._pair.draft_params,
      )
    started = time.perf_counter()  # what the rivals compiled is no comparing
    found = self._rivals.serve(done, shortlist)
    row = {
      "plain_ms_per_token": found.plain_ms / len(done.tokens),
      "floor_ms_per_token": found.floor_ms / len(done.tokens),
      "floor_draft_acceptance_rate": found.floor_draft_acceptance_rate,
      "floor_tokens_per_target_call": found.floor_tokens_per_target_call,
      "compare_ms": (time.perf_counter() - started) * 1e3,
    }
    if certificate.applies(self._sampling, self._decoding):
      judged = self._certifier.judge([(found.plain, done)], done.request.tag)
      row["certificate"] = dataclasses.asdict(judged)
    return row
