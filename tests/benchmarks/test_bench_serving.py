"""Traces of requests, the clients of a server, and the figures of replies."""

import argparse
import contextlib
import http.server
import json
import threading

import bench_serving
import http_load
import numpy as np
import pytest


@pytest.mark.parametrize("trace", http_load.TRACES)
def test_arrivals_have_the_rate_and_are_repeated_by_the_seed(trace):
  times = http_load.arrivals(trace, 4000, 20.0, seed=3)
  assert (np.diff(times) >= 0).all() and times[0] > 0
  assert 4000 / times[-1] == pytest.approx(20, rel=0.15)
  assert np.array_equal(times, http_load.arrivals(trace, 4000, 20.0, seed=3))
  assert not np.array_equal(times, http_load.arrivals(trace, 4000, 20.0, seed=4))


def test_traces_differ_in_their_spread():
  def found(trace):
    return http_load.arrivals(trace, 8000, 10.0, seed=0)

  spread = {x: np.diff(found(x)).std() * 10 for x in ("steady", "bursty")}
  assert spread == {
    "steady": pytest.approx(1, rel=0.1),
    "bursty": pytest.approx(2, rel=0.15),
  }
  # In the middle of a day, the diurnal rate is 1.8 / .2 of the rate at its ends.
  counts = np.histogram(found("diurnal"), bins=10, range=(0, 800))[0]
  assert counts[4] > 3 * counts[0]
  steady = np.histogram(found("steady"), bins=10, range=(0, 800))[0]
  assert steady.min() > 0.8 * steady.max()


def reply(*pieces, due=0.0, ended=None, tokens=5, status=200):
  body = {"usage": {"completion_tokens": tokens}}
  ended = pieces[-1] if ended is None else ended
  return http_load.Reply(due, status, list(pieces), ended, "", body)


def test_figures_are_those_of_answers_and_refusals_are_counted():
  found = bench_serving.figures_of(
    [
      reply(1.0, 1.1, 1.4, due=0.5),
      reply(2.0, due=1.5),  # in one piece, so it has no inter-token latency
      reply(due=1.0, ended=1.2, status=429),
      reply(due=1.0, ended=9.0, status=0),
    ],
    seconds=2.0,
  )
  expected = {
    "time to first token p50, ms": 500,
    "inter-token latency p99, ms": 100,
    "pause p50, ms": 200,
    "latency p50, ms": 700,
    "tokens/s": 5,
    "requests/s": 1,
    "refused": 1,
    "failed": 1,
  }
  assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_rows_compare_pairs_of_systems():
  measured = {name: bench_serving.Measured() for name in ("frozen", "online", "bare")}
  measured["frozen"].add([reply(1.0, 1.2)], 95, 1.0)
  measured["online"].add([reply(1.0, 1.1)], 95, 1.0)
  measured["bare"].add([], 100, 1.0)
  rows = bench_serving.rows_of("a case", "wall", measured)
  found = {row["figure"]: (row["value"], row["asked"]) for row in rows}
  assert found["online over frozen, pause p99"] == (pytest.approx(0.5), "<= 1.1")
  name = "overhead over the bare engine, tokens/s"
  assert found[name] == (pytest.approx(0.05), "<= 0.05")
  assert "bare, latency p50, ms" not in found


class Handler(http.server.BaseHTTPRequestHandler):
  """Streams two pieces; the request says how the answer ends."""

  def do_POST(self):
    body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
    end = body["messages"][0]["content"]
    if end == "refused":
      self.send_response(429)
      self.send_header("Retry-After", "1")
      self.end_headers()
      self.wfile.write(b'{"error": {"message": "full"}}')
      return
    self.send_response(200)
    self.end_headers()
    for text in ("ab", "c"):
      self._send({"choices": [{"delta": {"content": text}}]})
    if end == "failed":
      self._send({"error": {"message": "no memory"}})
    if end == "finished":  # as the server of transformers, which sends no [DONE]
      self._send({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    self._send({"choices": [], "usage": {"completion_tokens": 2}})
    if end not in ("broken", "finished"):
      self._send_line(b"data: [DONE]\n\n")

  def _send(self, event):
    self._send_line(b"data: " + json.dumps(event).encode() + b"\n\n")

  def _send_line(self, line):
    with contextlib.suppress(BrokenPipeError):  # the client has left
      self.wfile.write(line)

  def log_message(self, *arguments):
    pass


@pytest.fixture(scope="module")
def url():
  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.mark.parametrize(
  ("end", "status"),
  [("whole", 200), ("finished", 200), ("refused", 429), ("failed", 0), ("broken", 0)],
)
def test_reply_is_an_answer_only_if_it_is_complete(url, end, status):
  found = http_load.ask(url, http_load.streamed(end))
  assert (found.status, found.is_answered) == (status, status == 200)
  assert found.retry_after == (status == 429)
  if end == "whole":
    assert (found.text, len(found.pieces), found.tokens) == ("abc", 2, 2)


def test_client_that_leaves_has_no_answer(url):
  found = http_load.ask(url, http_load.streamed("whole"), leave_after=1)
  assert (found.status, found.text) == (0, "ab")


def test_nobody_listening_is_no_answer():
  assert http_load.ask("http://127.0.0.1:1", http_load.streamed("whole")).status == 0


def test_loops_return_replies_in_the_order_of_the_requests(url):
  bodies = [http_load.streamed(end) for end in ("whole", "refused", "broken") * 3]
  expected = [200, 429, 0] * 3
  closed = http_load.closed_loop(url, bodies, clients=4)
  times = http_load.arrivals("bursty", len(bodies), 100.0, seed=0)
  opened = http_load.open_loop(url, bodies, times)
  assert [found.status for found in closed] == expected
  assert [found.status for found in opened] == expected
  due = np.array([found.due for found in opened])
  assert np.allclose(due - due[0], times - times[0], atol=1e-6)


def test_prompts_of_a_seed_are_mixed_and_repeat_when_there_are_too_few():
  texts = bench_serving.prompts_of(1700, seed=1)
  assert texts[:100] == texts[1600:] != bench_serving.prompts_of(100, seed=2)


def test_prompts_of_files_are_taken_in_turn_and_no_case_has_those_of_another(tmp_path):
  for name in "ab":
    lines = [json.dumps({"prompt": f"{name}{number}"}) for number in range(5)]
    (tmp_path / name).write_text("\n".join(lines))
  paths = [tmp_path / "a", tmp_path / "b"]
  given = argparse.Namespace(prompts=paths, requests=3, max_tokens=7)
  cases = [bench_serving.bodies_of(given, case) for case in (0, 1)]
  found = [[body["messages"][0]["content"] for body in case] for case in cases]
  assert found == [["a0", "b0", "a1"], ["b1", "a2", "b2"]]
  assert cases[0][0]["max_tokens"] == 7


def test_requests_to_another_server_name_its_model():
  peer, sent = bench_serving.Peer("http://127.0.0.1:1", "qwen"), []

  def send(url, bodies):
    sent.extend(bodies)
    return [reply(1.0) for _ in bodies]

  bench_serving.System(bench_serving.PEER, peer).serve(send, [{"temperature": 0}])
  assert sent == [{"temperature": 0, "model": "qwen"}]


def test_every_system_is_a_server_that_can_be_configured():
  for name, bindings in bench_serving.SYSTEMS.items():
    config = bench_serving.config_of(bindings)
    assert config.learns == (name == "online")
  given = argparse.Namespace(model="models/qwen", bindings=["ServeConfig.port=1"])
  config = bench_serving.config_of(bench_serving.bindings_of(given))
  assert (config.pair.target, config.port) == ("models/qwen", 1)
