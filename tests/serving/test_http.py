"""What clients may send, on the routes and connections of a server without a model."""

import asyncio
import dataclasses
import json
import socket
import threading
import time
import types

import pytest
import tiny_pair
import uvicorn
from starlette.testclient import TestClient

from osd_jax.engine.requests import DecodingConfig
from osd_serve import app, connections, scheduler
from osd_serve.service import ServeConfig, Service

LOCAL = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def service(tmp_path_factory):
  """A service that reads requests, and has no engine to answer them."""
  words = tiny_pair.vocabulary("bytes", tmp_path_factory.mktemp("vocabulary"))
  decoding = DecodingConfig(source_lengths=(16, 64), target_length=32)
  one = object.__new__(Service)
  one.config = ServeConfig(decoding=decoding, model_name="me/tiny")
  one._untemplated = dataclasses.replace(words, template=None)
  check = lambda request: request.check(decoding, words.size)
  engine = types.SimpleNamespace(capacity=4, check=check)
  pair = types.SimpleNamespace(vocabulary=words)
  one.server = types.SimpleNamespace(pair=pair, engine=engine)
  one.sampling = one.config.sampling
  one.metrics = types.SimpleNamespace(refused=lambda status: None)
  one.scheduler = scheduler.Scheduler(one.server, 4, lambda *_: None)
  return one


@pytest.fixture
def client(service):
  with TestClient(app.make(service), base_url=LOCAL) as one:
    yield one


def refused(client, **fields):
  """The error of a completion, or of a chat if it has messages."""
  path = "chat/completions" if "messages" in fields else "completions"
  answer = client.post(f"/v1/{path}", json=fields)
  assert answer.status_code == 400, answer.text
  return answer.json()["error"]


def test_scheme_of_the_token_has_no_case(service):
  client = TestClient(app.make(service, "Secret"))

  def status(header):
    return client.get("/v1/models", headers={"Authorization": header}).status_code

  for header in ("Bearer Secret", "bearer Secret", "BEARER  Secret"):
    assert status(header) == 200
  for header in ("Bearer secret", "Basic Secret", "Secret", "Bearer", "Bearer é"):
    assert status(header.encode()) == 401


def test_model_is_found_by_its_name_alone(client):
  (listed,) = client.get("/v1/models").json()["data"]
  for path in ("me/tiny", "me%2Ftiny"):
    assert client.get(f"/v1/models/{path}").json() == listed
  answer = client.get("/v1/models/tiny")
  assert answer.status_code == 404
  assert answer.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("text", ["\u2028", "\u2029", "\x85", "\x0c", "\n", "🙂", "é"])
def test_event_of_a_stream_is_one_line_for_every_client(text):
  (line,) = filter(None, app._sent({"text": f"a{text}b"}).decode().splitlines())
  assert json.loads(line.removeprefix("data: ")) == {"text": f"a{text}b"}


# A text that is refused once it is encoded, and one that no encoding makes short.
@pytest.mark.parametrize("count", [100, 10**5])
def test_prompt_that_is_too_long_has_the_code_that_clients_know(client, count):
  text = "the rain " * count
  several = [{"role": "user", "content": text}]
  for name, fields in (
    ("prompt", {"prompt": text}),
    ("prompt", {"prompt": [text]}),
    ("messages", {"messages": several}),
  ):
    error = refused(client, **fields)
    assert (error["param"], error["code"]) == (name, "context_length_exceeded")
    assert "maximum context length" in error["message"]
    assert "64 tokens" in error["message"]
  error = refused(client, prompt=[5] * 65)
  assert error["code"] == "context_length_exceeded"
  assert "received 65 tokens" in error["message"]


def test_answer_that_is_too_long_names_the_parameter_of_the_request(client):
  several = [{"role": "user", "content": "a"}]
  for name, fields in (
    ("max_tokens", {"prompt": "a"}),
    ("max_tokens", {"messages": several}),
    ("max_completion_tokens", {"messages": several}),
  ):
    error = refused(client, **fields, **{name: 33})
    assert error["param"] == name
    assert error["message"].startswith(f"{name}: received 33, expected at most 32")


async def longest_wait(work):
  """Awaits `work`; returns its result and how long the event loop stood still."""
  worst, task = 0.0, asyncio.create_task(work)
  while not task.done():
    start = time.perf_counter()
    await asyncio.sleep(0.005)
    worst = max(worst, time.perf_counter() - start - 0.005)
  return task.result(), worst


