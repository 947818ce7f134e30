"""Reads files of examples: JSONL, JSON, CSV, Parquet, text, and saved `datasets`.

`read` yields every row as (number, mapping of fields), or (number, fault) for a row
that cannot be used, so that one bad line never ends a run.
"""

import collections
import contextlib
import csv
import gzip
import io
import itertools
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from osd_jax import base
from osd_jax.data.preprocessors import UnusableExample

Row = Mapping[str, Any] | UnusableExample
Rows = Iterator[tuple[int, Row]]

_SNIFFED = 4096  # the format is recognized from this many bytes
_DELIMITERS = ",;\t|"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_GZIP, _PARQUET = b"\x1f\x8b", b"PAR1"
_SIGNATURES = {
  b"PK\x03\x04": "a zip archive; unpack it",
  b"BZh": "compressed with bzip2; unpack it, or use gzip",
  b"\xfd7zXZ": "compressed with xz; unpack it, or use gzip",
  b"\x28\xb5\x2f\xfd": "compressed with zstd; unpack it, or use gzip",
  b"\xff\xfe": "UTF-16 text; save it as UTF-8",
  b"\xfe\xff": "UTF-16 text; save it as UTF-8",
}


def read(path: str | Path, setting: str) -> Rows:
  """Yields (number, row) for every row of a file, in order.

  The number is the line where a row of a JSONL, CSV or text file begins, and otherwise
  counts rows from 1. The first bytes and the suffix of the name decide how the file is
  read; gzipped files are decompressed. A folder must be one that `save_to_disk` of the
  library datasets wrote. Errors name the setting with the path.

  Raises:
    InputError: the file cannot be read, or is of another format.
    MissingExtraError: Parquet or a saved data set without the extra "parquet".
  """
  path = Path(path)
  try:
    if path.is_dir():
      yield from _saved_dataset(path, setting)
      return
    with _opened(path) as (file, start):
      if start.startswith(_PARQUET):
        yield from _parquet(path, setting)
        return
      reader, kind = _reader(path, start), _other_format(start)
      # A damaged line of JSON is found by the parser; the other formats take any text.
      if kind and reader in (_csv_rows, _text_lines):
        raise base.InputError(f"{setting}: {path} looks like {kind}.")
      yield from reader(file)
  except FileNotFoundError as error:
    raise base.InputError(f"{setting}: {path} does not exist.") from error
  except csv.Error as error:
    raise base.InputError(
      f"{setting}: {path} cannot be read ({error}); expected a header with a name for"
      " each column."
    ) from error
  except (OSError, EOFError, zlib.error) as error:
    raise base.InputError(
      f"{setting}: {path} cannot be read ({error}); expected a complete file."
    ) from error


def looks_like(path: str | Path) -> str:
  """Names the format that a file without usable rows seems to have, or returns ""."""
  if not os.path.isfile(path):  # a folder, or a pipe that was read
    return ""
  with _opened(Path(path)) as (_, start):
    start = start.removeprefix(_BYTE_ORDER_MARK)
  kind = _other_format(start)
  # The other readers take any text, so only JSON can be of another format.
  is_json = _reader(Path(path), start) in (_json_lines, _json_array)
  first = start.decode("utf-8", "replace").lstrip().partition("\n")[0].strip()
  if not first:
    kind = "an empty file"
  elif not is_json and not kind:
    return ""
  elif not kind and first.startswith(("{", "[")):
    with contextlib.suppress(ValueError, RecursionError):
      json.loads(first)
      return ""
    if b"\n" not in start.strip():
      return ""
    kind = "JSON spread over several lines; write one object per line"
  elif not kind and any(sign in first for sign in _DELIMITERS):
    kind = "CSV; give it a name that ends in .csv"
  return f"{path} looks like {kind or 'plain text; give it a name that ends in .txt'}."


def _other_format(start: bytes) -> str:
  """Names the format of bytes that are not UTF-8 text, or returns ""."""
  kinds = (name for mark, name in _SIGNATURES.items() if start.startswith(mark))
  # Text has no NUL; JSON writes it as an escape.
  return next(kinds, "a binary file" if b"\0" in start else "")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, bytes]]:
  """Yields a file of bytes and its beginning; gzip is recognized by content."""
  # Opened once and never rewound, since a pipe can only be read once.
  with open(path, "rb") as raw:
    is_gzip = raw.peek(2).startswith(_GZIP)
    file = gzip.GzipFile(fileobj=raw) if is_gzip else raw
    yield file, file.peek(_SNIFFED)[:_SNIFFED]


