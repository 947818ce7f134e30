"""Chat templates: a prompt, or a whole conversation, in a model's own format.

Templates are programs that are published with weights. transformers runs them in
Jinja's sandbox.
"""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from osd_jax import base
from osd_jax.data import tokenizers
from osd_jax.data.preprocessors import UnusableExample

FILE, _FIELD = "chat_template.jinja", "chat_template"


class Conversation(str):
  """A prompt of several messages; as a text, one line per message."""

  messages: tuple[dict[str, str], ...]  # mappings with "role" and "content"

  def __new__(cls, messages: Sequence[Mapping[str, str]]) -> "Conversation":
    lines = (f"{message['role']}: {message['content']}" for message in messages)
    conversation = super().__new__(cls, "\n".join(lines))
    conversation.messages = tuple(map(dict, messages))
    return conversation


def split_messages(messages: Any) -> tuple[str, str]:
  """Returns the prompt and the reference of a list of chat messages.

  The reference is the content of the last message if the assistant wrote it, otherwise
  "". A single message of a user is a prompt like any other.

  Raises:
    UnusableExample: not a list of messages with text, or no user's message.
  """
  try:
    messages = [_message(**message) for message in messages]
  except TypeError as error:
    expected = '{"role": ROLE, "content": TEXT}'
    reason = f"the messages are not a list of {expected}"
    raise UnusableExample("malformed", reason) from error
  reference = ""
  if messages and messages[-1]["role"] == "assistant":
    *messages, last = messages
    reference = last["content"]
  if not any(one["role"] == "user" and one["content"].strip() for one in messages):
    raise UnusableExample("empty", "the messages hold no text of a user")
  if len(messages) == 1:
    return messages[0]["content"], reference
  return Conversation(messages), reference


def _message(
  role: str = "", content: Any = None, value: Any = None, **others: Any
) -> dict[str, str]:
  """Reads one message, also in ShareGPT's form {"from": "human", "value": TEXT}."""
  names = {"human": "user", "gpt": "assistant"}
  role = role or names.get(others.get("from", ""), "system")
  text = value if content is None else content
  if not isinstance(text, str) or not isinstance(role, str):
    raise TypeError
  return {"role": role, "content": text}


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

  def write(prompt: str) -> str:
    messages = [{"role": "user", "content": prompt}]
    if isinstance(prompt, Conversation):
      messages = list(prompt.messages)
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

  write("Hello")  # reports a faulty template before any weights are loaded
  return write
