"""Prometheus metrics, with vLLM's names where vLLM has one."""

import threading
from collections import deque
from typing import Any

import jax
import prometheus_client as prometheus

from osd_jax.engine.requests import Finished
from osd_jax.serving.learning import FLOOR_EVERY
from osd_jax.serving.scheduler import Job, Load

SECONDS = (
  0.001,
  0.0025,
  0.005,
  0.01,
  0.025,
  0.05,
  0.1,
  0.25,
  0.5,
  1,
  2.5,
  5,
  10,
  30,
  60,
)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
# Answers whose means the live page and the gauges show.
RECENT = 64

_COUNTERS = {
  "vllm:spec_decode_num_drafts": "verifications of drafted tokens",
  "vllm:spec_decode_num_draft_tokens": "drafted tokens",
  "vllm:spec_decode_num_accepted_tokens": "drafted tokens that were accepted",
  "vllm:prompt_tokens": "prompt tokens",
  "vllm:generation_tokens": "emitted tokens",
  "osd:target_calls": "verifications and plain steps",
  "osd:updates": "updates of the draft",
  "osd:compilations": "programs that were compiled; constant after the start",
  "osd:update_seconds": "seconds that updates ran",
}
_LABELLED = {
  "vllm:spec_decode_num_accepted_tokens_per_pos": (
    "drafted tokens that were accepted, by position",
    "position",
  ),
  "vllm:request_success": ("answered requests, by reason", "finished_reason"),
  "osd:requests_refused": ("refused requests, by HTTP status", "status"),
}
_GAUGES = {
  "vllm:num_requests_running": "requests in rows",
  "vllm:num_requests_waiting": "requests in the queue",
  "vllm:engine_healthy": "1 while the engine answers requests",
  "osd:draft_version": "version of the draft that serves",
  "osd:overlap": "overlap of the newest draft with recent answers, mean",
  "osd:floor_overlap": "the same of the first draft, which never learns",
  "osd:tokens_per_target_call": "mean over recent answers",
  "osd:records_dropped": "answers not learnt from because too many were waiting",
  "osd:learning_failed": "1 if an error has stopped learning",
}
_HISTOGRAMS = {
  "vllm:time_to_first_token_seconds": ("arrival to first token", SECONDS),
  "vllm:inter_token_latency_seconds": (
    "mean seconds per token after the first",
    SECONDS,
  ),
  "vllm:e2e_request_latency_seconds": ("arrival to last token", SECONDS),
  "vllm:request_queue_time_seconds": ("arrival to admission", SECONDS),
  "vllm:request_inference_time_seconds": ("admission to last token", SECONDS),
  "vllm:request_prompt_tokens": ("prompt tokens of a request", TOKENS),
  "vllm:request_generation_tokens": ("emitted tokens of a request", TOKENS),
}


