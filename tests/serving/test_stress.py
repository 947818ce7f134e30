"""Full queues, leaving clients, bad bodies, shutdown, and an engine that fails."""

import asyncio
import contextlib
import threading
import time

import httpx2
import pytest
from compilations import Compilations
from serving import running
from serving.running import TEXTS, Gate

from osd_jax.engine import engine
from osd_serve import app, scheduler
from osd_serve.service import ServeConfig


@pytest.fixture(scope="module")
def server(pair):
  with running.running(pair, learn=False) as server:
    yield server


@contextlib.contextmanager
def asked(server, *bodies):
  """Sends requests from threads; yields their answers by index, which come later."""
  answers = {}

  def ask(index, body):
    answers[index] = server.post("/v1/completions", temperature=0, **body)

  threads = [threading.Thread(target=ask, args=one) for one in enumerate(bodies)]
  for thread in threads:
    thread.start()
  try:
    yield answers
  finally:
    for thread in threads:
      thread.join(60)


@contextlib.contextmanager
def closed_gate(server):
  gate = Gate(server.service)
  try:
    yield gate
  finally:
    gate.open()


def count(server):
  load = server.service.scheduler.load
  return load.running, load.waiting


def test_queue_is_as_long_as_there_are_rows_unless_a_length_is_set():
  assert ServeConfig(decoding=running.DECODING).places == running.DECODING.rows == 2
  assert ServeConfig(max_waiting=0).places == 0


def test_full_queue_refuses_and_the_others_are_answered(server, plain):
  prompts = [{"prompt": text} for text in TEXTS[:4]]
  with closed_gate(server) as gate:
    with asked(server, *prompts) as answers:
      # The first call began with one row, so the other row is still free.
      server.wait_for(lambda _: sum(count(server)) == 4)
      refused = server.post("/v1/completions", prompt=TEXTS[4])
      assert refused.status_code == 429 and refused.headers["Retry-After"] == "1"
      error = refused.json()["error"]
      assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
      # All answers of a request are seconds, or none.
      assert server.post("/v1/completions", prompt="a", n=3).status_code == 429
      assert sum(count(server)) == 4
      gate.open()
  assert [answers[i].json()["choices"][0]["text"] for i in range(4)] == plain[:4]


def test_news_of_a_step_wake_the_event_loop_once(monkeypatch):
  """Waking it gives up the interpreter lock, and a step has news for many clients."""

  async def work():
    calls, woken = [scheduler.Call([], True) for _ in range(2)], []
    loop = asyncio.get_running_loop()
    wake = lambda *arguments: woken.append(0) or loop.call_soon(*arguments)
    monkeypatch.setattr(loop, "call_soon_threadsafe", wake, raising=False)
    news = [scheduler.Event(None, piece) for piece in "abc"]
    scheduler._post(list(zip([calls[0], calls[1], calls[0]], news, strict=True)))
    await asyncio.sleep(0)
    get = lambda call, count: [call._events.get_nowait().piece for _ in range(count)]
    return get(calls[0], 2), get(calls[1], 1), len(woken)

  assert asyncio.run(work()) == (["a", "c"], ["b"], 1)


def left(server):
  """Waits until the server knows that the client of its only request has left."""
  jobs = server.service.scheduler._running
  server.wait_for(lambda _: all(job.is_cancelled for job in jobs))
  assert count(server) == (1, 0)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_client_that_leaves_frees_its_row_within_one_call(server, plain, is_streamed):
  body = {"prompt": TEXTS[0], "temperature": 0, "stream": is_streamed}
  with closed_gate(server) as gate:
    if is_streamed:
      with server.client.stream("POST", "/v1/completions", json=body) as answer:
        gate.step()
        assert next(answer.iter_lines()).startswith("data: ")
    else:
      with pytest.raises(httpx2.ReadTimeout):
        server.client.post("/v1/completions", json=body, timeout=0.5)
    left(server)
    gate.step()
    server.wait_for(lambda _: count(server) == (0, 0))
    assert server.service.server.engine.in_flight == 0
  assert server.text(TEXTS[1]) == plain[1]


def test_rows_that_nobody_left_are_kept(server, plain):
  """The negative control: without a cancellation one call ends no row."""
  with closed_gate(server) as gate, asked(server, {"prompt": TEXTS[0]}) as answers:
    server.wait_for(lambda _: count(server) == (1, 0))
    gate.step()
    time.sleep(0.2)
    assert count(server) == (1, 0) and server.service.server.engine.in_flight == 1
    gate.open()
  assert answers[0].json()["choices"][0]["text"] == plain[0]


def test_waiting_client_that_leaves_frees_its_place(server):
  with closed_gate(server) as gate:
    with asked(server, *[{"prompt": text} for text in TEXTS[:2]]):
      server.wait_for(lambda _: sum(count(server)) == 2)
      with pytest.raises(httpx2.ReadTimeout):
        server.client.post("/v1/completions", json={"prompt": "a"}, timeout=0.3)
      server.wait_for(lambda _: sum(count(server)) == 2)
      gate.open()


