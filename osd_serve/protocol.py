"""OpenAI's API: bodies of requests in, bodies of answers out. No HTTP and no JAX.

The parameters of a request are the fields of `Completion` and `Chat`. Checks, defaults
and the published description (see `schema`) derive from these models. Every parameter
is either used, refused by name, or has a value without effect. The shapes follow
OpenAI's reference; extensions (`top_k`, `min_p`, `repetition_penalty`, `cache_salt`)
have vLLM's names, `learn` and `speculative` are those of `engine.requests.Prompt`.
"""

import codecs
import dataclasses
import difflib
import functools
import json
import secrets
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
import pydantic
from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from osd_jax.data import chat
from osd_jax.data.vocabulary import Vocabulary
from osd_jax.engine.requests import (
  Finished,
  GrowingText,
  Prompt,
  SamplingConfig,
  is_incomplete,
)

MAX_CHOICES = 128  # answers to one request: prompts times n
MAX_STOPS = 16
STOP_LENGTH = 1000  # characters of a stop string, which is compared with every piece
MAX_TOP = 20  # alternatives per token
# Parameters that the engine does not have, with their values without effect.
NEUTRAL: dict[str, tuple[Any, ...]] = {
  **dict.fromkeys(("allowed_token_ids", "bad_words", "functions", "tools"), ([],)),
  **dict.fromkeys(("logprob_token_ids", "stop_token_ids"), ([],)),
  **dict.fromkeys(("best_of", "length_penalty"), (1,)),
  **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_tokens"), (0,)),
  **dict.fromkeys(("priority", "prompt_logprobs"), (0,)),
  **dict.fromkeys(("ignore_eos", "store", "use_beam_search"), (False,)),
  **dict.fromkeys(("continue_final_message", "return_token_ids"), (False,)),
  **dict.fromkeys(("include_stop_str_in_output",), (False,)),
  **dict.fromkeys(("add_generation_prompt", "skip_special_tokens"), (True,)),
  **dict.fromkeys(("spaces_between_special_tokens",), (True,)),
  "chat_template_kwargs": ({},),
  "function_call": ("none",),
  "logit_bias": ({},),
  "modalities": (["text"],),
  "parallel_tool_calls": (True, False),  # no tools exist
  "response_format": ({"type": "text"},),
  "service_tier": ("auto", "default"),
  "suffix": ("",),
  "tool_choice": ("none", "auto"),
}
IGNORED = {"user", "metadata", "safety_identifier", "prompt_cache_key"}  # only labels


class Refusal(Exception):
  """A request that is not answered.

  Attributes:
    status: HTTP status.
    message: one line: what is wrong, and what was expected.
    param: name of the parameter, if one is wrong.
    code: a word for programs, such as "queue_full".
  """

  def __init__(self, status: int, message: str, param: str | None = None, code=None):
    super().__init__(message)
    self.status, self.message, self.param, self.code = status, message, param, code

  def body(self) -> dict[str, Any]:
    """Returns OpenAI's error object."""
    kinds = {
      401: "authentication_error",
      404: "not_found_error",
      429: "rate_limit_error",
    }
    kind = "server_error" if self.status >= 500 else "invalid_request_error"
    kind = kinds.get(self.status, kind)
    error = {"message": self.message, "type": kind, "param": self.param}
    return {"error": {**error, "code": self.code}}


def wrong(where: str, param: str, message: str, code: str | None = None) -> Refusal:
  """The refusal of a parameter, or of a place in it, such as messages[0]."""
  return Refusal(400, f"{where}: {message}.", param, code)


def read_object(body: bytes) -> dict[str, Any]:
  """Parses the body of a request; Refusal if it is not a JSON object."""
  try:
    fields = json.loads(body)
    # Lone surrogates have no encoding, and tokenizers fail on them.
    json.dumps(fields, ensure_ascii=False).encode()
  except (ValueError, RecursionError) as error:
    reason = next(iter(str(error).splitlines()), "nested too deeply")
    raise Refusal(400, f"the body is not JSON: {reason}.") from None
  if not isinstance(fields, dict):
    raise Refusal(400, f"the body is {_shown(fields)}, expected an object.")
  return fields


