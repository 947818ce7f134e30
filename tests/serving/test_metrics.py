"""Sources of drafted tokens, seconds saved against plain decoding, traffic shifts."""

import dataclasses
import random
import threading
import types

import numpy as np
import pytest
from serving import running
from serving.running import TEXTS

from osd_jax.distillation.schedule import NOISE
from osd_jax.engine import measurement, steps
from osd_jax.engine.requests import Prompt
from osd_serve.metrics import EARLIER, Shifts
from osd_serve.scheduler import Job, Scheduler

COUNTED = "osd:draft_tokens_total", "osd:accepted_draft_tokens_total"


def by_source(server):
  """Drafted and accepted tokens of each source that the server lists."""
  found = server.metrics()
  return {
    source: [found[f'{name}{{,source="{source}"}}'] for name in COUNTED]
    for source in ("draft", "cache")
    if f'{COUNTED[0]}{{,source="{source}"}}' in found
  }


def test_draft_alone_is_the_only_source(pair):
  with running.running(pair, learn=False) as server:
    assert by_source(server) == {"draft": [0, 0]}
    spec = server.complete(TEXTS[0])["metrics"]["speculative_decoding"]
    drafted, accepted = spec["num_draft_tokens"], spec["num_accepted_draft_tokens"]
    assert by_source(server) == {"draft": [drafted, accepted]} and drafted > 0


def test_cache_and_draft_are_counted_apart(pair):
  decoding = dataclasses.replace(running.DECODING, cache_tokens=1024)
  with running.running(pair, learn=False, decoding=decoding) as server:
    server.text(TEXTS[0], learn=False)
    fresh = by_source(server)
    for _ in range(4):  # a repeated answer is in the cache
      server.text(TEXTS[0])
    found, live = by_source(server), server.client.get("/live").json()
    total = server.metrics()["vllm:spec_decode_num_draft_tokens_total{}"]
  assert found["cache"][0] > fresh["cache"][0] and found["cache"][1] > 0
  assert found["draft"][0] + found["cache"][0] == total
  split = live["by_draft_per_call"] + live["by_cache_per_call"]
  # Each call emits one token of the target's own, or none if the answer is cut.
  assert 0 < live["tokens_per_target_call"] - split <= 1
  assert live["sources"] == ["draft", "cache"]


def plain_steps(counts):
  """Plain steps of each job, from the tokens that every call emitted for each."""
  tokens = np.zeros(5, np.int32)
  jobs = [Job(i, tokens, Prompt("-"), str, False, 0) for i in range(len(counts[0]))]
  called, emitted = [], [0] * len(jobs)
  fake = types.SimpleNamespace(_running=jobs, _on_call=called.append)
  for row in counts:
    emitted = [before + count for before, count in zip(emitted, row, strict=True)]
    for job, length in zip(jobs, emitted, strict=True):
      job.request.watch(np.zeros(length, np.int32))
    Scheduler._count(fake, {})
  return [job.plain_steps for job in jobs], called


def test_rows_share_the_plain_steps_of_a_call():
  """Two rows: a plain step emits two tokens. One row alone: one."""
  steps, called = plain_steps([(4, 2), (3, 0)])
  assert steps == [{2: 4 / 2, 1: 3}, {2: 2 / 2}]
  assert called == [4 + 2 + 2 * 5, 3]


def test_saved_seconds_are_plain_decoding_minus_what_was_spent(pair):
  with running.running(pair, learn=False) as server:
    made = server.service
    ((bucket, costs),) = made._plain.items()
    assert bucket == 48 and costs.ms.min() > 0 and costs.rows == 2
    made._plain = {48: priced(costs, 1e4, 5e4)}
    server.text(TEXTS[0])
    found = server.metrics()
    plain = found["osd:plain_seconds_total{}"]
    assert plain == pytest.approx(24 * 10, rel=1e-3)  # one row, 10 s a step
    saved = plain - found["osd:decoding_seconds_total{}"]
    assert found["osd:saved_seconds{}"] == pytest.approx(saved)
    assert server.client.get("/live").json()["speed"] > 100
    server.post("/v1/completions", prompt=TEXTS[0], temperature=1.0, seed=1)
    assert server.metrics()["osd:plain_seconds_total{}"] > plain + 24 * 10
    # The negative control: where plain decoding is free, drafting loses time.
    made._plain = {48: priced(costs, 1e-9)}
    server.text(TEXTS[1])
    assert server.metrics()["osd:saved_seconds{}"] < found["osd:saved_seconds{}"] * 10
    lost = server.metrics()["osd:saved_seconds{}"]
    server.text(TEXTS[2])
    assert server.metrics()["osd:saved_seconds{}"] < lost


@pytest.mark.parametrize(("step_ms", "rounds"), [(0.5, 4), (4.0, 2), (60.0, 1)])
def test_clients_of_a_slow_target_get_every_round(pair, monkeypatch, step_ms, rounds):
  measure, called = measurement.measure, []

  def slow(*arguments, **named):
    return priced(measure(*arguments, **named), step_ms)

  advance = steps.advance

  def noted(spec, num_draft_tokens, served, max_rounds, *rest):
    called.append(int(max_rounds))
    return advance(spec, num_draft_tokens, served, max_rounds, *rest)

  monkeypatch.setattr(measurement, "measure", slow)
  with running.running(pair, learn=False) as server:
    monkeypatch.setattr(steps, "advance", noted)
    server.text(TEXTS[0])
  assert set(called) == {rounds}


def priced(costs, *step_ms):
  """Costs with the time of a plain step, of greedy rows and of sampled ones."""
  round_ms = tuple(((ms,),) for ms in step_ms)
  return dataclasses.replace(costs, round_ms=round_ms, call_ms=0, request_ms=0)


def shifts_of(means, seed):
  draw, found = random.Random(seed), Shifts()
  overlaps = (min(max(draw.gauss(mean, NOISE), 0.0), 1.0) for mean in means)
  return [place for place, overlap in enumerate(overlaps) if found.add(overlap)]


@pytest.mark.parametrize("after", [0.25, 0.85])
def test_shift_of_traffic_is_noted_soon(after):
  for seed in range(20):
    marks = shifts_of([0.55] * 60 + [after] * 40, seed)
    assert [mark for mark in marks if mark >= 60], seed
    assert marks[0] < 60 + 12


def test_steady_traffic_has_hardly_any_shift():
  """The negative control: noise alone. And a shift needs a known past."""
  marks = [mark for seed in range(20) for mark in shifts_of([0.55] * 250, seed)]
  assert len(marks) <= 5
  assert shifts_of([0.2] * 10 + [0.9] * (EARLIER - 4), 0) == []


def test_waiting_records_are_shown(pair, monkeypatch):
  with running.running(pair) as server:
    loop = server.service.loop
    # Nothing is learnt while the thread is busy.
    busy = threading.Event()
    loop.submit(busy.wait)
    for text in TEXTS[:3]:
      server.text(text)
    assert server.metrics()["osd:records_waiting{}"] == 3
    busy.set()
    server.wait_for(lambda service: service.loop.learned == 3)
    assert server.metrics()["osd:records_waiting{}"] == 0
