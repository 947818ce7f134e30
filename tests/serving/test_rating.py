"""The rating of a server is that of a client's stopwatch, at every load."""

import threading

import httpx2
import numpy as np
import pytest
from serving import running
from serving.running import TEXTS

from osd_jax.engine.engine import CallTime
from osd_jax.engine.requests import Prompt
from osd_serve.rating import Rating
from osd_serve.scheduler import Job, Scheduler, Turn

STEP_MS, CALL_MS, ROUNDS = 10.0, 1.0, 4  # of plain decoding at the idle start


class Machine:
  """A simulated engine on a clock of its own, slowed down by a load."""

  def __init__(self, load, seed=0):
    self.now, self.load, self.spent = 0.0, load, 0.0
    self.random = np.random.default_rng(seed)

  def call_ms(self, call):
    return call.rounds * STEP_MS * (1 + 0.2 * (call.rows - 1)) + CALL_MS

  def takes(self, milliseconds):
    """Passes the time that something takes now, which varies by a third."""
    noise = self.random.gamma(9.0, 1 / 9.0)
    spent = milliseconds * self.load(self.now) * noise
    self.now += spent / 1e3
    return spent

  def again(self, call, rounds):
    before = self.now
    expected = [self.call_ms(call._replace(rounds=rounds))] * 4
    _, *counted = map(self.takes, expected)
    self.spent += self.now - before
    return sum(counted) / sum(expected[1:])


