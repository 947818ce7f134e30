"""The clients of a server: only complete answers count, at the times of a trace."""

import contextlib
import http.server
import json
import threading

import http_load
import numpy as np
import pytest


class Handler(http.server.BaseHTTPRequestHandler):
  """Streams two pieces; the request says how the answer ends."""

  def do_POST(self):
    body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
    end = body["messages"][0]["content"]
    self.send_response(429 if end == "refused" else 200)
    if end == "refused":
      self.send_header("Retry-After", "1")
    self.end_headers()
    events: list[object] = [
      {"choices": [{"delta": {"content": x}}]} for x in ("ab", "c")
    ]
    if end == "failed":
      events.append({"error": {"message": "no memory"}})
    if end == "finished":  # as the server of transformers, which sends no [DONE]
      events.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    events.append({"choices": [], "usage": {"completion_tokens": 2}})
    lines = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]
    if end not in ("broken", "finished"):
      lines.append(b"data: [DONE]\n\n")
    with contextlib.suppress(BrokenPipeError):  # the client has left
      for line in [b"{}"] if end == "refused" else lines:
        self.wfile.write(line)

  def log_message(self, *arguments):
    pass


@pytest.fixture(scope="module")
def url():
  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_reply_is_an_answer_only_if_it_is_complete(url):
  statuses = {"whole": 200, "finished": 200, "refused": 429, "failed": 0, "broken": 0}
  for end, status in statuses.items():
    reply = http_load.ask(url, http_load.streamed(end))
    assert (reply.status, reply.retry_after) == (status, status == 429), end
  whole = http_load.ask(url, http_load.streamed("whole"))
  assert (whole.text, len(whole.pieces), whole.tokens) == ("abc", 2, 2)
  partial = http_load.ask(url, http_load.streamed("whole"), leave_after=1)
  assert (partial.status, partial.text) == (0, "ab")
  assert http_load.ask("http://127.0.0.1:1", http_load.streamed("whole")).status == 0


def test_loops_return_replies_in_the_order_of_the_requests(url):
  bodies = [http_load.streamed(end) for end in ("whole", "refused", "broken") * 3]
  times = http_load.arrivals("bursty", len(bodies), 100.0, seed=0)
  by_times = http_load.open_loop(url, bodies, times)
  for replies in (by_times, http_load.closed_loop(url, bodies, clients=4)):
    assert [reply.status for reply in replies] == [200, 429, 0] * 3
  due = np.array([reply.due for reply in by_times])
  assert np.allclose(due - due[0], times - times[0], atol=1e-6)


def test_arrivals_have_the_rate_and_spread_of_their_trace():
  gaps = {x: np.diff(http_load.arrivals(x, 8000, 10.0, 0)) for x in http_load.TRACES}
  for times in gaps.values():
    assert (times >= 0).all() and times.mean() == pytest.approx(0.1, rel=0.15)
  assert gaps["steady"].std() * 10 == pytest.approx(1, rel=0.1)
  assert gaps["bursty"].std() * 10 == pytest.approx(2, rel=0.15)
