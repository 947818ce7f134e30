"""Sources of drafted tokens, seconds saved against plain decoding, traffic shifts."""

import dataclasses
import random
import threading

import pytest
from serving import running
from serving.running import TEXTS

from osd_jax.distillation.schedule import NOISE
from osd_jax.engine import measurement, steps
from osd_serve.metrics import EARLIER, Shifts

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


@pytest.mark.parametrize(("step_ms", "rounds"), [(0.5, 4), (4.0, 2), (60.0, 1)])
def test_clients_of_a_slow_target_get_every_round(pair, monkeypatch, step_ms, rounds):
  measure, called = measurement._Rows.costs, []

  def slow(*arguments):
    round_ms = (((step_ms,),),) * 2
    return dataclasses.replace(measure(*arguments), round_ms=round_ms)

  advance = steps.advance

  def noted(spec, num_draft_tokens, served, max_rounds, *rest):
    called.append(int(max_rounds))
    return advance(spec, num_draft_tokens, served, max_rounds, *rest)

  monkeypatch.setattr(measurement._Rows, "costs", slow)
  with running.running(pair, learn=False) as server:
    monkeypatch.setattr(steps, "advance", noted)
    server.text(TEXTS[0])
  assert set(called) == {rounds}


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