# --- Parameters -----------------------------------------------------------------------


def _without_effect(values: Sequence[Any]) -> Any:
  """Returns the type of a parameter that has only values without effect."""

  def check(value: Any) -> Any:
    if value not in values:
      expected = " or ".join(json.dumps(one) for one in values)
      raise PydanticCustomError("without_effect", expected)  # pyright: ignore
    return value

  shape = pydantic.WithJsonSchema({"enum": [*values, None]})
  return Annotated[Any, AfterValidator(check), shape]


class Body(pydantic.BaseModel):
  """A JSON object in which null means that a parameter is not given."""

  model_config = pydantic.ConfigDict(strict=True, frozen=True, allow_inf_nan=False)
  model: str | None = None


_others: dict[str, Any] = {
  **{name: (_without_effect(values), None) for name, values in NEUTRAL.items()},
  **dict.fromkeys(sorted(IGNORED), (Any, None)),
}
_Others = pydantic.create_model("_Others", __base__=Body, **_others)

Text = Annotated[str, Field(pattern=r"\S")]
TokenIds = list[Annotated[int, Field(ge=0, lt=2**31)]]
Tokens = Annotated[TokenIds, Field(min_length=1)]
_Stop = Annotated[str, Field(min_length=1, max_length=STOP_LENGTH)]
_Stops = Annotated[list[_Stop], Field(max_length=MAX_STOPS)]


# As in a chat, where the same name takes true or false.
_FalseIsNone = BeforeValidator(lambda value: None if value is False else value)


class StreamOptions(pydantic.BaseModel):
  """How a stream ends; chunks are never padded and have no usage."""

  model_config = pydantic.ConfigDict(strict=True, extra="forbid")
  include_usage: bool = False
  include_obfuscation: bool = False
  continuous_usage_stats: Literal[False] = False


