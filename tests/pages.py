"""Runs the code blocks of a page of docs/ in order, in the current folder.

  python tests/pages.py docs/start/first_steps.md

- ```python: executed; all blocks of a page share one namespace. A comment
  `# raises NAME` says that the block must raise an error of that name.
- ```sh: run by bash, which stops at the first command that fails. A comment
  `# exit code N` says that the block must end with that code.
- a block with title="PATH": written to that file, for the blocks after it.
- ```gin without a title: each setting must be a field of a config.
- ```console below `<!-- compared -->`: a "$ COMMAND" and exactly what it prints.
- other blocks (```text, ```console, ```mermaid) are only shown.

`<!-- not run: REASON -->` on the line above a block prevents it from being run.
"""

import dataclasses
import importlib
import os
import pathlib
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

BLOCK = re.compile(
  r"(?:^[ ]*<!-- (?P<note>[^\n]*?) -->\n)?"
  r"^(?P<indent>[ ]*)```(?P<language>\w+)?(?P<rest>[^\n`]*)\n"
  r"(?P<text>.*?)^(?P=indent)```[ ]*$",
  flags=re.MULTILINE | re.DOTALL,
)
SHOWN = ("text", "console", "mermaid")
RUN = ("python", "sh", "gin")


@dataclasses.dataclass(frozen=True)
class Block:
  """A block of code.

  Attributes:
    language: the word after the fence, or "".
    text: the content without indentation.
    line: line number of the opening fence.
    title: path of the file to write, or "".
    not_run: the reason why it is not run, or "".
    compared: whether it is a command followed by its output.
  """

  language: str
  text: str
  line: int
  title: str = ""
  not_run: str = ""
  compared: bool = False

  @property
  def failure(self) -> str:
    """The error that it must raise, or its exit code; "" if it must succeed."""
    promise = re.search(r"# (?:raises|exit code) (\w+)$", self.text, re.MULTILINE)
    return promise[1] if promise else ""


def blocks(text: str) -> Iterator[Block]:
  """Yields the blocks of a page in order."""
  for match in BLOCK.finditer(text):
    note = match["note"] or ""
    title = re.search(r'title="([^"]+)"', match["rest"])
    yield Block(
      language=match["language"] or "",
      text=textwrap.dedent(match["text"]),
      line=text[: match.start("indent")].count("\n") + 1,
      title=title[1] if title else "",
      not_run=note.removeprefix("not run: ") if note.startswith("not run: ") else "",
      compared=note == "compared",
    )


def run(page: pathlib.Path) -> None:
  """Runs the blocks of a page.

  Raises:
    Exception: the error of a block, with the page and line as a note.
  """
  names: dict[str, Any] = {"__name__": "__main__"}
  for block in blocks(page.read_text()):
    try:
      _run_one(block, names, f"{page.name}, line {block.line}")
    except BaseException as error:
      error.add_note(f"{page}, line {block.line}:\n{block.text}")
      raise


def _run_one(block: Block, names: dict[str, Any], place: str) -> None:
  if block.not_run:
    return
  if block.title:
    path = pathlib.Path(block.title)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(block.text)
  elif block.compared:
    command, _, expected = block.text.removeprefix("$ ").partition("\n")
    printed = shell(command, capture_output=True).stdout
    if printed.strip() != expected.strip():
      raise ValueError(f"{command} prints:\n{printed}")
  elif block.language == "python":
    _run_python(block, names, place)
  elif block.language == "sh":
    code = shell(block.text, check=not block.failure).returncode
    if block.failure and code != int(block.failure):
      raise ValueError(f"exit code {code}, expected {block.failure}")
  elif block.language == "gin":
    check_settings(block.text)
  elif block.language not in SHOWN:
    raise ValueError(f"blocks of {block.language!r} are neither run nor shown")


def _run_python(block: Block, names: dict[str, Any], place: str) -> None:
  """Executes a block, which must raise the error that it promises."""
  code = compile("\n" * block.line + block.text, place, "exec")
  try:
    exec(code, names)
  except Exception as error:
    if type(error).__name__ != block.failure:
      raise
    print(error)
    return
  if block.failure:
    raise ValueError(f"raises nothing, expected {block.failure}")


def shell(text: str, check: bool = True, **options: Any) -> subprocess.CompletedProcess:
  """Runs shell lines with the `osd` and `python` of this environment."""
  programs = pathlib.Path(sys.executable).parent
  environment = {
    **os.environ,
    "PATH": f"{programs}:{os.environ['PATH']}",
    "COLUMNS": "80",
  }
  command = ["bash", "-euo", "pipefail", "-c", text]
  return subprocess.run(command, check=check, text=True, env=environment, **options)


def check_settings(text: str) -> None:
  """Raises an error unless every binding of a gin text is a field of a config."""
  from gin import config_parser

  class Delegate(config_parser.ParserDelegate):
    """Ignores references and macros, because only field names are checked."""

    def configurable_reference(self, scoped_name, evaluate):
      return None

    def macro(self, scoped_name):
      return None

  fields = {(x.__name__, f.name) for x in configs() for f in dataclasses.fields(x)}
  for statement in config_parser.ConfigParser(text, Delegate()):
    if isinstance(statement, config_parser.BindingStatement) and statement.arg_name:
      name = (statement.selector.split(".")[-1], statement.arg_name)
      if name not in fields:
        raise ValueError(f"{'.'.join(name)} is not a field of a config")


def configs() -> list[type]:
  """Returns all config classes that commands read."""
  from osd_jax.main import commands, settings

  classes = {}
  for command in commands.COMMANDS.values():
    root = getattr(importlib.import_module(command.module), command.config)
    classes |= settings.configs(root)
  return list(classes.values())


if __name__ == "__main__":
  sys.path.insert(0, "")  # a block may import a module that the page wrote
  run(pathlib.Path(sys.argv[1]))