def serve(rating, machine, rows, per_round, answers, length=40, host_ms=2.0):
  """Serves answers of a length; returns jobs and the milliseconds of all turns."""
  jobs, total = [], 0.0
  for _ in range(answers):
    some = [
      Job(0, np.zeros(5, np.int32), Prompt("-"), str, False, 0) for _ in range(rows)
    ]
    jobs += some
    left, prefill_ms = length, machine.takes(3.0)
    while left:
      rounds = min(ROUNDS, -(-left // per_round))
      tokens = min(left, rounds * per_round)
      left -= tokens
      drafted = 7.0 * (per_round > 1)
      call = CallTime(64, rows, False, drafted, False, rounds, 0.0, prefill_ms)
      # A round that drafts takes 1.6 plain steps.
      ms = machine.takes(machine.call_ms(call) * (1.6 if drafted else 1.0))
      host = machine.takes(host_ms)
      turn_ms = prefill_ms + ms + host
      for job in some:
        job.decoding_ms += turn_ms / rows
      turn = Turn(0, dict.fromkeys(some, tokens), turn_ms, not left)
      rating.add(turn, call._replace(milliseconds=ms))
      rating.time_again()
      total, prefill_ms = total + turn_ms, 0.0
  return jobs, total


def rate(jobs):
  return sum(job.plain_ms for job in jobs) / sum(job.decoding_ms for job in jobs)


LOADS = {
  "idle": lambda now: 1.0,
  "busy": lambda now: 3.0,
  "on and off": lambda now: 1.0 + 2.0 * (now % 0.7 < 0.3),
}


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("per_round", [2, 5])
def test_rating_is_that_of_a_stopwatch(load, rows, per_round):
  machine = Machine(LOADS[load])
  rating = Rating(machine, ROUNDS)
  serve(rating, machine, rows, per_round, 200)
  spent, began = machine.spent, machine.now
  jobs, drafted_ms = serve(rating, machine, rows, per_round, 600)
  share = (machine.spent - spent) / (machine.now - began)
  assert share < 0.02  # the pauses for plain calls
  # The stopwatch: the same answers plainly, over the same stretch of time.
  again = Machine(LOADS[load], seed=1)
  again.now = began
  _, plain_ms = serve(Rating(again, ROUNDS), again, rows, 1, 600)
  assert rate(jobs) == pytest.approx(plain_ms / drafted_ms, rel=0.15)


@pytest.mark.parametrize("load", LOADS)
def test_plain_traffic_is_rated_one(load):
  machine = Machine(LOADS[load])
  jobs, _ = serve(Rating(machine, ROUNDS), machine, 2, 1, 30)
  assert rate(jobs) == pytest.approx(1.0)
  assert not machine.spent  # its own calls say what plain decoding takes


def test_times_of_the_start_alone_would_be_wrong():
  """The negative control: a busy server whose load is not measured."""
  machine = Machine(LOADS["busy"])
  rating = Rating(machine, ROUNDS)
  rating.time_again = lambda: None
  jobs, _ = serve(rating, machine, 1, 5, 50)
  assert rate(jobs) < 0.5 * 5 / 1.6


def test_rows_share_the_time_of_a_turn():
  jobs = [Job(i, np.zeros(5, np.int32), Prompt("-"), str, False, 0) for i in range(2)]
  turns = []
  fake = type("Fake", (), {"_running": jobs, "_on_turn": staticmethod(turns.append)})
  for lengths in ((4, 2), (7, 2)):
    for job, length in zip(jobs, lengths, strict=True):
      job.request.watch(np.zeros(length, np.int32))
    Scheduler._count(fake, {}, 30.0)
  assert [job.decoding_ms for job in jobs] == [15.0 + 30.0, 15.0]
  assert [turn.tokens for turn in turns] == [4 + 2 + 2 * 5, 3]
  assert turns[1].emitted == {jobs[0]: 3}


def measured(server, clients, speculative):
  """Returns the server's milliseconds per token for some clients, and the rating."""

  def work():
    with httpx2.Client(base_url=server.url, timeout=60) as client:
      for text in 2 * TEXTS:
        fields = {"prompt": text, "temperature": 0, "speculative": speculative}
        assert client.post("/v1/completions", json=fields).status_code == 200

  before = server.client.get("/live").json()
  threads = [threading.Thread(target=work) for _ in range(clients)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  after = server.client.get("/live").json()
  plain, drafting = (
    after[name] - before[name] for name in ("plain_seconds", "decoding_seconds")
  )
  tokens = after["tokens"] - before["tokens"]
  return 1e3 * drafting / tokens, plain / drafting


@pytest.mark.parametrize("clients", [1, 4])
def test_live_rating_agrees_with_plain_requests(pair, clients):
  """A coarse check, because other work of a machine weighs on short phases.

  The draft of this pair is random: drafting takes three to four times as long.
  """
  with running.running(pair, learn=False) as server:
    measured(server, clients, True)  # the load is known from here on
    phases = [
      (measured(server, clients, True), measured(server, clients, False))
      for _ in range(6)
    ]
    found = server.metrics()
  server_side = np.median([plain[0] / drafted[0] for drafted, plain in phases])
  rating = np.median([drafted[1] for drafted, _ in phases])
  assert [plain[1] for _, plain in phases] == pytest.approx([1.0] * 6, abs=0.1)
  assert 1 / 5 < rating / server_side < 5
  assert max(rating, server_side) < 1.2
  saved = found["osd:plain_seconds_total{}"] - found["osd:decoding_seconds_total{}"]
  assert found["osd:saved_seconds{}"] == pytest.approx(saved)


def test_undrafted_requests_are_decoded_plainly(pair, plain, monkeypatch):
  """With a fixed K, they took rounds that verify K tokens: twice as long."""
  with running.running(pair, learn=False) as server:
    engine, calls = server.service.server.engine, []
    step = engine.step

    def noted():
      answers = step()
      calls.append(engine.last_call.drafted)
      return answers

    monkeypatch.setattr(engine, "step", noted)
    compiled = server.metrics()["osd:compilations_total{}"]
    assert server.text(TEXTS[0], speculative=False) == plain[0]
    assert set(calls) == {0}
    assert server.text(TEXTS[1]) == plain[1]
    assert calls[-1] == running.DECODING.num_draft_tokens
    assert server.metrics()["osd:compilations_total{}"] == compiled
