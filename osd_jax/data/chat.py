"""Chat templates: a prompt as a user's only message, in a model's own format.

Templates are programs that are published with weights. They run in Jinja's sandbox,
since they are code from a download, with the functions and settings that transformers
provides, so the result is the same text.
"""

import datetime
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from osd_jax import base

FILE, _FIELD = "chat_template.jinja", "chat_template"


def own_template(folder: pathlib.Path, settings: Mapping[str, Any]) -> str | None:
  """Returns the chat template of a model folder, or None.

  The file `chat_template.jinja` takes precedence over `settings`, the content of
  `tokenizer_config.json`. If the settings hold several templates, the one named
  "default" is used.
  """
  if (folder / FILE).exists():
    return (folder / FILE).read_text()
  stated = settings.get(_FIELD)
  if isinstance(stated, list):
    stated = {one.get("name"): one.get("template") for one in stated}.get("default")
  return stated


def writer(template: str, special_tokens: Mapping[str, str]) -> Callable[[str], str]:
  """Returns a function that applies a template to a prompt.

  Args:
    template: Jinja, in the form that transformers uses.
    special_tokens: texts of the tokens that it may refer to, such as `bos_token`.

  Raises:
    InputError: the template is invalid or fails on a prompt.
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

  def render(messages: Sequence[Mapping[str, str]]) -> str:
    try:
      return environment.from_string(template).render(
        # Templates test `tools is not none`, which an undefined name would pass.
        messages=messages,
        tools=None,
        documents=None,
        add_generation_prompt=True,
        **special_tokens,
      )
    except (TemplateError, TypeError, ValueError) as error:
      raise base.InputError(
        f"PairConfig.chat_template: the template failed ({error}); expected a Jinja"
        " template for a list of messages, as transformers uses them."
      ) from error

  def write(prompt: str) -> str:
    return render([{"role": "user", "content": prompt}])

  write("Hello")  # reports a faulty template before any weights are loaded
  return write