def _reader(path: Path, start: bytes) -> Any:
  suffix = path.suffix if path.suffix != ".gz" else Path(path.stem).suffix
  start = start.removeprefix(_BYTE_ORDER_MARK).lstrip()
  if suffix in (".csv", ".tsv"):
    return _csv_rows
  if suffix in (".json", ".jsonl", ".ndjson"):
    return _json_array if start.startswith(b"[") else _json_lines
  return _json_lines if re.match(rb'{\s*"', start) else _text_lines


def _lines(file: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
  for number, line in enumerate(file, 1):
    yield number, line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line


def _json_lines(file: Iterable[bytes]) -> Rows:
  for number, line in _lines(file):
    try:
      yield number, parse_line(line)
    except UnusableExample as fault:
      yield number, fault


def _json_array(file: Any) -> Rows:
  """Reads a list of objects, or lines if the file as a whole is not JSON."""
  data = file.read()
  try:
    rows = json.loads(data.removeprefix(_BYTE_ORDER_MARK))
  except (ValueError, RecursionError):
    yield from _json_lines(io.BytesIO(data))
    return
  for number, row in enumerate(rows, 1):
    yield number, row if isinstance(row, dict) else _not_an_object(row)


def parse_line(line: bytes) -> dict[str, Any]:
  """Returns the JSON object of one line, or raises UnusableExample."""
  if not line.strip():
    raise UnusableExample("empty", "blank line")
  try:
    raw = json.loads(line.decode("utf-8"))
  except UnicodeDecodeError as error:
    raise UnusableExample("malformed", f"not UTF-8 at byte {error.start}") from error
  except RecursionError as error:
    raise UnusableExample("malformed", "JSON nested too deeply") from error
  except ValueError as error:
    raise UnusableExample("malformed", f"not JSON: {error}") from error
  if not isinstance(raw, dict):
    raise _not_an_object(raw)
  return raw


def _not_an_object(value: Any) -> UnusableExample:
  kind = type(value).__name__
  return UnusableExample("malformed", f"expected a JSON object, received {kind}")


def _text_lines(file: Iterable[bytes]) -> Rows:
  """Reads one prompt per line."""
  for number, line in _lines(file):
    try:
      text = line.decode("utf-8").strip()
      yield number, {"prompt": text} if text else UnusableExample("empty", "blank line")
    except UnicodeDecodeError as error:
      reason = f"not UTF-8 at byte {error.start}"
      yield number, UnusableExample("malformed", reason)


def _csv_rows(file: Iterable[bytes]) -> Rows:
  """Reads rows below a header; the most frequent delimiter in the header counts.

  A first line such as "sep=;" gives the delimiter, as in Excel.
  """
  # Bytes that are not UTF-8 become lone surrogates, which are found in their own row.
  text = (line.decode("utf-8", "surrogateescape") for _, line in _lines(file))
  header, first = next(text, ""), 1
  stated = re.fullmatch(r"sep=(\W)\s*", header)
  if stated:
    header, first = next(text, ""), 2
  outside = re.sub(r'"[^"]*"', "", header)
  delimiter = stated[1] if stated else max(_DELIMITERS, key=outside.count)
  csv.field_size_limit(2**31 - 1)  # a prompt may be longer than the default of 128 Ki
  head = csv.reader(itertools.chain([header], text), delimiter=delimiter)
  names = [name.strip() for name in next(head, [])]
  first += head.line_num
  for name in filter(None, names):
    if names.count(name) > 1:
      raise csv.Error(f"two columns are called {name!r}; rename one")
  if delimiter == "\t":
    rows = _tab_values(text, len(names))
  else:
    rows = _csv_values(csv.reader(text, delimiter=delimiter))
  for number, values in rows:
    if isinstance(values, UnusableExample):
      yield first + number, values
    elif not values:
      yield first + number, UnusableExample("empty", "blank line")
    elif len(values) != len(names):
      reason = f"{len(values)} values, expected {len(names)} as in the header"
      if any("\n" in value for value in values):
        reason += "; a quotation mark of this row may lack its partner"
      yield first + number, UnusableExample("malformed", reason)
    else:
      yield first + number, dict(zip(names, values, strict=True))


_Values = Iterator[tuple[int, list[str] | UnusableExample]]


def _csv_values(reader: Any) -> _Values:
  """Yields the number of lines before a row, and its values."""
  while True:
    number = reader.line_num
    try:
      values = next(reader, None)
    except csv.Error as error:
      yield number, UnusableExample("malformed", f"not CSV: {error}")
      continue
    if values is None:
      return
    yield number, values


# A value that is quoted as a whole, or any other.
_TAB_VALUE = re.compile(r'(?:"((?:[^"]|"")*)"|([^\t]*))(\t|\Z)')
_MAX_QUOTED_LINES = 100  # of one row


def _tab_values(text: Iterable[str], count: int) -> _Values:
  """Yields the number of lines before a row of TSV, and its values.

  TSV has no rule for quotation marks. They count where a whole value is quoted, as the
  csv modules write it; elsewhere they belong to the text.
  """
  number, waiting = 0, collections.deque[str]()
  text = iter(text)
  while line := waiting.popleft() if waiting else next(text, ""):
    record, used = line.rstrip("\r\n"), 1
    values = _split_at_tabs(record, count)
    if len(values) < count and '"' in record:
      # A quoted value may hold line breaks.
      waiting.extend(itertools.islice(text, _MAX_QUOTED_LINES - len(waiting)))
      whole = line
      for extra, more in enumerate(waiting, 1):
        whole += more
        if '"' in more:
          joined = _split_at_tabs(whole.rstrip("\r\n"), count)
          if len(joined) == count:
            values, used = joined, 1 + extra
            break
      for _ in range(used - 1):
        waiting.popleft()
    yield number, values
    number += used


def _split_at_tabs(record: str, count: int) -> list[str]:
  """Splits a row; the quoted values of several lines only if there are `count`."""
  values, at, is_whole = [], 0, True
  while True:
    value = _TAB_VALUE.match(record, at)
    assert value is not None  # the second form takes any text
    is_whole = is_whole and (value[1] is not None or "\n" not in value[2])
    values.append(value[2] if value[1] is None else value[1].replace('""', '"'))
    at = value.end()
    if not value[3]:
      break
  if is_whole and len(values) == count:
    return values
  return record.split("\t") if "\n" not in record and record else []


def _parquet(path: Path, setting: str) -> Rows:
  with base.extra("parquet", f"{setting}: {path}"):
    import pyarrow.parquet as parquet

  try:
    yield from _records(parquet.ParquetFile(path).iter_batches())
  except ValueError as error:  # pyarrow's errors for damaged files
    raise base.InputError(
      f"{setting}: {path} cannot be read ({error}); expected a complete Parquet file."
    ) from error


def _saved_dataset(folder: Path, setting: str) -> Rows:
  """Reads what `save_to_disk` wrote: Arrow streams, listed in state.json."""
  if (folder / "dataset_dict.json").exists():
    splits = sorted(path.parent.name for path in folder.glob("*/state.json"))
    raise base.InputError(
      f"{setting}: {folder} is a saved data set with the splits {splits}; name the"
      f" folder of one of them, such as {folder / splits[0] if splits else folder}."
    )
  try:
    state = json.loads((folder / "state.json").read_bytes())
    names = [part["filename"] for part in state["_data_files"]]
    # The order of a set that was shuffled or selected from, in files of its own.
    order = state.get("_indices_data_files") or state.get("_indices_files") or ()
    order = [part["filename"] for part in order]
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise base.InputError(
      f"{setting}: {folder} is a folder; expected a file, or a folder that save_to_disk"
      " of the library datasets wrote."
    ) from error
  with base.extra("parquet", f"{setting}: {folder}"):
    import pyarrow as arrow

  opened = (arrow.ipc.open_stream(arrow.memory_map(str(folder / x))) for x in names)
  if not order:
    yield from _records(itertools.chain.from_iterable(opened))
    return
  rows = arrow.concat_tables([part.read_all() for part in opened])
  chosen = itertools.chain.from_iterable(
    arrow.ipc.open_stream(folder / name) for name in order
  )
  yield from _records(rows.take(batch.column(0)) for batch in chosen)


def _records(batches: Iterable[Any]) -> Rows:
  rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
  yield from enumerate(rows, 1)