@pytest.mark.parametrize(
  "path, body",
  [
    ("/v1/completions", {"prompt": "the"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "the"}]}),
    ("/tokenize", {"prompt": "the"}),
    ("/detokenize", {"tokens": [5]}),
  ],
)
def test_event_loop_does_not_wait_for_the_text_of_a_client(
  service, monkeypatch, path, body
):
  vocabulary = type(service._untemplated)

  def slow(*_):
    time.sleep(0.5)
    raise app.Refusal(400, "slow")

  for name in ("encode_prompt", "decode"):
    monkeypatch.setattr(vocabulary, name, slow)
  content = json.dumps(body).encode()
  scope = {"type": "http", "method": "POST", "path": path, "query_string": b""}
  scope["headers"] = [(b"content-type", b"application/json")]
  sent = []

  async def receive():
    return {"type": "http.request", "body": content, "more_body": False}

  async def send(message):
    sent.append(message)

  _, worst = asyncio.run(longest_wait(app.make(service)(scope, receive, send)))
  assert sent[0]["status"] == 400 and b"slow" in sent[1]["body"]
  assert worst < 0.25


def test_page_of_another_name_is_refused_on_this_machine(service):
  local, others = app.make(service, is_local=True), app.make(service)
  hosts = ("localhost", "127.0.0.1:8000", "[::1]:8000", "LOCALHOST:1", "a.localhost")
  foreign = ("evil.example", "evil.example:8000", "10.0.0.1", "127.0.0.1.evil.example")

  def status(application, host, path="/v1/models", token=""):
    headers = {"Host": host, "Authorization": f"Bearer {token}"}
    return TestClient(application).get(path, headers=headers).status_code

  for host in hosts:
    assert status(local, host) == 200
  for host in (*foreign, "[", "localhost:x@evil.example"):
    for path in ("/v1/models", "/", "/metrics", "/v1/models/me/tiny"):
      assert status(local, host, path) == 403
    assert status(others, host) == 200
  guarded = app.make(service, "secret", is_local=True)
  assert status(guarded, "evil.example", token="secret") == 200


@pytest.fixture
def address(service, monkeypatch):
  """The address of a server whose connections wait for at most half a second."""
  monkeypatch.setattr(connections, "HEADER_SECONDS", 0.5)
  listening = socket.create_server(("127.0.0.1", 0))
  config = uvicorn.Config(
    app.make(service, "secret"),
    http=connections.Connection,
    timeout_keep_alive=connections.KEEP_ALIVE_SECONDS,
    log_level="warning",
  )
  server = uvicorn.Server(config)
  thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
  thread.start()
  yield listening.getsockname()
  server.should_exit = True
  thread.join(20)


MODELS = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n\r\n"


def closed_after(link, parts):
  """Sends parts, one every tenth of a second; returns when the server closed."""
  start = time.monotonic()
  link.settimeout(0.1)
  for _ in range(30):
    try:
      link.sendall(next(parts, b""))
      if not link.recv(65536):
        return time.monotonic() - start
    except TimeoutError:
      continue
    except OSError:
      return time.monotonic() - start
  return None


def test_connection_without_a_whole_header_is_closed(address):
  for parts in ([], [b"GET /"], [MODELS[:9], *[b"a"] * 25], [MODELS, MODELS[:5]]):
    with socket.create_connection(address) as link:
      seconds = closed_after(link, iter(parts))
      assert seconds is not None and 0.3 < seconds < 2.5, parts


def test_connection_outlives_the_pools_of_clients_and_the_time_of_a_header(address):
  assert connections.KEEP_ALIVE_SECONDS > 90
  with socket.create_connection(address) as link:
    for _ in range(2):
      assert closed_after(link, iter([MODELS])) is None  # 3 seconds
    link.sendall(MODELS)
    assert link.recv(65536).startswith(b"HTTP/1.1 200")


def test_refused_request_leaves_no_body_on_the_connection(address):
  body = b"x" * 300_000
  head = f"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
  with socket.create_connection(address) as link:
    link.settimeout(5)
    link.sendall(head.encode() + body + MODELS)
    answers = b""
    while answers.count(b"HTTP/1.1 ") < 2 and (part := link.recv(65536)):
      answers += part
  assert b"HTTP/1.1 401" in answers and b"HTTP/1.1 200" in answers


def test_body_that_does_not_arrive_is_refused(address, monkeypatch):
  monkeypatch.setattr(app, "BODY_SECONDS", 0.3)
  head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n"
  head += b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
  with socket.create_connection(address) as link:
    link.settimeout(5)
    link.sendall(head)
    assert link.recv(65536).startswith(b"HTTP/1.1 408")
