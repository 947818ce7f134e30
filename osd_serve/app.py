"""The HTTP routes, on starlette."""

import asyncio
import contextlib
import importlib.metadata
import importlib.resources
import json
import secrets
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from osd_jax import base
from osd_serve import connections, protocol, schema
from osd_serve.protocol import Refusal
from osd_serve.scheduler import (
  Call,
  DrainingError,
  EngineFailedError,
  Event,
  QueueFullError,
)
from osd_serve.service import Service

BODY_LIMIT = 2**20  # bytes; a prompt has at most some thousand tokens
BODY_SECONDS = 60  # for all of it
DRAFT_LIMIT = 2**32  # bytes of a draft's file
_OPEN = ("/", "/health", "/live")  # need no token
_BYTES = "application/octet-stream"
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"

Handler = Callable[[Request], Awaitable[Response]]
Result = TypeVar("Result")


def make(service: Service, token: str = "", is_local: bool = False) -> Starlette:
  """Returns the application.

  Every route but the live page and /health needs the bearer token; "" for none.
  `is_local`: it listens on a loopback address, so that without a token only requests
  to a name of this machine are answered.
  """
  routes = _Routes(service, bool(token))
  table: list[tuple[str, str, Handler]] = [
    ("/", "GET", routes.page),
    ("/live", "GET", routes.live),
    ("/health", "GET", routes.health),
    ("/metrics", "GET", routes.metrics),
    ("/version", "GET", routes.version),
    ("/openapi.json", "GET", routes.openapi),
    ("/v1/models", "GET", routes.models),
    ("/v1/models/{model:path}", "GET", routes.model),
    ("/v1/completions", "POST", routes.completions),
    ("/v1/chat/completions", "POST", routes.chat_completions),
    ("/admin/draft", "GET", routes.draft),
    ("/admin/draft", "PUT", routes.load_draft),
    ("/admin/cache", "DELETE", routes.clear_cache),
    ("/tokenize", "POST", routes.tokenize),
    ("/detokenize", "POST", routes.detokenize),
  ]

  def guarded(handler: Handler) -> Handler:
    async def run(request: Request) -> Response:
      try:
        if is_local and not token:
          _check_host(request)
        _check_token(request, token)
        if request.url.path.startswith("/admin/") and not token:
          raise Refusal(403, "needs a server with a token; set OSD_API_KEY.")
        return await handler(request)
      except base.InputError as error:
        refusal = Refusal(400, " ".join(str(error).split()))
      except EngineFailedError as error:
        refusal = Refusal(503, f"the engine has failed: {error}.", code="failed")
      except QueueFullError:
        places = service.config.places
        message = f"the queue is full ({places} requests are waiting); try again later."
        refusal = Refusal(429, message, code="queue_full")
      except DrainingError:
        message = "the server is shutting down and takes no more requests."
        refusal = Refusal(503, message, code="draining")
      except Refusal as error:
        refusal = error
      service.metrics.refused(refusal.status)
      return _refused(refusal)

    return run

  @contextlib.asynccontextmanager
  async def lifespan(_: Starlette) -> AsyncIterator[None]:
    watching = asyncio.create_task(service.watch())
    yield
    watching.cancel()

  return Starlette(
    lifespan=lifespan,
    routes=[Route(path, guarded(run), methods=[verb]) for path, verb, run in table],
    exception_handlers={404: _unknown_path, 405: _wrong_method, 500: _failed},
  )


def _check_token(request: Request, token: str) -> None:
  if not token or request.url.path in _OPEN:
    return
  scheme, _, given = request.headers.get("authorization", "").partition(" ")
  # Schemes have no case (RFC 9110, 11.1). Bytes, because compare_digest refuses text
  # beyond ASCII.
  is_same = secrets.compare_digest(given.strip().encode(), token.encode())
  if scheme.lower() != "bearer" or not is_same:
    message = (
      "expected the header Authorization: Bearer TOKEN with this server's token."
    )
    raise Refusal(401, message, code="invalid_api_key")


def _check_host(request: Request) -> None:
  # A web page may make its own name point to this machine (DNS rebinding), and could
  # then read what this server answers.
  host = request.headers.get("host", "")
  if host and not connections.names_loopback(host):
    message = (
      f"Host: received {host[:80]!r}, expected localhost or a loopback address; for"
      " other names set OSD_API_KEY."
    )
    raise Refusal(403, message, code="unknown_host")


def _refused(refusal: Refusal) -> JSONResponse:
  headers = {"Retry-After": "1"} if refusal.status in (429, 503) else {}
  if refusal.status == 401:
    headers = {"WWW-Authenticate": "Bearer"}
  return JSONResponse(refusal.body(), refusal.status, headers)


async def _unknown_path(request: Request, _: Exception) -> Response:
  return _refused(Refusal(404, f"{request.url.path}: no such path."))


