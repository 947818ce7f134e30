"""Chat templates: a prompt, or a whole conversation, in a model's own format.

Templates are programs that are published with weights. transformers runs them in
Jinja's sandbox.
"""

import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from osd_jax import base
from osd_jax.data import tokenizers
from osd_jax.data.preprocessors import UnusableExample

FILE, _FIELD = "chat_template.jinja", "chat_template"
_PROBE = "Hello"
_EXPECTED = '{"role": ROLE, "content": TEXT}'
_CALLS = {"tool_calls", "function_call"}  # fields of a message that calls a tool

# What speakers are called in logs, in small letters, and their roles in templates.
_ROLES = {
  **{name: name for name in ("system", "user", "assistant", "tool")},
  "developer": "system",  # its new name at OpenAI
  "human": "user",
  **dict.fromkeys(
    ("model", "gpt", "chatgpt", "bot", "ai", "bing", "bard"), "assistant"
  ),
}


class Conversation(str):
  """A prompt of messages; as a text, one line per message, or the only one's text."""

  # Mappings with "role" and "content", and perhaps further fields for the template.
  messages: tuple[dict[str, Any], ...]

  def __new__(cls, messages: Sequence[Mapping[str, Any]]) -> "Conversation":
    lines = [f"{message['role']}: {message['content']}" for message in messages]
    if len(messages) == 1 and messages[0]["role"] == "user":
      lines = [messages[0]["content"]]
    conversation = super().__new__(cls, "\n".join(lines))
    conversation.messages = tuple(map(dict, messages))
    return conversation


def is_plain(prompt: str) -> bool:
  """Whether a prompt is a text, or a message of a user without a name."""
  if not isinstance(prompt, Conversation):
    return True
  first = prompt.messages[0]
  return len(prompt.messages) == 1 and first["role"] == "user" and "name" not in first


def split_messages(messages: Any) -> tuple[str, str]:
  """Returns the prompt and the reference of a list of chat messages.

  The reference is the content of the last message if the assistant wrote it, otherwise
  "". A single message of a user is a prompt like any other. All other fields of a
  message, such as the name of a speaker, are for the chat template.

  Raises:
    UnusableExample: not a list of messages with text, or no user's message.
  """
  if not isinstance(messages, list | tuple):
    kind = type(messages).__name__
    reason = f"the messages are not a list of {_EXPECTED}, but a {kind}"
    raise UnusableExample("malformed", reason)
  messages = [_message(number, one) for number, one in enumerate(messages)]
  reference = ""
  if messages and messages[-1]["role"] == "assistant":
    *messages, last = messages
    reference = last["content"]
    if last.keys() & _CALLS:
      reason = "the last message calls a tool; expected an answer in text"
      raise UnusableExample("malformed", reason)
  if not any(one["role"] == "user" and one["content"].strip() for one in messages):
    raise UnusableExample("empty", "the messages hold no text of a user")
  if len(messages) == 1 and messages[0].keys() == {"role", "content"}:
    return messages[0]["content"], reference
  return Conversation(messages), reference


def _message(number: int, message: Any) -> dict[str, Any]:
  """Reads one message, also in ShareGPT's form {"from": "human", "value": TEXT}."""
  where = f"messages[{number}]"
  if not isinstance(message, Mapping):
    reason = f"{where} is a {type(message).__name__}, expected {_EXPECTED}"
    raise UnusableExample("malformed", reason)
  # In tables, null stands for a field that a message does not have.
  fields = {name: value for name, value in message.items() if value is not None}
  speaker = fields.pop("from", None)
  speaker = fields.pop("role", speaker)
  text = fields.pop("value", None)
  text = fields.pop("content", text)
  role = _ROLES.get(str(speaker).lower())
  if role is None:
    known = ", ".join(_ROLES)
    reason = f"{where} is by {speaker!r}, expected one of {known}"
    raise UnusableExample("malformed", reason)
  if text is None and fields.keys() & _CALLS:
    text = ""
  content = text_of(text)
  if content is None:
    reason = f"{where} has no text; the messages are not a list of {_EXPECTED}"
    raise UnusableExample("malformed", reason)
  return {"role": role, "content": content, **fields}


def text_of(content: Any) -> str | None:
  """Returns the text of a content: a text, or a list of parts of text; or None."""
  if isinstance(content, str):
    return content
  if not isinstance(content, list | tuple) or not content:
    return None
  texts = [
    part.get("text")
    if isinstance(part, Mapping) and part.get("type") == "text"
    else None
    for part in content
  ]
  return None if None in texts else "".join(map(str, texts))


def own_template(folder: pathlib.Path, settings: Mapping[str, Any]) -> str | None:
  """Returns the chat template of a model folder, or None.

  The file `chat_template.jinja` takes precedence over `settings`, the content of
  `tokenizer_config.json`. If the settings hold several templates, the one named
  "default" is used.
  """
  if (folder / FILE).exists():
    return (folder / FILE).read_text("utf-8-sig")
  template = settings.get(_FIELD)
  if isinstance(template, list):
    template = {one.get("name"): one.get("template") for one in template}.get("default")
  return template


def writer(template: str, variables: Mapping[str, Any]) -> Callable[[str], str]:
  """Returns a function that applies a template to a prompt, as transformers does.

  `variables` are the names that it may refer to, such as `bos_token`.

  Raises:
    InputError: the template is invalid or fails on a prompt.
    MissingExtraError: transformers or jinja2 is not installed.
  """
  with base.extra("llama", "PairConfig.chat_template"):
    import jinja2

    transformers = tokenizers.transformers()

  def write(prompt: str, in_parts: bool = False) -> str:
    messages = [{"role": "user", "content": str(prompt)}]
    if isinstance(prompt, Conversation):
      messages = list(prompt.messages)
    if in_parts:
      part = lambda text: [{"type": "text", "text": text}]
      messages = [one | {"content": part(one["content"])} for one in messages]
    try:
      texts, _ = transformers.utils.chat_template_utils.render_jinja_template(
        [messages], chat_template=template, add_generation_prompt=True, **variables
      )
    except (jinja2.TemplateError, TypeError, ValueError) as error:
      raise base.InputError(
        f"PairConfig.chat_template: the template failed ({error}); expected a Jinja"
        " template for a list of messages, as transformers uses them."
      ) from error
    return texts[0]

  # This reports a faulty template before any weights are loaded. Some templates read
  # the content of a message as a list of parts.
  fault = None
  for in_parts in (False, True):
    try:
      if _PROBE in write(_PROBE, in_parts):
        return functools.partial(write, in_parts=in_parts)
    except base.InputError as error:
      fault = fault or error
  raise fault or base.InputError(
    "PairConfig.chat_template: the template does not write the text of a user's"
    " message; expected a Jinja template for a list of messages with 'role' and"
    " 'content'."
  )
