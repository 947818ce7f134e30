"""The published description of the API, `/openapi.json`: OpenAPI 3.1.

Parameters are those of the models in `protocol`; the models here describe answers.
Tests compare its paths with the routes, and send requests that are generated from it.
"""

import importlib.metadata
from typing import Any, Literal

import pydantic
from pydantic import NonNegativeInt as Count
from pydantic.json_schema import models_json_schema

from osd_serve import protocol

Schema = dict[str, Any]
JSON, EVENTS, BYTES = (
  "application/json",
  "text/event-stream",
  "application/octet-stream",
)


# --- Answers --------------------------------------------------------------------------


def _model(name: str, fields: dict[str, Any]) -> Any:
  """Returns a model whose fields, by name and type, are all required."""
  required: Any = {key: (kind, ...) for key, kind in fields.items()}
  return pydantic.create_model(name, **required)


def _answer(kind: str, chunk: str, **content: Any) -> Any:
  """Returns the model of the answers to a request, whole or as server-sent events."""
  ends = {"logprobs": dict[str, Any] | None, "finish_reason": Literal["stop", "length"]}
  choice = _model(f"{kind}Choice", {"index": Count, **content, **ends})
  head = {"id": str, "object": Literal[chunk], "created": Count, "model": str}
  end = {"usage": Usage, "metrics": Metrics}
  return _model(f"{kind}Answer", {**head, "choices": list[choice], **end})


_COUNTS = ("num_spec_steps", "num_accepted_draft_tokens", "num_draft_tokens")
_RATES = ("mean_acceptance_length", "draft_acceptance_rate")
Speculation = _model(
  "Speculation",
  {
    **dict.fromkeys(_RATES, float | None),
    "acceptance_histogram": list[Count],
    **dict.fromkeys((*_COUNTS, "num_spec_tokens"), Count),
  },
)
Metrics = _model("Metrics", {"speculative_decoding": Speculation | None})
_TOKENS = ("prompt_tokens", "completion_tokens", "total_tokens")
Usage = _model("Usage", dict.fromkeys(_TOKENS, Count))
Reply = _model("Reply", {"role": Literal["assistant"], "content": str, "refusal": None})
CompletionAnswer = _answer("Completion", "text_completion", text=str)
ChatAnswer = _answer("Chat", "chat.completion", message=Reply)
_SIZES = dict.fromkeys(("created", "max_model_len"), Count)
Model = _model(
  "Model", {"id": str, "object": Literal["model"], "owned_by": str, **_SIZES}
)
Models = _model("Models", {"object": Literal["list"], "data": list[Model]})
Tokenized = _model(
  "Tokenized",
  {"tokens": list[Count], "count": Count, "max_model_len": Count},
)
Detokenized = _model("Detokenized", {"prompt": str})
DraftVersion = _model("DraftVersion", {"draft_version": Count})
Version = _model("Version", {"version": str})
_TEXTS = {"message": str, "type": str, "param": str | None, "code": str | None}
Error = _model("Error", {"error": _model("ErrorBody", _TEXTS)})


# --- Routes ---------------------------------------------------------------------------

