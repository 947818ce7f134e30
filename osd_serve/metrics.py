"""Prometheus metrics, with vLLM's names where vLLM has one."""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import prometheus_client as prometheus

from osd_jax.distillation import schedule
from osd_jax.engine.requests import Finished
from osd_jax.loop import rows as rows_lib
from osd_serve.scheduler import Job, Load

SECONDS = (
  *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
  *(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
# Answers whose means the live page and the gauges show.
RECENT = 64
EARLIER = 32  # overlaps that must be known before a change can be seen
_TOTALS = (
  *("requests", "tokens", "updates", "traffic_shifts"),
  *("update_seconds", "plain_seconds", "decoding_seconds"),
)

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
  "osd:plain_seconds": "estimate: seconds of plain decoding for the same answers",
  "osd:decoding_seconds": "seconds of serving that the answers took",
  "osd:traffic_shifts": "sharp changes of the first draft's overlap",
}
_LABELLED = {
  "vllm:spec_decode_num_accepted_tokens_per_pos": (
    "drafted tokens that were accepted, by position",
    "position",
  ),
  "vllm:request_success": ("answered requests, by reason", "finished_reason"),
  "osd:requests_refused": ("refused requests, by HTTP status", "status"),
  "osd:draft_tokens": ("drafted tokens, by what named them", "source"),
  "osd:accepted_draft_tokens": ("accepted ones, by what named them", "source"),
}
_GAUGES = {
  "vllm:num_requests_running": "requests in rows",
  "vllm:num_requests_waiting": "requests in the queue",
  "vllm:engine_healthy": "1 while the engine answers requests",
  "osd:draft_version": "version of the draft that serves",
  "osd:overlap": "overlap of the newest draft with recent answers, mean",
  "osd:floor_overlap": "the same of the first draft, which never learns",
  "osd:tokens_per_target_call": "mean over recent answers",
  "osd:saved_seconds": "osd:plain_seconds - osd:decoding_seconds; may fall",
  "osd:records_waiting": "answers that wait to be learned from",
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
  "vllm:request_prefill_time_seconds": ("admission to first token", SECONDS),
  "vllm:request_decode_time_seconds": ("first to last token", SECONDS),
  "vllm:iteration_tokens_total": ("prompt and emitted tokens of a call", TOKENS),
  "vllm:request_prompt_tokens": ("prompt tokens of a request", TOKENS),
  "vllm:request_generation_tokens": ("emitted tokens of a request", TOKENS),
}


class Metrics:
  """The metrics of one server, in a registry of their own."""

  def __init__(self, model: str, num_draft_tokens: int, sources: Sequence[str]):
    """Makes all metrics, for K drafted positions.

    `sources` is what names drafted tokens: "draft", "cache", both or neither.
    """
    self._positions, self._sources = num_draft_tokens, tuple(sources)
    self._registry = prometheus.CollectorRegistry()
    prometheus.ProcessCollector(registry=self._registry)  # memory and CPU time
    common = {"model_name": model, "engine": "0"}
    self._made: dict[str, Any] = {}
    labels = tuple(common)
    for kind, table in ((prometheus.Counter, _COUNTERS), (prometheus.Gauge, _GAUGES)):
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
    self._recent: deque[dict[str, float]] = deque(maxlen=RECENT)
    self._overlaps: deque[float] = deque(maxlen=RECENT)
    self._floors: deque[float | None] = deque(maxlen=RECENT)
    self._shifts = Shifts()
    self.totals: dict[str, float] = dict.fromkeys(_TOTALS, 0)
    for source in self._sources:  # so that they are shown before the first answer
      self._by_source(source, 0, 0)

  def count(self, job: Job, done: Finished, now: float) -> None:
    """Counts a finished answer at `now`, on the clock of `Job.arrived`."""
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
    by_cache = done.drafted_by_cache, done.accepted_by_cache
    by_draft = done.drafted - by_cache[0], done.accepted - by_cache[1]
    for source in self._sources:
      self._by_source(source, *(by_cache if source == "cache" else by_draft))
    reason = finish_reason(done)
    name = "vllm:request_success"
    self._made[name].labels(**self._common, finished_reason=reason).inc()
    for name, value in (
      ("vllm:time_to_first_token_seconds", first - job.arrived),
      ("vllm:inter_token_latency_seconds", (now - first) / max(tokens - 1, 1)),
      ("vllm:e2e_request_latency_seconds", now - job.arrived),
      ("vllm:request_queue_time_seconds", job.admitted - job.arrived),
      ("vllm:request_inference_time_seconds", now - job.admitted),
      ("vllm:request_prefill_time_seconds", first - job.admitted),
      ("vllm:request_decode_time_seconds", now - first),
      ("vllm:request_prompt_tokens", len(done.request.tokens)),
      ("vllm:request_generation_tokens", tokens),
    ):
      self._made[name].observe(value)
    figures = {
      "requests": 1,
      "tokens": tokens,
      "calls": done.target_calls,
      "accepted": done.accepted,
      "drafted": done.drafted,
      "by_draft": by_draft[1],
      "by_cache": by_cache[1],
      "plain_seconds": job.plain_ms / 1e3,
      # A server that cannot draft compares nothing.
      "decoding_seconds": job.decoding_ms / 1e3 if job.plain_ms else 0.0,
    }
    for name in ("plain_seconds", "decoding_seconds"):
      self._add(f"osd:{name}", figures[name])
    with self._lock:
      for name in self.totals.keys() & figures.keys():
        self.totals[name] += figures[name]
      self._recent.append(figures)

  def called(self, tokens: int) -> None:
    """Records one compiled call and its number of tokens, read and emitted."""
    self._made["vllm:iteration_tokens_total"].observe(tokens)

  def row(self, row: rows_lib.Row) -> None:
    """Counts a row of the loop: an answer that was measured, or an update."""
    counts: dict[str, float] = {}
    with self._lock:
      if isinstance(row, rows_lib.Request) and row.overlap is not None:
        floor = row.floor_overlap
        counts["traffic_shifts"] = floor is not None and self._shifts.add(floor)
        self._overlaps.append(row.overlap)
        self._floors.append(floor)
      elif isinstance(row, rows_lib.Update):
        counts = {"updates": 1, "update_seconds": row.update_ms / 1e3}
      for name, count in counts.items():
        self.totals[name] += count
    for name, count in counts.items():
      self._add(f"osd:{name}", count)

  def refused(self, status: int) -> None:
    """Counts a request that was not answered."""
    self._made["osd:requests_refused"].labels(**self._common, status=status).inc()

  def snapshot(self) -> dict[str, Any]:
    """Returns totals, and means over recent answers, for the live page."""
    with self._lock:
      recent = list(self._recent)
      overlaps = list(self._overlaps)
      floors = [floor for floor in self._floors if floor is not None]
      totals = dict(self.totals)

    def ratio(upper: str, lower: str) -> float | None:
      above, below = (sum(one[name] for one in recent) for name in (upper, lower))
      return above / below if below else None

    return {
      **totals,
      "saved_seconds": totals["plain_seconds"] - totals["decoding_seconds"],
      "sources": self._sources,
      "tokens_per_target_call": ratio("tokens", "calls"),
      "by_draft_per_call": ratio("by_draft", "calls"),
      "by_cache_per_call": ratio("by_cache", "calls"),
      "acceptance": ratio("accepted", "drafted"),
      "speed": ratio("plain_seconds", "decoding_seconds"),
      "overlap": sum(overlaps) / len(overlaps) if overlaps else None,
      "floor_overlap": sum(floors) / len(floors) if floors else None,
    }

  def text(self, load: Load, gauges: Mapping[str, float]) -> bytes:
    """Returns all metrics in Prometheus' text format, `gauges` included."""
    recent = self.snapshot()
    for name, value in (
      ("vllm:num_requests_running", load.running),
      ("vllm:num_requests_waiting", load.waiting),
      ("vllm:engine_healthy", load.failure is None and not load.draining),
      ("osd:overlap", recent["overlap"] or 0),
      ("osd:floor_overlap", recent["floor_overlap"] or 0),
      ("osd:tokens_per_target_call", recent["tokens_per_target_call"] or 0),
      ("osd:saved_seconds", recent["saved_seconds"]),
      *gauges.items(),
    ):
      self._made[name].set(value)
    return prometheus.generate_latest(self._registry)

  def close(self) -> None:
    """Stops counting compilations."""
    jax.monitoring.unregister_event_duration_listener(self._compiled)

  def _compiled(self, event: str, *_: Any, **__: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
      self._add("osd:compilations", 1)

  def _by_source(self, source: str, drafted: int, accepted: int) -> None:
    for name, count in (("draft", drafted), ("accepted_draft", accepted)):
      made = self._made[f"osd:{name}_tokens"]
      made.labels(**self._common, source=source).inc(count)

  def _add(self, name: str, value: float) -> None:
    self._made[name].inc(value)


class Shifts:
  """Notes where the traffic changed, by the overlap of a draft that never learns.

  A shift is where `schedule.shift` exceeds `schedule.SHIFT`. The overlaps of the last
  `HISTORY` answers count, and `EARLIER` of them must be known before a shift.
  """

  def __init__(self):
    """Starts without overlaps."""
    self._recent: deque[float] = deque(maxlen=schedule.HISTORY)

  def add(self, overlap: float) -> bool:
    """Returns whether the traffic has changed with this overlap."""
    self._recent.append(overlap)
    recent = tuple(self._recent)
    is_known = len(recent) >= EARLIER + schedule.SHORT
    if not is_known or abs(schedule.shift(recent)) <= schedule.SHIFT:
      return False
    self._recent = deque(recent[-schedule.SHORT :], schedule.HISTORY)
    return True


def finish_reason(done: Finished) -> str:
  """Returns OpenAI's word for why an answer ended."""
  reasons = {"LENGTH": "length", "NOT_FINITE": "error"}
  return reasons.get(done.stop_reason.name, "stop")
