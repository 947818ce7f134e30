"""The published description of the API, `/openapi.json`: OpenAPI 3.1, written by hand.

Tests compare its parameters with those that `protocol` reads and its paths with the
routes, and send requests that are generated from it.
"""

import importlib.metadata
from typing import Any

from osd_serve.protocol import IGNORED, MAX_CHOICES, MAX_STOPS, NEUTRAL

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
JSON, EVENTS = "application/json", "text/event-stream"


def make(model: str, target_length: int, record_top_k: int, token: bool) -> Schema:
  """Returns the description of a server, whose largest `max_tokens` is `target_length`.

  `record_top_k` is the largest number of alternatives per token. `token`: whether
  requests need one.
  """
  common = _common(model, target_length)
  most = min(record_top_k, 20)
  found: Schema = {
    "openapi": "3.1.0",
    "info": {"title": "osd serve", "version": importlib.metadata.version("osd-jax")},
    "servers": [{"url": "/"}],
    "paths": {
      "/": {"get": _operation("The live page.", {"200": _body(TEXT, "text/html")})},
      "/live": _get("The numbers of the live page.", {"type": "object"}),
      "/health": {
        "get": _operation(
          "Whether requests are answered.", {"200": _empty("It answers.")}, ("503",)
        )
      },
      "/metrics": {
        "get": _operation("For Prometheus.", {"200": _body(TEXT, "text/plain")})
      },
      "/version": _get("The version.", _object({"version": TEXT})),
      "/openapi.json": _get("This description.", {"type": "object"}),
      "/v1/models": _get("The served model.", _models(model)),
      "/v1/completions": _completing(common | _completion(most), "text_completion"),
      "/v1/chat/completions": _completing(common | _chat(most), "chat.completion"),
      "/tokenize": _post("Token ids of a text or conversation.", *_tokenize(model)),
      "/detokenize": _post("The text of token ids.", *_detokenize(model)),
      "/admin/draft": _admin_draft(),
      "/admin/cache": {
        "delete": _operation(
          "Empties the n-gram cache.", {"204": _empty("It is empty.")}, _ADMIN
        )
      },
    },
    "components": {"schemas": {"Error": _error()}},
  }
  if token:
    bearer = {"type": "http", "scheme": "bearer"}
    found["components"]["securitySchemes"] = {"token": bearer}
    found["security"] = [{"token": []}]
  return found


# --- Parts ----------------------------------------------------------------------------

_ADMIN = ("400", "403", "413", "503")
_ERRORS = {
  "400": "The request is wrong; the message names the parameter.",
  "401": "The token is missing or wrong.",
  "403": "The server has no token, so it has no such route.",
  "404": "No such model.",
  "413": "The body is too long.",
  "415": "The body is not application/json.",
  "429": "The queue is full; try again later.",
  "500": "An error of the server.",
  "503": "The server is shutting down, or the engine has failed.",
}
_BODY_ERRORS = ("400", "404", "413", "415", "503")


def _object(properties: Schema, required: Any = None, closed: bool = False) -> Schema:
  """An object; all properties are required unless `required` lists them."""
  names = list(properties) if required is None else list(required)
  found: Schema = {"type": "object", "properties": properties, "required": names}
  return found | ({"additionalProperties": False} if closed else {})


def _list(item: Schema, **limits: int) -> Schema:
  return {"type": "array", "items": item, **limits}


def _or_null(schema: Schema) -> Schema:
  return {"anyOf": [schema, {"type": "null"}]}


def _numbers(kind: str, low: float, high: float) -> Schema:
  return {"type": kind, "minimum": low, "maximum": high}


def _body(schema: Schema, kind: str = JSON) -> Schema:
  return {"description": "The answer.", "content": {kind: {"schema": schema}}}


def _empty(text: str) -> Schema:
  return {"description": text}


def _operation(text: str, answers: Schema, errors: Any = ()) -> Schema:
  """An operation with its answers, and the errors that it may have."""
  refused = {"schema": {"$ref": "#/components/schemas/Error"}}
  listed = {
    status: {"description": _ERRORS[status], "content": {JSON: refused}}
    for status in sorted({*errors, "401", "500"})
  }
  return {"summary": text, "responses": {**answers, **listed}}


def _get(text: str, schema: Schema) -> Schema:
  return {"get": _operation(text, {"200": _body(schema)})}


def _post(text: str, asked: Schema, answered: Schema) -> Schema:
  operation = _operation(text, {"200": _body(answered)}, _BODY_ERRORS)
  return {"post": {**operation, "requestBody": _request(asked)}}


def _request(schema: Schema, kind: str = JSON) -> Schema:
  return {"required": True, "content": {kind: {"schema": schema}}}


def _error() -> Schema:
  text = {"message": TEXT, "type": TEXT}
  either = {"param": _or_null(TEXT), "code": _or_null(TEXT)}
  return _object({"error": _object(text | either)})


def _admin_draft() -> Schema:
  kind, file = "application/octet-stream", {"type": "string", "format": "binary"}
  version = _body(_object({"draft_version": COUNT}))
  put = _operation("Serves such a file at once.", {"200": version}, _ADMIN)
  return {
    "get": _operation("The newest draft.", {"200": _body(file, kind)}, _ADMIN),
    "put": {**put, "requestBody": _request(file, kind)},
  }


# --- Requests -------------------------------------------------------------------------