class Parameters(_Others):
  """The parameters that both kinds of requests have."""

  model_config = pydantic.ConfigDict(extra="forbid")
  max_tokens: int | None = Field(None, ge=1)
  temperature: float | None = Field(None, ge=0, le=100)
  top_p: float | None = Field(
    None, ge=1e-30, le=1, description="a number above 0, at most 1"
  )
  top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
  min_p: float | None = Field(None, ge=0, le=1)
  repetition_penalty: float | None = Field(None, ge=1e-3, le=1e3)
  seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
  stop: _Stop | _Stops = Field(
    [],
    description=f"a non-empty text of up to {STOP_LENGTH} characters, or a list of up"
    f" to {MAX_STOPS}",
  )
  n: int = Field(1, ge=1, le=MAX_CHOICES)
  stream: bool = False
  stream_options: StreamOptions | None = Field(None, description="an object")
  learn: bool = True
  speculative: bool = True
  cache_salt: str | None = Field(None, min_length=1)

  @property
  def include_usage(self) -> bool:
    """Whether a stream ends with a chunk that holds the usage."""
    return self.stream_options is not None and self.stream_options.include_usage

  def settings(self, defaults: SamplingConfig) -> Prompt:
    """Returns the settings as a prompt without text; `defaults` fill the gaps."""
    names = {field.name for field in dataclasses.fields(Prompt)}
    values = {name: getattr(self, name) for name in names & self.model_fields_set}
    # A request without a seed gets a random one, as in OpenAI's API.
    settings = {**vars(defaults), "seed": secrets.randbits(32), **values}
    settings["seed"] %= 2**32
    settings["top_k"] = max(settings["top_k"], 0)
    settings["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
    return Prompt(**{"text": "-", "max_new_tokens": self.longest, **settings})

  @property
  def longest_name(self) -> str:
    """The parameter that limits the tokens of an answer."""
    other = "max_completion_tokens"
    return "max_tokens" if getattr(self, other, None) is None else other

  @property
  def longest(self) -> int | None:
    """The largest number of tokens of an answer; None for the server's limit."""
    return getattr(self, self.longest_name)


class Completion(Parameters):
  """The parameters of /v1/completions."""

  is_chat: ClassVar[bool] = False
  prompt: Text | Tokens | Annotated[list[Text | Tokens], Field(min_length=1)] = Field(
    description="a text, token ids, or a list of either, none of them empty"
  )
  echo: bool = False
  logprobs: Annotated[int | None, _FalseIsNone] = Field(None, ge=0, le=MAX_TOP)

  @property
  def inputs(self) -> tuple[str | tuple[int, ...], ...]:
    """The prompts: texts or token ids."""
    is_single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
    prompts: Any = [self.prompt] if is_single else self.prompt
    return tuple(one if isinstance(one, str) else tuple(one) for one in prompts)

  @property
  def top(self) -> int | None:
    """The number of alternatives per token; None for no log-probabilities."""
    return self.logprobs


class Part(pydantic.BaseModel):
  """A part of a message."""

  type: Literal["text"]
  text: str


class Message(pydantic.BaseModel):
  """One turn of a conversation; other fields are not read."""

  role: Literal["system", "developer", "user", "assistant"]
  content: str | list[Part] = Field(
    description="a text, or a list of parts of type text"
  )
  name: str | None = Field(None, description="of the speaker, for the chat template")

  @property
  def text(self) -> str:
    """The whole content."""
    if isinstance(self.content, str):
      return self.content
    return "".join(part.text for part in self.content)


_Messages = Annotated[list[Message], Field(min_length=1)]


class Chat(Parameters):
  """The parameters of /v1/chat/completions."""

  is_chat: ClassVar[bool] = True
  echo: ClassVar[bool] = False
  messages: _Messages = Field(description="a list of messages")
  max_completion_tokens: int | None = Field(None, ge=1)
  logprobs: bool = False
  top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP)

  @property
  def inputs(self) -> tuple[str, ...]:
    """The conversation."""
    return (conversation(self.messages),)

  @property
  def top(self) -> int | None:
    """The number of alternatives per token; None for no log-probabilities."""
    return (self.top_logprobs or 0) if self.logprobs else None


class Tokenize(Body):
  """The parameters of /tokenize, which takes a prompt or messages."""

  model_config = pydantic.ConfigDict(
    json_schema_extra={
      "anyOf": [
        {"required": [name], "properties": {name: {"type": kind}}}
        for name, kind in (("prompt", "string"), ("messages", "array"))
      ]
    }
  )
  prompt: str | None = None
  messages: _Messages | None = Field(None, description="a list of messages")


class Detokenize(Body):
  """The parameters of /detokenize."""

  tokens: TokenIds = Field(description="a list of token ids")


Ask = Completion | Chat
AnyBody = TypeVar("AnyBody", bound=Body)


def read(kind: type[AnyBody], fields: Mapping[str, Any], model: str) -> AnyBody:
  """Checks the body of a request to the served `model`.

  Raises:
    Refusal: a parameter is wrong, missing, unknown or not supported.
  """
  values = {name: value for name, value in fields.items() if value is not None}
  try:
    body = kind.model_validate(values)
  except pydantic.ValidationError as error:
    raise _refusal(kind, values, error.errors(include_url=False)[0]) from None
  check_model(body.model or model, model)
  return body


def check_model(name: str, model: str) -> None:
  """Raises Refusal if a request names another model than the served one."""
  if name != model:
    message = f"model: received {_shown(name)}, expected {_shown(model)}."
    raise Refusal(404, message, "model", "model_not_found")


