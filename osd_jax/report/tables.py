"""Tables on a console that never cut numbers, even if it is narrow."""

from collections.abc import Mapping, Sequence
from typing import Any

import rich.box
import rich.console
import rich.table

_PADDING = 2  # characters between two columns


def print_table(
  table: Sequence[Mapping[str, Any]], console: rich.console.Console, title: str = ""
) -> None:
  """Prints rows with equal keys: text left-aligned, numbers right-aligned.

  Numbers are never cut. Columns that do not fit go into another table below, which
  repeats the leading text columns.
  """
  if not table:
    return
  if title:
    console.print(f"\n{title}", highlight=False)
  for names in _parts(table, console.width):
    shown = rich.table.Table(
      box=rich.box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False
    )
    for name in names:
      justify = "left" if _is_text(table, name) else "right"
      least = min(_width(table, name), console.width // 2)
      shown.add_column(name, justify=justify, width=least, overflow="fold")
    for row in table:
      shown.add_row(*(_cell(row[name]) for name in names))
    console.print(shown)


def _parts(table: Sequence[Mapping[str, Any]], width: int) -> list[list[str]]:
  """Splits the columns into parts that fit the width; each starts with the text."""
  names = list(table[0])
  leading = []
  for name in names:
    if not _is_text(table, name):
      break
    leading.append(name)
  parts, room = [leading.copy()], width - _taken(table, leading)
  for name in names[len(leading) :]:
    needed = _width(table, name) + _PADDING
    if needed > room and len(parts[-1]) > len(leading):
      parts.append(leading.copy())
      room = width - _taken(table, leading)
    parts[-1].append(name)
    room -= needed
  return parts


def _taken(table: Sequence[Mapping[str, Any]], names: Sequence[str]) -> int:
  return sum(_width(table, name) + _PADDING for name in names)


def _width(table: Sequence[Mapping[str, Any]], name: str) -> int:
  """Minimum width: cells stay on one line, headings may wrap between words."""
  return max(map(len, [*(_cell(row[name]) for row in table), *name.split()]))


def _is_text(table: Sequence[Mapping[str, Any]], name: str) -> bool:
  texts = [row[name] for row in table if isinstance(row[name], str)]
  return any(not text[:1].isdigit() for text in texts)  # "39.6%" is a number


def _cell(value: Any) -> str:
  return "-" if value is None else str(value)