async def _wrong_method(request: Request, error: Exception) -> Response:
  headers = getattr(error, "headers", None)
  refusal = Refusal(405, f"{request.url.path}: not for {request.method}.")
  return JSONResponse(refusal.body(), 405, headers)


async def _failed(_: Request, error: Exception) -> Response:
  kind = type(error).__name__
  return _refused(Refusal(500, f"an internal error, {kind}; the log has the details."))


class _Routes:
  """One method per path."""

  def __init__(self, service: Service, has_token: bool):
    self._service, self._model = service, service.config.model_name
    page = importlib.resources.files("osd_serve") / "page.html"
    self._page = page.read_text(encoding="utf-8")
    decoding = service.config.decoding
    self._longest = decoding.source_lengths[-1] + decoding.target_length
    about = {"id": self._model, "object": "model", "owned_by": "osd_jax"}
    self._about = {**about, "created": 0, "max_model_len": self._longest}
    lengths = decoding.target_length, decoding.record_top_k
    self._schema = schema.make(self._model, *lengths, token=has_token)

  async def page(self, _: Request) -> Response:
    return HTMLResponse(self._page)

  async def live(self, request: Request) -> Response:
    has_history = "history" in request.query_params
    service = self._service
    return JSONResponse(service.history if has_history else service.live())

  async def health(self, _: Request) -> Response:
    load = self._service.scheduler.load
    if load.failure is not None:
      raise Refusal(503, "the engine has failed; restart the server.", code="failed")
    if load.draining:
      raise Refusal(503, "the server is shutting down.", code="draining")
    return Response()

  async def metrics(self, _: Request) -> Response:
    return Response(self._service.exposition(), media_type=_PROMETHEUS)

  async def draft(self, _: Request) -> Response:
    headers = {"Content-Disposition": 'attachment; filename="draft.safetensors"'}
    return Response(await self._service.draft(), 200, headers, _BYTES)

  async def load_draft(self, request: Request) -> Response:
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
      async for part in _body(request, DRAFT_LIMIT):
        file.write(part)
      file.flush()
      try:
        version = await self._service.load_draft(Path(file.name))
      except base.InputError as error:
        message = " ".join(str(error).split()).replace(file.name, "the body")
        raise Refusal(400, message) from None
    return JSONResponse({"draft_version": version})

  async def clear_cache(self, _: Request) -> Response:
    await self._service.clear_cache()
    return Response(status_code=204)

  async def version(self, _: Request) -> Response:
    return JSONResponse({"version": importlib.metadata.version("osd-jax")})

  async def openapi(self, _: Request) -> Response:
    return JSONResponse(self._schema)

  async def models(self, _: Request) -> Response:
    return JSONResponse({"object": "list", "data": [self._about]})

  async def model(self, request: Request) -> Response:
    protocol.check_model(request.path_params["model"], self._model)
    return JSONResponse(self._about)

  async def completions(self, request: Request) -> Response:
    return await self._complete(request, is_chat=False)

  async def chat_completions(self, request: Request) -> Response:
    return await self._complete(request, is_chat=True)

  async def tokenize(self, request: Request) -> Response:
    def encode(fields: dict[str, Any]) -> Response:
      body = protocol.read(protocol.Tokenize, fields, self._model)
      if body.messages is not None:
        tokens = self._service.encode(protocol.conversation(body.messages), True)
      elif body.prompt is not None:
        tokens = self._service.encode(body.prompt, False)
      else:
        raise Refusal(400, "prompt: missing, expected a text, or messages.", "prompt")
      sizes = {"count": len(tokens), "max_model_len": self._longest}
      return JSONResponse({**sizes, "tokens": tokens.tolist()})

    return await _read(request, encode)

  async def detokenize(self, request: Request) -> Response:
    def decode(fields: dict[str, Any]) -> Response:
      body = protocol.read(protocol.Detokenize, fields, self._model)
      text = self._service.server.pair.vocabulary.decode(body.tokens)
      return JSONResponse({"prompt": text})

    return await _read(request, decode)

  async def _complete(self, request: Request, is_chat: bool) -> Response:
    service = self._service
    top = service.config.decoding.record_top_k

    def read(fields: dict[str, Any]) -> tuple[protocol.Ask, list[np.ndarray]]:
      ask = protocol.read_ask(fields, is_chat, self._model, top)
      return ask, service.prompts(ask)

    ask, prompts = await _read(request, read)
    call = service.submit(ask, prompts)
    reply = protocol.Reply(ask, self._model)
    if ask.stream:
      lines = self._stream(ask, call, reply)
      return _Stream(lines, lambda: service.scheduler.cancel(call))
    async with _cancelled_on_disconnect(request, call, service):
      choices = await self._choices(ask, call)
    return JSONResponse(reply.whole(choices, self._metrics(choices)))

  async def _choices(self, ask: protocol.Ask, call: Call) -> list[protocol.Choice]:
    choices = [
      await self._service.choice(ask, event)
      async for event in _checked(call)
      if event.done is not None
    ]
    return sorted(choices, key=lambda choice: choice.index)

  async def _stream(
    self, ask: protocol.Ask, call: Call, reply: protocol.Reply
  ) -> AsyncIterator[bytes]:
    choices: list[protocol.Choice] = []
    try:
      for chunk in reply.first_chunks():
        yield _sent(chunk)
      if ask.echo:
        for job in call.jobs:
          yield _sent(reply.piece(job.index, str(ask.inputs[job.index // ask.n])))
      async for event in _checked(call):
        if event.piece:
          yield _sent(reply.piece(event.job.index, event.piece))
        if event.done is not None:
          choices.append(await self._service.choice(ask, event))
          last = reply.last_piece(choices[-1])
          if len(choices) == len(call.jobs) and not ask.include_usage:
            last["metrics"] = self._metrics(choices)
          yield _sent(last)
      if ask.include_usage:
        yield _sent(reply.usage_chunk(choices, self._metrics(choices)))
    except Refusal as refusal:  # the status has been sent already
      yield _sent(refusal.body())
    yield b"data: [DONE]\n\n"

  def _metrics(self, choices: list[protocol.Choice]) -> dict[str, Any]:
    """Returns the field `metrics` of an answer; null where there are several."""
    if len(choices) != 1:
      return {"speculative_decoding": None}
    most = self._service.config.decoding.num_draft_tokens
    return {"speculative_decoding": protocol.speculation(choices[0].done, most)}


class _Stream(StreamingResponse):
  """Server-sent events; calls `on_end` when they have ended or the client has left."""

  def __init__(self, lines: AsyncIterator[bytes], on_end: Callable[[], object]):
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    super().__init__(lines, headers=headers, media_type="text/event-stream")
    self._on_end = on_end

  async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
    # Not in the generator: a client may leave before it starts, or while it is
    # suspended, and then it ends late or never.
    try:
      await super().__call__(scope, receive, send)
    finally:
      self._on_end()


async def _checked(call: Call) -> AsyncIterator[Event]:
  """Yields the events of a call; errors of the engine become refusals."""
  try:
    async for event in call.events():
      if (
        event.done is not None and event.done.stop_reason == base.StopReason.NOT_FINITE
      ):
        raise Refusal(500, f"no answer: {event.done.stop_reason.message}.")
      yield event
  except EngineFailedError as error:
    raise Refusal(503, f"no answer: {error}.", code="failed") from None


@contextlib.asynccontextmanager
async def _cancelled_on_disconnect(
  request: Request, call: Call, service: Service
) -> AsyncIterator[None]:
  """Cancels the call if the client leaves before the body ends."""
  waiting = asyncio.current_task()
  assert waiting is not None

  async def watch(answering: asyncio.Task[Any]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
      pass
    service.scheduler.cancel(call)
    answering.cancel()

  watcher = asyncio.create_task(watch(waiting))
  try:
    yield
  except asyncio.CancelledError:
    if not watcher.done():
      raise
    waiting.uncancel()
    raise Refusal(499, "the client has closed the connection.") from None
  finally:
    watcher.cancel()
    service.scheduler.cancel(call)


async def _read(request: Request, use: Callable[[dict[str, Any]], Result]) -> Result:
  """Calls `use` with the JSON object in a request's body, up to the limit.

  It runs in a thread of its own: parsing and encoding take as long as the client
  chooses, and the event loop serves the streams of all others.
  """
  kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
  # Browsers send other types to any server without asking it first, so a web page
  # could otherwise make a server on this machine learn.
  if kind != "application/json":
    message = f"Content-Type: received {kind[:80]!r}, expected application/json."
    raise Refusal(415, message, code="unsupported_media_type")
  try:
    async with asyncio.timeout(BODY_SECONDS):
      parts = [part async for part in _body(request, BODY_LIMIT)]
  except TimeoutError:
    message = f"the body has not arrived within {BODY_SECONDS} seconds."
    raise Refusal(408, message, code="body_too_slow") from None
  return await asyncio.to_thread(lambda: use(protocol.read_object(b"".join(parts))))


async def _body(request: Request, limit: int) -> AsyncIterator[bytes]:
  """Yields the parts of a body, up to the limit in bytes."""
  length = 0
  async for part in request.stream():
    length += len(part)
    if length > limit:
      raise Refusal(
        413, f"the body is longer than {limit} bytes.", code="body_too_long"
      )
    yield part


def _sent(chunk: dict[str, Any]) -> bytes:
  # ASCII, because common clients also end lines at U+0085, U+2028 and U+2029.
  return b"data: " + json.dumps(chunk, ensure_ascii=True).encode() + b"\n\n"