def _refusal(
  kind: type[Body], fields: Mapping[str, Any], error: Mapping[str, Any]
) -> Refusal:
  """Returns the refusal for an error of pydantic."""
  value: Any = fields
  where, depth = "", 0
  for part in error["loc"]:  # also names the types of a union, which are not places
    is_name = isinstance(value, Mapping) and (
      part in value or error["type"] == "missing"
    )
    if not is_name and not (isinstance(value, list) and isinstance(part, int)):
      break
    value, depth = value.get(part) if is_name else value[part], depth + 1
    where += f".{str(part)[:80]}" if is_name else f"[{part}]"
  where, name = where[1:], error["loc"][0]
  if error["type"] == "extra_forbidden":
    if depth > 1:
      return wrong(where, name, "no such option")
    close = difflib.get_close_matches(name, kind.model_fields, 1)
    hint = f"did you mean {close[0]}?" if close else "leave it out."
    if name == "tenant":
      hint = "cache_salt keeps the n-gram cache apart."
    message = f"{where}: no such parameter; {hint}"
    return Refusal(400, message, name[:80], "unknown_parameter")
  if error["type"] == "without_effect":
    message = f"not supported; leave it out, or give {error['msg']}"
    return wrong(where, name, message, "unsupported_parameter")
  expected = error["msg"].removeprefix("Input should be ")
  if depth == 1:
    expected = _expected(kind.model_json_schema()["properties"][name])
  elif where.endswith("content"):
    expected = str(Message.model_fields["content"].description)
  elif error["type"] == "model_type":
    expected = "an object"
  received = "missing" if error["type"] == "missing" else f"received {_shown(value)}"
  return wrong(where, name, f"{received}, expected {expected}")


def _expected(schema: Mapping[str, Any]) -> str:
  """Returns what a JSON schema allows, in words."""
  text, shape = schema.get("description"), schema.get("anyOf", [schema])[0]
  low, high = shape.get("minimum"), shape.get("maximum", "")
  limits = "" if low is None else f" in {low}..{high}" if high else f" >= {low}"
  words = {
    "boolean": "true or false",
    "integer": f"an integer{limits}",
    "number": f"a number{limits}",
    "string": "a non-empty text" if shape.get("minLength") else "a text",
  }
  return text or words[shape["type"]]


def read_ask(
  fields: Mapping[str, Any], is_chat: bool, model: str, record_top_k: int = 0
) -> Ask:
  """Checks a request for completions, or for chat completions if `is_chat`.

  Only `record_top_k` entries of the target's distributions are kept, so no more
  alternatives per token can be returned.

  Raises:
    Refusal: a parameter is wrong, missing, unknown or not supported.
  """
  # Tools that no answer may call have no effect.
  names = (("tool_choice", "tools"), ("function_call", "functions"))
  unused = {name for choice, name in names if fields.get(choice) == "none"}
  fields = {name: value for name, value in fields.items() if name not in unused}
  ask = read(Chat if is_chat else Completion, fields, model)

  def check(holds: Any, name: str, message: str) -> None:
    if not holds:
      raise wrong(name, name, message)

  count = len(ask.inputs)
  expected = f"expected at most {MAX_CHOICES} answers in one request"
  received = f"received n = {ask.n} for {count} prompts"
  check(ask.n * count <= MAX_CHOICES, "n", f"{received}, {expected}")
  name = "logprobs"
  if isinstance(ask, Chat):
    limits = {ask.max_tokens, ask.max_completion_tokens}
    is_one = len(limits) == 1 or None in limits
    check(is_one, "max_tokens", "give max_completion_tokens or max_tokens")
    name, is_used = "top_logprobs", not ask.top_logprobs or ask.logprobs
    check(is_used, name, "needs logprobs = true")
  is_used = not ask.include_usage or ask.stream
  check(is_used, "stream_options", "needs stream = true")
  expected = f"at most {record_top_k}, DecodingConfig.record_top_k of this server"
  is_kept = (ask.top or 0) <= record_top_k
  check(is_kept, name, f"received {ask.top}, expected {expected}")
  other = "stream" if ask.stream else "echo"
  is_alone = ask.top is None or not (ask.stream or ask.echo)
  check(is_alone, "logprobs", f"not supported together with {other}; leave one out")
  is_text = all(isinstance(one, str) for one in ask.inputs)
  check(not ask.echo or is_text, "echo", "expected a prompt of text, not of token ids")
  return ask


