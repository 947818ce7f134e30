"""OpenAI's API: bodies of requests in, bodies of answers out. No HTTP and no JAX.

Every parameter of a request is either used, refused by name, or has a value without
effect. The shapes follow OpenAI's reference; extensions (`top_k`, `min_p`,
`repetition_penalty`, `cache_salt`) have vLLM's names, `learn` and `speculative` are
those of `engine.requests.Prompt`.
"""

import dataclasses
import difflib
import json
import math
import re
import secrets
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from osd_jax.data import chat
from osd_jax.engine.requests import Finished, Prompt, SamplingConfig

MAX_CHOICES = 128  # answers to one request: prompts times n
MAX_STOPS = 16
# Parameters that the engine does not have, with their values without effect.
NEUTRAL: dict[str, tuple[Any, ...]] = {
  "allowed_token_ids": ([],),
  "bad_words": ([],),
  "best_of": (1,),
  "frequency_penalty": (0,),
  "function_call": ("none",),
  "functions": ([],),
  "ignore_eos": (False,),
  "length_penalty": (1,),
  "logit_bias": ({},),
  "logprob_token_ids": ([],),
  "min_tokens": (0,),
  "modalities": (["text"],),
  "parallel_tool_calls": (True, False),  # there are no tools to call
  "presence_penalty": (0,),
  "prompt_logprobs": (0,),
  "response_format": ({"type": "text"},),
  "service_tier": ("auto", "default"),
  "store": (False,),
  "suffix": ("",),
  "tool_choice": ("none", "auto"),
  "tools": ([],),
  "use_beam_search": (False,),
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


def _wrong(where: str, said: str, code: str | None = None) -> Refusal:
  """The refusal of a parameter, or of a place in it, such as messages[0]."""
  return Refusal(400, f"{where}: {said}.", re.split(r"[.\[]", where)[0], code)


@dataclasses.dataclass(frozen=True)
class Ask:
  """A checked request."""

  is_chat: bool  # whether it came as messages
  # A text, a conversation or token ids for each prompt.
  inputs: tuple[str | tuple[int, ...], ...]
  prompt: Prompt  # settings of all prompts; its text is not used
  n: int = 1  # answers per prompt; answer i of all draws with seed + i
  stream: bool = False  # send pieces of text as they are accepted
  include_usage: bool = False  # a stream ends with a chunk that holds the usage
  echo: bool = False  # answers begin with their prompt
  # Number of alternatives per token; None for no log-probabilities.
  top_logprobs: int | None = None
  # Its answers use only entries of the n-gram cache with the same text.
  cache_salt: str = ""


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
    raise Refusal(400, f"the body is a {_kind(fields)}, expected an object.")
  return fields


def read_ask(
  fields: Mapping[str, Any],
  is_chat: bool,
  model: str,
  defaults: SamplingConfig,
  record_top_k: int = 0,
) -> Ask:
  """Checks a request for completions, or for chat completions if `is_chat`.

  `defaults` is the sampling of requests that state none. Only `record_top_k` entries of
  the target's distributions are kept, so no more alternatives per token can be
  returned.

  Raises:
    Refusal: a parameter is wrong, missing, unknown or not supported.
  """
  given = _supported(fields, _CHAT if is_chat else _COMPLETION)
  check_model(given, model)
  if is_chat and "messages" not in given:
    raise _wrong("messages", "missing; expected a list of messages")
  inputs = (read_messages(given["messages"]),) if is_chat else _prompts(given)
  n = given.get("n", 1)
  if n * len(inputs) > MAX_CHOICES:
    asked = f"n = {n} for {len(inputs)} prompts"
    expected = f"at most {MAX_CHOICES} answers in one request"
    raise _wrong("n", f"received {asked}, expected {expected}")
  ask = Ask(
    is_chat=is_chat,
    inputs=inputs,
    prompt=_settings(given, defaults),
    n=n,
    stream=given.get("stream", False),
    include_usage=_include_usage(given),
    echo=given.get("echo", False),
    top_logprobs=_top_logprobs(given, is_chat, record_top_k),
    cache_salt=given.get("cache_salt", ""),
  )
  if ask.top_logprobs is not None and (ask.stream or ask.echo):
    other = "stream" if ask.stream else "echo"
    raise _wrong("logprobs", f"not supported together with {other}; leave one out")
  if ask.echo and not all(isinstance(one, str) for one in inputs):
    raise _wrong("echo", "expected a prompt of text, not of token ids")
  return ask


def check_model(given: Mapping[str, Any], model: str) -> None:
  """Raises Refusal if a request names another model than the served one."""
  asked = given.get("model", model)
  if asked != model:
    raise Refusal(
      404, f"model: received {asked!r}, expected {model!r}.", "model", "model_not_found"
    )


# --- Parameters -----------------------------------------------------------------------


def _is_in(value: Any, kinds: Any, low: float, high: float) -> bool:
  return (
    isinstance(value, kinds) and not isinstance(value, bool) and low <= value <= high
  )


def _number(low: float, high: float, text: str) -> tuple[Callable[[Any], bool], str]:
  return lambda x: _is_in(x, int | float, low, high), text


def _integer(low: float, high: float, text: str) -> tuple[Callable[[Any], bool], str]:
  return lambda x: _is_in(x, int, low, high), text


def _is_stop(value: Any) -> bool:
  texts = [value] if isinstance(value, str) else value
  return (
    isinstance(texts, list)
    and len(texts) <= MAX_STOPS
    and all(isinstance(text, str) and text for text in texts)
  )


_FLAG = (lambda x: isinstance(x, bool), "true or false")
_COUNT = _integer(1, math.inf, "an integer >= 1")
# Parameters that are used: a check and what it expects.
_COMMON: dict[str, tuple[Callable[[Any], bool], str]] = {
  "model": (lambda x: isinstance(x, str), "a text"),
  "max_tokens": _COUNT,
  "temperature": _number(0, 100, "a number in 0..100"),
  "top_p": _number(1e-30, 1, "a number above 0, at most 1"),
  "top_k": _integer(-1, 2**31 - 1, "an integer >= 0, or -1 for all tokens"),
  "min_p": _number(0, 1, "a number in 0..1"),
  "repetition_penalty": _number(1e-3, 1e3, "a number in 0.001..1000"),
  "seed": _integer(-(2**63), 2**63 - 1, "an integer of 64 bits"),
  "stop": (_is_stop, f"a non-empty text, or a list of up to {MAX_STOPS}"),
  "n": _integer(1, MAX_CHOICES, f"an integer in 1..{MAX_CHOICES}"),
  "stream": _FLAG,
  "stream_options": (lambda x: isinstance(x, dict), "an object"),
  "learn": _FLAG,
  "speculative": _FLAG,
  "cache_salt": (lambda x: isinstance(x, str) and bool(x), "a non-empty text"),
}
_COMPLETION = _COMMON | {
  "prompt": (lambda x: isinstance(x, str | list), "a text, token ids, or a list"),
  "echo": _FLAG,
  "logprobs": _integer(0, 20, "an integer in 0..20"),
}
_CHAT = _COMMON | {
  "messages": (lambda x: isinstance(x, list) and x, "a list of messages"),
  "max_completion_tokens": _COUNT,
  "logprobs": _FLAG,
  "top_logprobs": _integer(0, 20, "an integer in 0..20"),
}


def _supported(fields: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the parameters that are used; null means that one is not given."""
  given = {}
  for name, value in fields.items():
    if value is None or name in IGNORED:
      continue
    if name in known:
      holds, expected = known[name]
      if not holds(value):
        raise _wrong(name, f"received {_shown(value)}, expected {expected}")
      given[name] = value
    elif name in NEUTRAL:
      if value not in NEUTRAL[name]:
        expected = " or ".join(json.dumps(one) for one in NEUTRAL[name])
        said = f"not supported; leave it out, or give {expected}"
        raise _wrong(name, said, "unsupported_parameter")
    else:
      if name == "tenant":
        said = "tenant: no such parameter; cache_salt keeps the n-gram cache apart"
        raise Refusal(400, f"{said}.", name, "unknown_parameter")
      close = difflib.get_close_matches(name, known, 1)
      hint = f"; did you mean {close[0]}?" if close else "; leave it out."
      said = f"{name[:80]}: no such parameter{hint}"
      raise Refusal(400, said, name[:80], "unknown_parameter")
  return given


def _settings(given: Mapping[str, Any], defaults: SamplingConfig) -> Prompt:
  """Returns the settings of a request as a prompt without its text."""
  if "max_tokens" in given and "max_completion_tokens" in given:
    raise _wrong("max_tokens", "give max_completion_tokens or max_tokens")
  names = ("temperature", "top_p", "min_p", "repetition_penalty")
  settings: dict[str, Any] = {
    name: float(given.get(name, getattr(defaults, name))) for name in names
  }
  stop = given.get("stop", ())
  # Without a seed, every request draws anew, as OpenAI's API promises.
  seed = given.get("seed", secrets.randbits(32))
  return Prompt(
    "-",
    **settings,
    top_k=max(given.get("top_k", defaults.top_k), 0),
    seed=seed % 2**32,
    max_new_tokens=given.get("max_completion_tokens", given.get("max_tokens")),
    stop=(stop,) if isinstance(stop, str) else tuple(stop),
    learn=given.get("learn", True),
    speculative=given.get("speculative", True),
  )


def _include_usage(given: Mapping[str, Any]) -> bool:
  options = given.get("stream_options", {})
  if options and not given.get("stream", False):
    raise _wrong("stream_options", "needs stream = true")
  for name, value in options.items():
    where = f"stream_options.{name[:80]}"
    if name not in ("include_usage", "include_obfuscation"):
      raise _wrong(where, "no such option")
    if not isinstance(value, bool):
      raise _wrong(where, f"received {_shown(value)}, expected true or false")
  return options.get("include_usage", False)


def _top_logprobs(
  given: Mapping[str, Any], is_chat: bool, record_top_k: int
) -> int | None:
  """Returns the number of alternatives per token, None for no log-probabilities."""
  name = "top_logprobs" if is_chat else "logprobs"
  asked = given.get(name, 0 if is_chat and given.get("logprobs") else None)
  if is_chat and asked is not None and not given.get("logprobs"):
    raise _wrong(name, "needs logprobs = true")
  if asked and asked > record_top_k:
    expected = f"at most {record_top_k}, DecodingConfig.record_top_k of this server"
    raise _wrong(name, f"received {asked}, expected {expected}")
  return asked


def _prompts(given: Mapping[str, Any]) -> tuple[str | tuple[int, ...], ...]:
  """Reads `prompt`: a text, token ids, or a list of either."""
  prompt = given.get("prompt")
  if prompt is None:
    raise _wrong("prompt", "missing; expected a text or token ids")
  is_single = isinstance(prompt, str) or (prompt and _is_tokens(prompt))
  found = []
  for one in [prompt] if is_single else prompt:
    if isinstance(one, str):
      found.append(_text(one, "prompt"))
    elif _is_tokens(one) and one:
      found.append(tuple(one))
    else:
      said = f"received {_shown(one)} in a list, expected texts or lists of token ids"
      raise _wrong("prompt", said)
  if not found:
    raise _wrong("prompt", "received an empty list, expected a prompt")
  return tuple(found)


def _is_tokens(value: Any) -> bool:
  return isinstance(value, list) and all(_is_in(x, int, 0, 2**31 - 1) for x in value)


def read_messages(messages: Sequence[Any]) -> str:
  """Returns a `chat.Conversation`, or the text of a single message of a user.

  Anything but messages of text is refused.
  """
  read = [_message(index, message) for index, message in enumerate(messages)]
  if read[-1]["role"] == "assistant":
    raise _wrong("messages", "the last message is the assistant's, expected the user's")
  if len(read) == 1 and read[0]["role"] == "user":
    return _text(read[0]["content"], "messages")
  return chat.Conversation(read)


def read_tokens(fields: Mapping[str, Any]) -> list[int]:
  """Reads `tokens` of a request to detokenize; Refusal if they are not token ids."""
  tokens = fields.get("tokens")
  if tokens is None or not _is_tokens(tokens):
    raise _wrong("tokens", "expected a list of token ids")
  return tokens


def _message(index: int, message: Any) -> dict[str, str]:
  where = f"messages[{index}]"
  if not isinstance(message, dict):
    expected = "an object with role and content"
    raise _wrong(where, f"received {_shown(message)}, expected {expected}")
  role, content = message.get("role"), message.get("content")
  role = "system" if role == "developer" else role
  if role not in ("system", "user", "assistant"):
    expected = "system, developer, user or assistant"
    raise _wrong(f"{where}.role", f"received {_shown(role)}, expected {expected}")
  if isinstance(content, list):
    parts = [part if isinstance(part, dict) else {} for part in content]
    texts = [part.get("text") for part in parts if part.get("type") == "text"]
    if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
      content = "".join(map(str, texts))
  if not isinstance(content, str):
    said = "expected a text, or a list of parts of type text"
    raise _wrong(f"{where}.content", said)
  return {"role": role, "content": content}


def _text(text: str, name: str) -> str:
  if not text.strip():
    raise _wrong(name, "received an empty text, expected a prompt")
  return text


def _kind(value: Any) -> str:
  kinds = {list: "list", str: "text", bool: "boolean", type(None): "null"}
  return kinds.get(type(value), "number")


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
    listed = []
    for choice in choices:
      content = {"text": choice.text}
      if self._ask.is_chat:
        message = {"role": "assistant", "content": choice.text}
        content = {"message": {**message, "refusal": None}}
      part = {"index": choice.index, **content, "logprobs": choice.logprobs}
      listed.append({**part, "finish_reason": choice.finish_reason})
    return {**self._frame(self._kind, listed), **self._end(choices, metrics)}

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
  ask: Ask, done: Finished, chosen: np.ndarray, decode: Callable[[Any], str]
) -> dict[str, Any]:
  """Returns the log-probabilities of an answer's tokens, from its records.

  `chosen` [n] are those of the emitted tokens; `decode` returns the text of token ids.
  """
  count = ask.top_logprobs or 0
  ids = np.asarray(done.batch.records.ids)[0, :, :count]
  values = np.asarray(done.batch.records.log_probs)[0, :, :count]
  # The text of a token depends on those before it, so it is read off the whole.
  texts = [decode(done.tokens[:end]) for end in range(len(done.tokens) + 1)]
  pieces = [
    after[len(before) :] for before, after in zip(texts, texts[1:], strict=False)
  ]
  ranked = [
    [(decode([token]), float(value)) for token, value in zip(*row, strict=True)]
    for row in zip(ids[: len(pieces)], values[: len(pieces)], strict=True)
  ]
  found = chosen[: len(pieces)].tolist()
  if not ask.is_chat:
    return {
      "tokens": pieces,
      "token_logprobs": found,
      "top_logprobs": [dict(row) for row in ranked] if count else None,
      "text_offset": [len(text) for text in texts[:-1]],
    }
  content = [
    {**_entry(*one), "top_logprobs": [_entry(*other) for other in row]}
    for one, row in zip(zip(pieces, found, strict=True), ranked, strict=True)
  ]
  return {"content": content, "refusal": None}


def _entry(text: str, value: float) -> dict[str, Any]:
  return {
    "token": text,
    "logprob": value,
    "bytes": list(text.encode("utf-8", "replace")),
  }