class Metrics:
  """The metrics of one server, in a registry of their own."""

  def __init__(self, model: str, num_draft_tokens: int):
    """Makes all metrics.

    Args:
      model: their label `model_name`.
      num_draft_tokens: K, the number of positions that are counted.
    """
    self._positions = num_draft_tokens
    self._registry = prometheus.CollectorRegistry()
    prometheus.ProcessCollector(registry=self._registry)  # memory and CPU time
    common = {"model_name": model, "engine": "0"}
    self._made: dict[str, Any] = {}
    labels = tuple(common)
    for kind, table in (
      (prometheus.Counter, _COUNTERS),
      (prometheus.Gauge, _GAUGES),
    ):
      for name, text in table.items():
        made = kind(name, text, labels, registry=self._registry)
        self._made[name] = made.labels(**common)
    for name, (text, buckets) in _HISTOGRAMS.items():
      made = prometheus.Histogram(
        name, text, labels, registry=self._registry, buckets=buckets
      )
      self._made[name] = made.labels(**common)
    self._common = common
    for name, (text, label) in _LABELLED.items():
      self._made[name] = prometheus.Counter(
        name, text, (*labels, label), registry=self._registry
      )
    jax.monitoring.register_event_duration_secs_listener(self._compiled)
    self._lock = threading.Lock()
    self._recent: deque[tuple[int, int, int, int]] = deque(maxlen=RECENT)
    self._overlaps: deque[float] = deque(maxlen=RECENT)
    self._floors: deque[float] = deque(maxlen=RECENT // FLOOR_EVERY)
    self.totals = {"requests": 0, "tokens": 0, "updates": 0, "update_seconds": 0.0}

  def count(self, job: Job, done: Finished, now: float) -> None:
    """Counts a finished answer; `now` is the clock of `Job.times`."""
    tokens, first = len(done.tokens), job.first_token or now
    steps = done.target_calls if done.drafted else 0
    self._add("vllm:spec_decode_num_drafts", steps)
    self._add("vllm:spec_decode_num_draft_tokens", done.drafted)
    self._add("vllm:spec_decode_num_accepted_tokens", done.accepted)
    for position, count in enumerate(done.accepted_per_position[: self._positions]):
      name = "vllm:spec_decode_num_accepted_tokens_per_pos"
      self._made[name].labels(**self._common, position=position).inc(count)
    self._add("vllm:prompt_tokens", len(done.request.tokens))
    self._add("vllm:generation_tokens", tokens)
    self._add("osd:target_calls", done.target_calls)
    reason = finish_reason(done)
    name = "vllm:request_success"
    self._made[name].labels(**self._common, finished_reason=reason).inc()
    for name, value in (
      ("vllm:time_to_first_token_seconds", first - job.arrived),
      ("vllm:inter_token_latency_seconds", (now - first) / max(tokens - 1, 1)),
      ("vllm:e2e_request_latency_seconds", now - job.arrived),
      ("vllm:request_queue_time_seconds", job.admitted - job.arrived),
      ("vllm:request_inference_time_seconds", now - job.admitted),
      ("vllm:request_prompt_tokens", len(done.request.tokens)),
      ("vllm:request_generation_tokens", tokens),
    ):
      self._made[name].observe(value)
    with self._lock:
      self.totals["requests"] += 1
      self.totals["tokens"] += tokens
      self._recent.append((tokens, done.target_calls, done.accepted, done.drafted))

  def learned(
    self, overlap: float, floor: float | None, update_seconds: float | None
  ) -> None:
    """Counts an answer that was learnt from; see `Learning` for the arguments."""
    with self._lock:
      self._overlaps.append(overlap)
      if floor is not None:
        self._floors.append(floor)
      self.totals["updates"] += update_seconds is not None
      self.totals["update_seconds"] += update_seconds or 0
    if update_seconds is not None:
      self._add("osd:updates", 1)
      self._add("osd:update_seconds", update_seconds)

  def refused(self, status: int) -> None:
    """Counts a request that was not answered."""
    self._made["osd:requests_refused"].labels(**self._common, status=status).inc()

  def snapshot(self) -> dict[str, Any]:
    """Returns totals, and means over recent answers, for the live page."""
    with self._lock:
      sums = [sum(column) for column in zip(*self._recent, strict=True)] or [0] * 4
      overlaps, floors = list(self._overlaps), list(self._floors)
      totals = dict(self.totals)
    tokens, calls, accepted, drafted = sums
    return {
      **totals,
      "tokens_per_target_call": tokens / calls if calls else None,
      "acceptance": accepted / drafted if drafted else None,
      "overlap": sum(overlaps) / len(overlaps) if overlaps else None,
      "floor_overlap": sum(floors) / len(floors) if floors else None,
    }

  def text(self, load: Load, version: int, dropped: int, failed: bool) -> bytes:
    """Returns all metrics in Prometheus' text format."""
    recent = self.snapshot()
    for name, value in (
      ("vllm:num_requests_running", load.running),
      ("vllm:num_requests_waiting", load.waiting),
      ("vllm:engine_healthy", load.failure is None and not load.draining),
      ("osd:draft_version", version),
      ("osd:overlap", recent["overlap"] or 0),
      ("osd:floor_overlap", recent["floor_overlap"] or 0),
      ("osd:tokens_per_target_call", recent["tokens_per_target_call"] or 0),
      ("osd:records_dropped", dropped),
      ("osd:learning_failed", failed),
    ):
      self._made[name].set(value)
    return prometheus.generate_latest(self._registry)

  def close(self) -> None:
    """Stops counting compilations."""
    jax.monitoring.unregister_event_duration_listener(self._compiled)

  def _compiled(self, event: str, *_: Any, **__: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
      self._add("osd:compilations", 1)

  def _add(self, name: str, value: float) -> None:
    self._made[name].inc(value)


def finish_reason(done: Finished) -> str:
  """Returns OpenAI's word for why an answer ended."""
  reasons = {"LENGTH": "length", "NOT_FINITE": "error"}
  return reasons.get(done.stop_reason.name, "stop")