def conversation(messages: Sequence[Message]) -> str:
  """Returns a `chat.Conversation`, or the text of a single message of a user."""
  if messages[-1].role == "assistant":
    message = "the last message is the assistant's, expected the user's"
    raise wrong("messages", "messages", message)
  if len(messages) == 1 and messages[0].role == "user":
    if not messages[0].text.strip():
      raise wrong("messages", "messages", "received an empty text, expected a prompt")
    if not messages[0].name:
      return messages[0].text
  role = lambda one: one.role.replace("developer", "system")
  name = lambda one: {"name": one.name} if one.name else {}
  return chat.Conversation(
    [{"role": role(m), "content": m.text, **name(m)} for m in messages]
  )


def _shown(value: Any) -> str:
  text = json.dumps(value, ensure_ascii=True)
  return text if len(text) <= 80 else f"{text[:77]}..."


# --- Answers --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Choice:
  """One finished answer."""

  index: int  # its number in the request
  text: str
  finish_reason: str  # "stop" or "length"
  prompt_tokens: int  # tokens of its prompt
  done: Finished  # the engine's result
  logprobs: dict[str, Any] | None = None  # the object that the API returns, or None


class Reply:
  """Writes the JSON of one request's answers: whole, or chunk by chunk."""

  def __init__(self, ask: Ask, model: str):
    """Draws the id that all chunks share."""
    self._ask = ask
    prefix, kind = ("chatcmpl", "chat.completion") if ask.is_chat else ("cmpl", "")
    self._kind = kind or "text_completion"
    self.id = f"{prefix}-{uuid.uuid4().hex}"
    self._head = {"created": int(time.time()), "model": model}

  def whole(self, choices: Sequence[Choice], metrics: Any) -> dict[str, Any]:
    """Returns the body of an answer that is not streamed."""
    parts = []
    for choice in choices:
      content = {"text": choice.text}
      if self._ask.is_chat:
        message = {"role": "assistant", "content": choice.text}
        content = {"message": {**message, "refusal": None}}
      part = {"index": choice.index, **content, "logprobs": choice.logprobs}
      parts.append({**part, "finish_reason": choice.finish_reason})
    return {**self._frame(self._kind, parts), **self._end(choices, metrics)}

  def first_chunks(self) -> list[dict[str, Any]]:
    """Returns the chunks before any text: in a chat, the role of each answer."""
    if not self._ask.is_chat:
      return []
    role = {"role": "assistant", "content": ""}
    return [
      self._chunk(index, role) for index in range(len(self._ask.inputs) * self._ask.n)
    ]

  def piece(self, index: int, text: str) -> dict[str, Any]:
    """Returns the chunk of a piece of text."""
    return self._chunk(index, {"content": text} if self._ask.is_chat else text)

  def last_piece(self, choice: Choice) -> dict[str, Any]:
    """Returns the chunk that ends an answer."""
    return self._chunk(
      choice.index, {} if self._ask.is_chat else "", choice.finish_reason
    )

  def usage_chunk(self, choices: Sequence[Choice], metrics: Any) -> dict[str, Any]:
    """Returns the last chunk, which holds usage and metrics."""
    frame = self._frame(self._chunk_kind, [])
    return {**frame, **self._end(choices, metrics)}

  @property
  def _chunk_kind(self) -> str:
    return "chat.completion.chunk" if self._ask.is_chat else self._kind

  def _chunk(
    self, index: int, content: Any, finish_reason: str | None = None
  ) -> dict[str, Any]:
    content = {"delta" if self._ask.is_chat else "text": content}
    end = {"logprobs": None, "finish_reason": finish_reason}
    return self._frame(self._chunk_kind, [{"index": index, **content, **end}])

  def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": self.id, "object": kind, **self._head, "choices": choices}

  def _end(self, choices: Sequence[Choice], metrics: Any) -> dict[str, Any]:
    # The prompt of several answers was given once.
    prompts = sum(choice.prompt_tokens for choice in choices) // self._ask.n
    completion = sum(len(choice.done.tokens) for choice in choices)
    usage = {"prompt_tokens": prompts, "completion_tokens": completion}
    usage["total_tokens"] = prompts + completion
    return {"usage": usage, "metrics": metrics}


