"""Chat templates: a prompt as the only message of a user, in a model's own form.

Templates are programs that come with weights. They run in Jinja's sandbox, with the
functions and settings that transformers gives them, so that the same text comes out.
"""

import datetime
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from osd_jax import base

FILE, _FIELD = "chat_template.jinja", "chat_template"


def own_template(folder: pathlib.Path, settings: Mapping[str, Any]) -> str | None:
  """The template of a model folder.

  Args:
    folder: may hold a `chat_template.jinja`.
    settings: its `tokenizer_config.json`; of several templates "default" is taken.
  """
  if (folder / FILE).exists():
    return (folder / FILE).read_text()
  stated = settings.get(_FIELD)
  if isinstance(stated, list):
    stated = {one.get("name"): one.get("template") for one in stated}.get("default")
  return stated


def writer(template: str, special_tokens: Mapping[str, str]) -> Callable[[str], str]:
  """A function that puts a prompt into a template, ready to be answered.

  Args:
    template: Jinja, as models come with.
    special_tokens: what it may write by name, as `bos_token`.

  Raises:
    InputError: it is no template, or does not work on a prompt.
    MissingExtraError: jinja2 is not installed.
  """
  try:
    from jinja2 import TemplateError, ext, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment
  except ImportError as error:
    raise base.MissingExtraError(
      "PairConfig.chat_template needs jinja2; install the extra (pip install"
      " 'osd-jax[llama]')."
    ) from error

  def refuse(message: str) -> None:
    raise TemplateError(message)

  def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)

  class Generation(ext.Extension):
    """{% generation %}: marks, for training, what the assistant said; writes it."""

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

  def render(messages: Sequence[Mapping[str, str]]) -> str:
    try:
      return environment.from_string(template).render(
        messages=messages,
        tools=None,
        documents=None,
        add_generation_prompt=True,
        **special_tokens,
      )
    except (TemplateError, TypeError, ValueError) as error:
      raise base.InputError(
        f"PairConfig.chat_template: the template failed ({error}); expected one that"
        " writes a list of messages, as transformers uses them."
      ) from error

  def write(prompt: str) -> str:
    return render([{"role": "user", "content": prompt}])

  write("Hello")  # what is wrong with it is said before anything is loaded
  return write