_ERRORS = {
  "400": "The request is wrong; the message names the parameter.",
  "401": "The token is missing or wrong.",
  "403": "The server has no token, so it has no such route.",
  "408": "The body did not arrive in time.",
  "404": "No such model.",
  "413": "The body is too long.",
  "415": "The body is not application/json.",
  "429": "The queue is full; try again later.",
  "500": "An error of the server.",
  "503": "The server is shutting down, or the engine has failed.",
}
_ADMIN = ("400", "403", "413", "503")
_BODY = ("400", "404", "408", "413", "415", "503")
_FILE: Schema = {"type": "string", "format": "binary"}
# The summary, request body, answer body and errors of each route. A body is a model, or
# a schema with its media type; None is empty.
_ROUTES: dict[tuple[str, str], tuple[str, Any, Any, tuple[str, ...]]] = {
  ("/", "get"): ("The live page.", None, ({"type": "string"}, "text/html"), ()),
  ("/live", "get"): ("The page's numbers.", None, ({"type": "object"}, JSON), ()),
  ("/health", "get"): ("Whether requests are answered.", None, None, ("503",)),
  ("/metrics", "get"): (
    "For Prometheus.",
    None,
    ({"type": "string"}, "text/plain"),
    (),
  ),
  ("/version", "get"): ("The version.", None, Version, ()),
  ("/openapi.json", "get"): ("This text.", None, ({"type": "object"}, JSON), ()),
  ("/v1/models", "get"): ("The served model.", None, Models, ()),
  ("/v1/models/{model}", "get"): ("The served model.", None, Model, ("404",)),
  ("/v1/completions", "post"): (
    *("Answers prompts.", protocol.Completion, CompletionAnswer),
    (*_BODY, "429"),
  ),
  ("/v1/chat/completions", "post"): (
    *("Answers a conversation.", protocol.Chat, ChatAnswer),
    (*_BODY, "429"),
  ),
  ("/tokenize", "post"): ("Token ids.", protocol.Tokenize, Tokenized, _BODY),
  ("/detokenize", "post"): ("The text.", protocol.Detokenize, Detokenized, _BODY),
  ("/admin/draft", "get"): ("The newest draft.", None, (_FILE, BYTES), _ADMIN),
  ("/admin/draft", "put"): ("Serves it at once.", (_FILE, BYTES), DraftVersion, _ADMIN),
  ("/admin/cache", "delete"): ("Empties the n-gram cache.", None, None, _ADMIN),
}


def make(model: str, target_length: int, record_top_k: int, token: bool) -> Schema:
  """Returns the description of a server, whose largest `max_tokens` is `target_length`.

  `record_top_k` is the largest number of alternatives per token. `token`: whether
  requests need one.
  """
  bodies = [body for _, *both, _ in _ROUTES.values() for body in both]
  kinds: list[Any] = [body for body in (*bodies, Error) if isinstance(body, type)]
  _, schemas = models_json_schema(
    [(kind, "validation") for kind in kinds],
    ref_template="#/components/schemas/{model}",
  )
  top = {"maximum": min(record_top_k, protocol.MAX_TOP)}
  limits = {"model": {"const": model}, "max_tokens": {"maximum": target_length}}
  for name, limit in (
    *(("Completion", {**limits, "logprobs": top}), ("Detokenize", limits)),
    *(("Chat", {**limits, "top_logprobs": top}), ("Tokenize", limits)),
  ):
    properties = schemas["$defs"][name]["properties"]
    for parameter in limit.keys() & properties.keys():
      properties[parameter]["anyOf"][0] |= limit[parameter]
  paths: dict[str, Schema] = {}
  for (path, verb), route in _ROUTES.items():
    paths.setdefault(path, {})[verb] = _operation(verb, *route)
  named = {"name": "model", "in": "path", "required": True, "schema": {"const": model}}
  paths["/v1/models/{model}"]["get"]["parameters"] = [named]
  description: Schema = {
    "openapi": "3.1.0",
    "info": {"title": "osd serve", "version": importlib.metadata.version("osd-jax")},
    "servers": [{"url": "/"}],
    "paths": paths,
    "components": {"schemas": schemas["$defs"]},
  }
  if token:
    bearer = {"type": "http", "scheme": "bearer"}
    description["components"]["securitySchemes"] = {"token": bearer}
    description["security"] = [{"token": []}]
  return description


def _content(body: Any) -> Schema:
  """Returns the part `content` of a request or an answer."""
  if isinstance(body, tuple):
    schema, kind = body
    return {"content": {kind: {"schema": schema}}}
  if body is None:
    return {}
  reference = {"$ref": f"#/components/schemas/{body.__name__}"}
  events = {EVENTS: {"schema": {}}} if body in (CompletionAnswer, ChatAnswer) else {}
  return {"content": {JSON: {"schema": reference}, **events}}


def _operation(verb: str, text: str, request: Any, answer: Any, errors: Any) -> Schema:
  status = "200" if answer is not None or verb == "get" else "204"
  responses = {status: {"description": "The answer.", **_content(answer)}}
  for error in sorted({*errors, "401", "500"}):
    responses[error] = {"description": _ERRORS[error], **_content(Error)}
  body = {"requestBody": {"required": True, **_content(request)}} if request else {}
  return {"summary": text, "responses": responses, **body}