def _common(model: str, target_length: int) -> Schema:
  stop, flag = {"type": "string", "minLength": 1}, {"type": "boolean"}
  return {
    "model": {"enum": [model]},
    "max_tokens": _numbers("integer", 1, target_length),
    "temperature": _numbers("number", 0, 100),
    "top_p": _numbers("number", 1e-30, 1),
    "top_k": _numbers("integer", -1, 2**31 - 1),
    "min_p": _numbers("number", 0, 1),
    "repetition_penalty": _numbers("number", 1e-3, 1e3),
    "seed": _numbers("integer", -(2**63), 2**63 - 1),
    "stop": {"anyOf": [stop, _list(stop, maxItems=MAX_STOPS)]},
    "n": _numbers("integer", 1, MAX_CHOICES),
    "stream": flag,
    "stream_options": _object(
      {"include_usage": flag, "include_obfuscation": flag}, required=(), closed=True
    ),
    "learn": flag,
    "speculative": flag,
    "cache_salt": {"type": "string", "minLength": 1},
  }


def _completion(most: int) -> Schema:
  tokens = _list(_numbers("integer", 0, 2**31 - 1), minItems=1)
  text = {"type": "string", "minLength": 1}
  prompts = [_list(text, minItems=1), _list(tokens, minItems=1)]
  return {
    "prompt": {"anyOf": [text, tokens, *prompts]},
    "echo": {"type": "boolean"},
    "logprobs": _numbers("integer", 0, most),
  }


def _chat(most: int) -> Schema:
  return {
    "messages": _messages(),
    "max_completion_tokens": COUNT | {"minimum": 1},
    "logprobs": {"type": "boolean"},
    "top_logprobs": _numbers("integer", 0, most),
  }


def _messages() -> Schema:
  part = _object({"type": {"const": "text"}, "text": TEXT})
  content = {"anyOf": [TEXT | {"minLength": 1}, _list(part, minItems=1)]}
  roles = {"enum": ["user", "system", "developer", "assistant"]}
  return _list(_object({"role": roles, "content": content}), minItems=1)


def parameters(used: Schema) -> Schema:
  """Returns all parameters: used ones, labels, and those with a neutral value only."""
  neutral = {name: {"enum": list(values)} for name, values in NEUTRAL.items()}
  labels: Schema = {name: {} for name in sorted(IGNORED)}
  return {
    name: _or_null(schema) if schema else schema
    for name, schema in (used | neutral | labels).items()
  }


def _completing(used: Schema, kind: str) -> Schema:
  """The operation that answers prompts, whole or as server-sent events."""
  asked = "messages" if kind == "chat.completion" else "prompt"
  listed = parameters(used) | {asked: used[asked]}
  answers = {JSON: {"schema": _answer(kind)}, EVENTS: {"schema": {}}}
  said = "The answers; with `stream`, server-sent events whose data are chunks."
  found = {"200": {"description": said, "content": answers}}
  operation = _operation("Answers prompts.", found, (*_BODY_ERRORS, "429"))
  body = _request(_object(listed, required=(asked,), closed=True))
  return {"post": {**operation, "requestBody": body}}


# --- Answers --------------------------------------------------------------------------


def _answer(kind: str) -> Schema:
  content: Schema = {"text": TEXT}
  if kind == "chat.completion":
    message = {"role": {"const": "assistant"}, "content": TEXT}
    content = {"message": _object(message | {"refusal": {"type": "null"}})}
  ends = {"logprobs": _or_null({"type": "object"})}
  choice = {"index": COUNT, **content, **ends, "finish_reason": _ends()}
  counts = ("prompt_tokens", "completion_tokens", "total_tokens")
  return _object(
    {
      "id": TEXT,
      "object": {"const": kind},
      "created": COUNT,
      "model": TEXT,
      "choices": _list(_object(choice), minItems=1),
      "usage": _object(dict.fromkeys(counts, COUNT)),
      "metrics": _object({"speculative_decoding": _or_null(_speculation())}),
    }
  )


def _ends() -> Schema:
  return {"enum": ["stop", "length"]}


def _speculation() -> Schema:
  counts = ("num_spec_steps", "num_accepted_draft_tokens", "num_draft_tokens")
  return _object(
    {
      "mean_acceptance_length": _or_null(NUMBER),
      "draft_acceptance_rate": _or_null(NUMBER),
      "acceptance_histogram": _list(COUNT),
      **dict.fromkeys((*counts, "num_spec_tokens"), COUNT),
    }
  )


def _models(model: str) -> Schema:
  fixed = {"id": {"const": model}, "object": {"const": "model"}, "owned_by": TEXT}
  one = _object(fixed | {"created": COUNT, "max_model_len": COUNT})
  return _object({"object": {"const": "list"}, "data": _list(one)})


def _tokenize(model: str) -> tuple[Schema, Schema]:
  text = {"model": {"enum": [model]}, "prompt": TEXT, "messages": _messages()}
  asked = {"anyOf": [_object(text, ("prompt",)), _object(text, ("messages",))]}
  counts = {"count": COUNT, "max_model_len": COUNT}
  return asked, _object(counts | {"tokens": _list(COUNT)})


def _detokenize(model: str) -> tuple[Schema, Schema]:
  tokens = _list(_numbers("integer", 0, 2**31 - 1))
  asked = _object({"model": {"enum": [model]}, "tokens": tokens}, ("tokens",))
  return asked, _object({"prompt": TEXT})
