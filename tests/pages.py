"""Runs the code blocks of a page of docs/, in their order, in the current folder.

  python tests/pages.py docs/start/first_steps.md

- ```python: executed; the blocks of a page share their names.
- ```sh: run by bash, which ends at the first command that fails.
- any block with title="PATH": written to that file, for the blocks below it.
- ```gin without a title: each setting must be a field of a config.
- ```console below `<!-- compared -->`: after "$ COMMAND", just what it prints.
- all else (```text, ```console) is shown only.

`<!-- not run: REASON -->` in the line above keeps a block from being run.
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
SHOWN = ("text", "console")
RUN = ("python", "sh", "gin")


@dataclasses.dataclass(frozen=True)
class Block:
  """A block of code.

  Attributes:
    language: the word after the fence, "" if there is none.
    text: without its indentation.
    line: of the fence.
    title: path of the file that it is, "" if it is none.
    not_run: the reason, "" where it is run.
    compared: a command and what it prints.
  """

  language: str
  text: str
  line: int
  title: str = ""
  not_run: str = ""
  compared: bool = False


def blocks(text: str) -> Iterator[Block]:
  """The blocks of a page, in their order."""
  for found in BLOCK.finditer(text):
    note = found["note"] or ""
    title = re.search(r'title="([^"]+)"', found["rest"])
    yield Block(
      language=found["language"] or "",
      text=textwrap.dedent(found["text"]),
      line=text[: found.start("indent")].count("\n") + 1,
      title=title[1] if title else "",
      not_run=note.removeprefix("not run: ") if note.startswith("not run: ") else "",
      compared=note == "compared",
    )


def run(page: pathlib.Path) -> None:
  """Runs the blocks of a page.

  Raises:
    Exception: what a block raises, with its page and line as a note.
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
    command, _, printed = block.text.removeprefix("$ ").partition("\n")
    found = shell(command, capture_output=True).stdout
    if found.strip() != printed.strip():
      raise ValueError(f"{command} prints:\n{found}")
  elif block.language == "python":
    exec(compile("\n" * block.line + block.text, place, "exec"), names)
  elif block.language == "sh":
    shell(block.text)
  elif block.language == "gin":
    check_settings(block.text)
  elif block.language not in SHOWN:
    raise ValueError(f"a block of {block.language!r} is neither run nor shown only")


def shell(text: str, **options: Any) -> subprocess.CompletedProcess:
  """Runs lines of shell with `osd` and `python` of this interpreter."""
  programs = pathlib.Path(sys.executable).parent
  environment = {
    **os.environ,
    "PATH": f"{programs}:{os.environ['PATH']}",
    "COLUMNS": "80",
  }
  command = ["bash", "-euo", "pipefail", "-c", text]
  return subprocess.run(command, check=True, text=True, env=environment, **options)


def check_settings(text: str) -> None:
  """Each binding of a gin text must be of a config that a command reads."""
  from gin import config_parser

  class Delegate(config_parser.ParserDelegate):
    """References and macros stand for nothing here."""

    def configurable_reference(self, scoped_name, evaluate):
      return None

    def macro(self, scoped_name):
      return None

  fields = {(x.__name__, f.name) for x in configs() for f in dataclasses.fields(x)}
  for statement in config_parser.ConfigParser(text, Delegate()):
    if isinstance(statement, config_parser.BindingStatement) and statement.arg_name:
      name = (statement.selector.split(".")[-1], statement.arg_name)
      if name not in fields:
        raise ValueError(f"{'.'.join(name)} is no field of a config")


def configs() -> list[type]:
  """Every config class that a command reads."""
  from osd_jax.main import commands, settings

  found = {}
  for command in commands.COMMANDS.values():
    root = getattr(importlib.import_module(command.module), command.config)
    found |= settings.configs(root)
  return list(found.values())


if __name__ == "__main__":
  sys.path.insert(0, "")  # a block may import a module that the page wrote
  run(pathlib.Path(sys.argv[1]))
