"""Chat templates: a prompt, or a whole conversation, in a model's own format.

Templates are programs that are published with weights. They run in Jinja's sandbox,
since they are code from a download, with the functions and settings that transformers
provides, so the result is the same text.
"""

import contextlib
import datetime
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from osd_jax import base
from osd_jax.data.preprocessors import UnusableExample

FILE, _FIELD = "chat_template.jinja", "chat_template"


class Conversation(str):
  """A prompt of several messages; as a text, one line per message."""

  messages: tuple[dict[str, str], ...]  # mappings with "role" and "content"

  def __new__(cls, messages: Sequence[Mapping[str, str]]) -> "Conversation":
    lines = (f"{message['role']}: {message['content']}" for message in messages)
    made = super().__new__(cls, "\n".join(lines))
    made.messages = tuple(map(dict, messages))
    return made


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
  stated = settings.get(_FIELD)
  if isinstance(stated, list):
    stated = {one.get("name"): one.get("template") for one in stated}.get("default")
  return stated


def writer(template: str, special_tokens: Mapping[str, str]) -> Callable[[str], str]:
  """Returns a function that applies a template to a prompt.

  `special_tokens` are the texts of the tokens that it may refer to, such as
  `bos_token`.

  Raises:
    InputError: the template is invalid or fails on a prompt.
    MissingExtraError: jinja2 is not installed.
  """
  with base.extra("llama", "PairConfig.chat_template"):
    from jinja2 import TemplateError, ext, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

  def refuse(message: str) -> None:
    raise TemplateError(message)

  def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)

  class Generation(ext.Extension):
    """The tag {% generation %}, which marks the assistant's text for training.

    It only renders its content.
    """

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser):
      line = next(parser.stream).lineno
      body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
      return nodes.Scope(body, lineno=line)

  environment = ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=["jinja2.ext.loopcontrols", Generation],
  )
  environment.filters["tojson"] = to_json
  environment.globals["raise_exception"] = refuse
  environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(
    form
  )

  @contextlib.contextmanager
  def reported() -> Iterator[None]:
    try:
      yield
    except (TemplateError, TypeError, ValueError) as error:
      raise base.InputError(
        f"PairConfig.chat_template: the template failed ({error}); expected a Jinja"
        " template for a list of messages, as transformers uses them."
      ) from error

  with reported():
    compiled = environment.from_string(template)

  def write(prompt: str) -> str:
    messages = [{"role": "user", "content": prompt}]
    if isinstance(prompt, Conversation):
      messages = list(prompt.messages)
    with reported():
      return compiled.render(
        messages=messages,
        # Templates test `tools is not none`, which an undefined name would pass.
        tools=None,
        documents=None,
        add_generation_prompt=True,
        **special_tokens,
      )

  write("Hello")  # reports a faulty template before any weights are loaded
  return write