def speculation(done: Finished, num_draft_tokens: int) -> dict[str, Any]:
  """Returns `metrics.speculative_decoding` of an answer, in the form of vLLM.

  Steps are verifications; an answer that drafted nothing has none.
  """
  steps = done.target_calls if done.drafted else 0
  # Entry i of the engine's counts are the steps that accepted more than i tokens.
  at_least = [steps, *done.accepted_per_position[:num_draft_tokens], 0]
  histogram = [
    here - after for here, after in zip(at_least, at_least[1:], strict=False)
  ]
  return {
    "mean_acceptance_length": 1 + done.accepted / steps if steps else None,
    "draft_acceptance_rate": done.accepted / done.drafted if done.drafted else None,
    "acceptance_histogram": histogram,
    "num_spec_steps": steps,
    "num_accepted_draft_tokens": done.accepted,
    "num_draft_tokens": done.drafted,
    "num_spec_tokens": num_draft_tokens,
  }


def log_probs(
  ask: Ask, done: Finished, chosen: np.ndarray, vocabulary: Vocabulary
) -> dict[str, Any]:
  """Returns the log-probabilities of an answer's tokens, from its records.

  `chosen` [n] are those of the emitted tokens.
  """
  count = ask.top or 0
  decode = vocabulary.decode if ask.is_chat else vocabulary.decode_continuation
  tokens = _bytes(done.tokens.tolist(), decode, vocabulary)
  ids = np.asarray(done.batch.records.ids)[0, : len(tokens), :count].tolist()
  values = np.asarray(done.batch.records.log_probs)[0, : len(tokens), :count].tolist()
  token_bytes = functools.cache(vocabulary.token_bytes)  # alternatives repeat
  others = [list(map(token_bytes, row)) for row in ids]
  # The first word of an answer may lack the space before it.
  others[:1] = [
    [_bytes([token], decode, vocabulary)[0] for token in row] for row in ids[:1]
  ]
  ranked = [list(zip(*row, strict=True)) for row in zip(others, values, strict=True)]
  values = chosen[: len(tokens)].tolist()
  if not ask.is_chat:
    read = codecs.getincrementaldecoder("utf-8")("replace").decode
    ends = np.cumsum([len(read(token)) for token in tokens]).tolist()
    name = lambda token: _name(token, "bytes:")
    return {
      "tokens": list(map(name, tokens)),
      "token_logprobs": values,
      "top_logprobs": [{name(token): value for token, value in row} for row in ranked]
      if count
      else None,
      "text_offset": [0, *ends[:-1]],
    }
  content = [
    {**_entry(*one), "top_logprobs": [_entry(*other) for other in row]}
    for one, row in zip(zip(tokens, values, strict=True), ranked, strict=True)
  ]
  return {"content": content, "refusal": None}


def _bytes(
  tokens: Sequence[int], decode: Callable[[Any], str], vocabulary: Vocabulary
) -> list[bytes]:
  """Returns the bytes of every token; together they are those of the text."""
  growing, before, waiting = GrowingText(decode), "", []
  parts: list[bytes] = []
  for count, token in enumerate(tokens, 1):
    text = growing.read(tokens[:count])
    waiting.append(token)
    if is_incomplete(text):
      continue
    if len(waiting) == 1:  # a token's text depends on those before it
      parts.append(text[len(before) :].encode())
    else:
      parts += map(vocabulary.token_bytes, waiting)
    before, waiting = text, []
  return [*parts, *map(vocabulary.token_bytes, waiting)]


def _name(token: bytes, prefix: str = "") -> str:
  """Returns a token's text; parts of a character are written as OpenAI does."""
  try:
    return token.decode()
  except UnicodeDecodeError:
    return prefix + "".join(f"\\x{byte:02x}" for byte in token)


def _entry(token: bytes, value: float) -> dict[str, Any]:
  return {"token": _name(token), "logprob": value, "bytes": list(token)}