BAD = [
  ({"prompt": "word " * 100}, "prompt: received 202 tokens, but"),
  ({"prompt": [10**6]}, "decoding: the prompt holds ids from"),
  ({"prompt": "a", "n": 5}, "n: received 5 answers in one request, expected at most 4"),
  ({"prompt": "a", "max_tokens": 25}, "max_tokens: received 25, expected at most 24"),
]


def test_bad_requests_have_one_line_and_disturb_nobody(server, plain):
  for body, message in BAD:
    answer = server.post("/v1/completions", **body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["message"].startswith(message)
    assert "\n" not in error["message"]
  conversation = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
  refused = server.post("/v1/chat/completions", messages=conversation)
  assert refused.status_code == 400 and "takes one user message" in refused.text

  def send(content, kind="application/json; charset=utf-8"):
    headers = {"Content-Type": kind}
    return server.client.post("/v1/completions", content=content, headers=headers)

  assert send(b'{"prompt": "\\ud800"}').status_code == 400
  assert send(b'{"prompt": "a"}', "text/plain").status_code == 415
  long = send(b" " * (app.BODY_LIMIT + 1))
  assert long.status_code == 413 and long.json()["error"]["code"] == "body_too_long"
  assert server.client.get("/v1/none").status_code == 404
  assert server.client.get("/v1/completions").status_code == 405
  assert server.client.get("/v1/none").json()["error"]["message"] == (
    "/v1/none: no such path."
  )
  assert server.text(TEXTS[0]) == plain[0]


def test_nothing_is_compiled_after_the_start(server, plain):
  bodies = [
    {"temperature": 0, "stop": plain[0][4:7]},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.9},
    {"min_p": 0.1, "repetition_penalty": 1.2, "n": 2},
    {"speculative": False},
    {"logprobs": 1},
  ]
  with Compilations() as compiled:
    for body in bodies:
      assert server.post("/v1/completions", prompt=TEXTS[0], **body).is_success
  assert compiled.count == 0


def test_metrics_count_what_was_served(server):
  before = server.metrics()
  body = server.complete(TEXTS[0])
  server.post("/v1/completions", prompt="")
  after = server.metrics()
  spec = body["metrics"]["speculative_decoding"]
  for name, by in (
    ("vllm:spec_decode_num_drafts_total{}", spec["num_spec_steps"]),
    ("vllm:spec_decode_num_draft_tokens_total{}", spec["num_draft_tokens"]),
    ("vllm:spec_decode_num_accepted_tokens_total{}", spec["num_accepted_draft_tokens"]),
    ("vllm:generation_tokens_total{}", 24),
    ("vllm:prompt_tokens_total{}", body["usage"]["prompt_tokens"]),
    ("vllm:time_to_first_token_seconds_count{}", 1),
    ("vllm:iteration_tokens_total_sum{}", 24 + body["usage"]["prompt_tokens"]),
    ('vllm:request_success_total{finished_reason="length",}', 1),
    ('osd:requests_refused_total{,status="400"}', 1),
  ):
    assert after[name] - before.get(name, 0) == by, name
  assert after["vllm:engine_healthy{}"] == 1
  assert after["vllm:num_requests_running{}"] == 0
  seconds = {
    part: after[f"vllm:request_{part}_time_seconds_sum{{}}"]
    - before[f"vllm:request_{part}_time_seconds_sum{{}}"]
    for part in ("prefill", "decode", "inference")
  }
  assert min(seconds.values()) > 0
  assert seconds["inference"] == pytest.approx(seconds["prefill"] + seconds["decode"])


def test_token_is_needed_where_one_is_set(pair):
  with running.running(pair, learn=False, token="sesame") as server:
    assert server.client.get("/v1/models").status_code == 200
    for header in ({}, {"Authorization": "Bearer open"}, {"Authorization": "sesame"}):
      with httpx2.Client(base_url=server.url, headers=header) as other:
        for path in ("/v1/models", "/metrics", "/version"):
          assert other.get(path).status_code == 401
        refused = other.post("/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 401
        assert other.get("/health").status_code == 200


def test_draining_refuses_new_requests_and_finishes_the_others(pair, plain):
  with running.running(pair, learn=False) as server:
    with closed_gate(server) as gate, asked(server, {"prompt": TEXTS[0]}) as answers:
      server.wait_for(lambda _: count(server) == (1, 0))
      server.service.scheduler.drain()
      refused = server.post("/v1/completions", prompt="a")
      assert refused.status_code == 503
      assert refused.json()["error"]["code"] == "draining"
      assert server.client.get("/health").status_code == 503
      gate.open()
    assert answers[0].json()["choices"][0]["text"] == plain[0]


def test_engine_that_fails_is_unhealthy_and_says_why(pair, monkeypatch):
  with running.running(pair, learn=False) as server:
    assert server.client.get("/health").status_code == 200

    def step(self):
      raise RuntimeError("no memory")

    monkeypatch.setattr(engine.Engine, "step", step)
    lost = server.post("/v1/completions", prompt="a")
    assert lost.status_code == 503 and "no memory" in lost.json()["error"]["message"]
    assert server.client.get("/health").status_code == 503
    refused = server.post("/v1/completions", prompt="a")
    assert refused.status_code == 503 and "no memory" in refused.text
