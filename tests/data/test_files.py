"""Files of every format are read row by row; errors say what other files are."""

import codecs
import concurrent.futures
import csv
import gzip
import io
import json
import os
import re
import sys

import pytest
import tiny_pair

from osd_jax import base
from osd_jax.data import chat, examples, files
from osd_jax.data.examples import TaskConfig, TaskExamples
from osd_jax.data.vocabulary import Vocabulary

ROWS = [
  {"prompt": "How many?", "reference": "three, or four"},
  {"prompt": 'naïve "東京"\nsecond line', "reference": ""},
  {"prompt": "last", "reference": "x"},
]


def jsonl(rows) -> bytes:
  return "".join(json.dumps(row) + "\n" for row in rows).encode()


def table(rows, delimiter: str) -> bytes:
  file = io.StringIO()
  writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
  writer.writeheader()
  writer.writerows(rows)
  return file.getvalue().encode()


def parquet(path, rows) -> None:
  arrow = pytest.importorskip("pyarrow")
  import pyarrow.parquet

  pyarrow.parquet.write_table(arrow.Table.from_pylist(rows), path)


def saved_dataset(folder, rows, **state) -> None:
  """Writes what `Dataset.save_to_disk` of the library datasets writes."""
  arrow = pytest.importorskip("pyarrow")
  whole = arrow.Table.from_pylist(rows)
  folder.mkdir()
  names = []
  for number, part in enumerate((whole.slice(0, 2), whole.slice(2))):
    names.append({"filename": f"data-{number:05}-of-00002.arrow"})
    with arrow.ipc.new_stream(str(folder / names[-1]["filename"]), part.schema) as out:
      out.write_table(part)
  (folder / "state.json").write_text(json.dumps({"_data_files": names, **state}))
  (folder / "dataset_info.json").write_text("{}")


def read(path) -> list:
  return list(files.read(path, "--file"))


def faults(path) -> dict[int, str]:
  return {n: str(row) for n, row in read(path) if isinstance(row, ValueError)}


WRITERS = {
  "a.jsonl": lambda path: path.write_bytes(jsonl(ROWS)),
  "bom.jsonl": lambda path: path.write_bytes(
    codecs.BOM_UTF8 + jsonl(ROWS).replace(b"\n", b"\r\n")
  ),
  "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(jsonl(ROWS))),
  "by_content": lambda path: path.write_bytes(gzip.compress(jsonl(ROWS))),
  "a.json": lambda path: path.write_text(json.dumps(ROWS, indent=2)),
  "a.csv": lambda path: path.write_bytes(table(ROWS, ",")),
  "bom.csv": lambda path: path.write_bytes(codecs.BOM_UTF8 + table(ROWS, ";")),
  "a.csv.gz": lambda path: path.write_bytes(gzip.compress(table(ROWS, ","))),
  "a.tsv": lambda path: path.write_bytes(table(ROWS, "\t")),
  "a.parquet": lambda path: parquet(path, ROWS),
  "dataset": lambda path: saved_dataset(path, ROWS),
}


def test_prompts_are_called_by_several_names(tmp_path):
  (tmp_path / "a.csv").write_text("question,topic\nwhy?,travel\n")
  found = examples.read_prompts(str(tmp_path / "a.csv"), "--file")
  assert list(found) == [(2, "why?")]


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_rows_and_prompts(tmp_path, vocabulary, name):
  path = tmp_path / name
  WRITERS[name](path)
  assert [row for _, row in read(path)] == ROWS
  prompts = [prompt for _, prompt in examples.read_prompts(str(path), "--file")]
  assert prompts == [row["prompt"] for row in ROWS]
  task = TaskConfig("t", data_dir=str(tmp_path), pattern=name)
  found = TaskExamples(task, vocabulary)
  assert [(e.prompt, e.reference) for e in found.examples] == [
    tuple(row.values()) for row in ROWS
  ]


def test_faulty_rows_are_reported_with_their_line(tmp_path):
  path = tmp_path / "a.csv"
  rows = b'"two\nlines",a\n\none value\nna\xefve,b\nx\ry,b\nlast,' + b"c" * 200_000
  path.write_bytes(b"prompt,reference\n" + rows)
  assert [number for number, _ in read(path)] == [2, 4, 5, 6, 7, 8]
  found = faults(path)
  assert "not CSV: new-line character" in found.pop(7)
  assert found == {4: "blank line", 5: "1 values, expected 2 as in the header"}
  found = dict(examples.read_prompts(str(path), "--file"))
  assert found[2] == "two\nlines" and found[8] == "last"
  assert "lone surrogate" in str(found[6])  # a byte that is not UTF-8
  path = tmp_path / "a.txt"
  path.write_bytes("naïve, why?\n\n  {not json}\n".encode() + b"\xff\n")
  found = dict(examples.read_prompts(str(path), "--file"))
  assert (found[1], found[3]) == ("naïve, why?", "{not json}")
  assert [(n, found[n].kind) for n in (2, 4)] == [(2, "empty"), (4, "malformed")]


@pytest.mark.parametrize(
  ("name", "content", "message"),
  [
    ("a.jsonl", b"", "looks like an empty file"),
    ("a.jsonl", table(ROWS, ","), "looks like CSV; give it a name that ends in .csv"),
    ("a.jsonl", b"How many?\n", "looks like plain text; give it a name .* in .txt"),
    ("a.jsonl", json.dumps(ROWS[0], indent=2).encode(), "JSON spread over several"),
    ("a.jsonl", jsonl(ROWS).decode().encode("utf-16"), "UTF-16 text; save it as UTF-8"),
    ("a.csv", jsonl(ROWS).decode().encode("utf-16"), "UTF-16 text; save it as UTF-8"),
    ("a.txt", b"\x7fELF\0\0", "a binary file"),
    ("a.jsonl", b"\x7fELF\0\0", "a binary file"),
    ("a.jsonl", b'{"asked": "q"}', "no field 'prompt'.* among 'asked'(?!.*looks like)"),
    ("a.csv", b"asked\nq\n", "no field 'prompt'.* among 'asked'(?!.*looks like)"),
    ("a.jsonl", b'{"turns": ["q"]}', r"'turns' \(a list; '\{turns\[0\]\}' is"),
    ("a.jsonl", gzip.compress(jsonl(ROWS))[:-9], "cannot be read .*a complete file"),
    ("a.parquet", b"PAR1 and no more", "cannot be read .*a complete Parquet file"),
    ("a.jsonl", b"PK\x03\x04 zipped", "a zip archive; unpack it"),
  ],
)
def test_file_without_prompts_is_named_for_what_it_is(
  tmp_path, vocabulary, name, content, message
):
  if name == "a.parquet":
    pytest.importorskip("pyarrow")
  path = tmp_path / name
  path.write_bytes(content)
  task = TaskConfig("t", data_dir=str(tmp_path), pattern=name)
  for read_all in (
    lambda: list(examples.read_prompts(str(path), "--file")),
    lambda: TaskExamples(task, vocabulary),
  ):
    with pytest.raises(base.InputError, match=message) as caught:
      read_all()
    text = str(caught.value)
    assert len(text.splitlines()) == 1 and "('" not in text
    assert str(path) in text


def test_pipe_is_read_once_and_in_order(tmp_path):
  path = tmp_path / "pipe"
  os.mkfifo(path)
  with concurrent.futures.ThreadPoolExecutor() as pool:
    pool.submit(path.write_bytes, jsonl(ROWS))
    assert [row for _, row in read(path)] == ROWS


def test_folders_that_hold_no_saved_data_set_are_refused(tmp_path):
  with pytest.raises(base.InputError, match="is a folder; expected a file"):
    read(tmp_path)
  saved_dataset(tmp_path / "train", ROWS)
  (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
  with pytest.raises(base.InputError, match=r"the splits \['train'\]; name .*/train"):
    read(tmp_path)


def test_without_pyarrow_the_error_names_the_extra(tmp_path, monkeypatch):
  (tmp_path / "a.parquet").write_bytes(b"PAR1")
  monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
  with pytest.raises(base.MissingExtraError, match=r"osd_jax\[parquet\]"):
    read(tmp_path / "a.parquet")


def message(role: str, content: str) -> dict:
  return {"role": role, "content": content}


def test_conversations_are_read_and_encoded_with_the_chat_template(tmp_path):
  turns = [
    message("user", "2 + 2?"),
    message("assistant", "4"),
    message("user", "+ 1?"),
  ]
  rows = [
    {"messages": [message("user", "How many?"), message("assistant", "three")]},
    {"messages": turns},
    {"messages": [message("assistant", "x")]},
    {"messages": "text"},
    {
      "conversations": [
        {"from": "human", "value": "hi"},
        {"from": "gpt", "value": "ho"},
      ]
    },
  ]
  path = tmp_path / "chat.jsonl"
  path.write_bytes(jsonl(rows))
  found = dict(examples.read_prompts(str(path), "--file"))
  assert (found[1], found[5]) == ("How many?", "hi")
  assert found[2] == "user: 2 + 2?\nassistant: 4\nuser: + 1?"
  assert (found[3].kind, found[4].kind) == ("empty", "malformed")
  (tmp_path / "tokenizer.model").write_bytes(tiny_pair.llama_tokenizer())
  plain = Vocabulary.load(tmp_path)
  text = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
  chat = Vocabulary.load(tmp_path, template=text)
  written = "<user>2 + 2?<assistant>4<user>+ 1?"
  assert chat.encode_prompt(found[2]).tolist() == plain.encode(written)
  task = TaskConfig("t", data_dir=str(tmp_path), pattern="chat.jsonl")
  read_with = lambda vocabulary: TaskExamples(task, vocabulary)
  assert [e.reference for e in read_with(chat).examples] == ["three", "", "ho"]
  assert [e.reference for e in read_with(plain).examples] == ["three", "ho"]
  assert "set PairConfig.chat_template" in str(read_with(plain).skipped)


# ---- What rows of chats, tables and saved sets say is never dropped


def parts(text: str) -> list:
  return [{"type": "text", "text": text[:3]}, {"type": "text", "text": text[3:]}]


def task_of(tmp_path, rows, **fields):
  """Returns the examples of rows, and the reasons for which rows are skipped."""
  (tmp_path / "rows.jsonl").write_bytes(jsonl(rows))
  task = TaskConfig("t", data_dir=str(tmp_path), pattern="rows.jsonl", **fields)
  skipped = []
  return list(examples.texts(task, skipped)), skipped


@pytest.mark.parametrize(
  ("user", "assistant"),
  [
    ("user", "assistant"),
    ("user", "model"),
    ("human", "gpt"),
    ("human", "chatgpt"),
    ("user", "bot"),
    ("Human", "AI"),
    ("User", "Assistant"),
  ],
)
def test_speakers_of_every_name_have_their_roles(tmp_path, user, assistant):
  turns = [(user, "A colour?"), (assistant, "Red."), (user, "More?"), (assistant, "No")]
  rows = [
    {"messages": [{"role": who, "content": text} for who, text in turns]},
    {"messages": [{"role": who, "content": parts(text)} for who, text in turns]},
    {"conversations": [{"from": who, "value": text} for who, text in turns]},
    {
      "prompt": [{"role": who, "content": text} for who, text in turns[:3]],
      "completion": [{"role": assistant, "content": "No"}],
    },
  ]
  found, skipped = task_of(tmp_path, rows)
  assert len(found) == len(rows) and not skipped
  for example in found:
    roles = [one["role"] for one in example.prompt.messages]
    assert roles == ["user", "assistant", "user"] and example.reference == "No"
    assert str(example.prompt) == "user: A colour?\nassistant: Red.\nuser: More?"


@pytest.mark.parametrize(
  ("row", "reason"),
  [
    ({"messages": [message("narrator", "x")]}, "by 'narrator', expected one of system"),
    ({"messages": [{"content": "x"}]}, "by None, expected one of"),
    ({"messages": ["x"]}, r"messages\[0\] is a str, expected {\"role\""),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "has no text"),
    ({"prompt": ["x"]}, r"'{prompt\[0\]}' is its first item"),
    (
      {
        "messages": [
          message("user", "x"),
          {"role": "assistant", "content": None, "tool_calls": [{}]},
        ]
      },
      "the last message calls a tool",
    ),
    ({"messages": [message("user", "x")], "tools": [{}]}, "conversation with tools"),
  ],
)
def test_messages_that_cannot_be_read_are_skipped_with_the_reason(
  tmp_path, row, reason
):
  found, skipped = task_of(tmp_path, [row])
  assert not found
  assert re.search(reason, skipped[0]), skipped


@pytest.mark.parametrize("reference", ["", "{response}", "{missing|response}"])
def test_reference_next_to_messages_is_read(tmp_path, reference):
  name = "response" if reference else "reference"
  rows = [
    {"messages": [message("user", "A colour?")], name: "Red."},
    {"messages": [message("system", "Short."), message("user", "B?")], name: "Blue."},
    {"messages": [message("user", "C?"), message("assistant", "Own.")]},
  ]
  found, _ = task_of(tmp_path, rows, reference=reference)
  assert [one.reference for one in found] == ["Red.", "Blue.", "Own."]


def test_fields_of_messages_reach_the_template(tmp_path):
  (tmp_path / "tokenizer.model").write_bytes(tiny_pair.llama_tokenizer())
  text = "{% for m in messages %}{{ m.name or m.role }}: {{ m.content }}\n{% endfor %}"
  vocabulary = Vocabulary.load(tmp_path, template=text)
  ada = {"role": "user", "name": "Ada", "content": "Hello."}
  plain = {"role": "user", "name": None, "content": "x"}
  rows = [ada, {**ada, "name": "Bo"}, plain, {**plain, "weight": 1}]
  found, _ = task_of(tmp_path, [{"messages": [row]} for row in rows])
  texts = [vocabulary.template(one.prompt) for one in found]
  assert texts == ["Ada: Hello.\n", "Bo: Hello.\n", "user: x\n", "user: x\n"]
  without = Vocabulary.load(tmp_path)
  assert without.encode_prompt(found[3].prompt).tolist() == [1, *without.encode("x")]
  with pytest.raises(
    base.InputError, match=r"\(user Ada\).*set PairConfig.chat_template"
  ):
    without.encode_prompt(found[0].prompt)


def test_conversation_with_a_t5_is_refused_without_advice_that_it_cannot_take(
  vocabulary,
):
  system = chat.Conversation([message("system", "Short."), message("user", "x")])
  with pytest.raises(
    base.InputError, match=r"\(system, user\), but this model takes one"
  ):
    vocabulary.encode_prompt(system)


@pytest.mark.parametrize("key", ["_indices_data_files", "_indices_files"])
def test_saved_selection_is_read_in_its_own_order(tmp_path, key):
  arrow = pytest.importorskip("pyarrow")
  names = [{"filename": "indices.arrow"}]
  saved_dataset(tmp_path / "set", ROWS, **{key: names})
  indices = arrow.table({"indices": arrow.array([2, 0], arrow.uint64())})
  path = tmp_path / "set" / "indices.arrow"
  with arrow.ipc.new_stream(str(path), indices.schema) as out:
    out.write_table(indices)
  assert read(tmp_path / "set") == [(1, ROWS[2]), (2, ROWS[0])]


@pytest.mark.parametrize(
  ("lines", "expected"),
  [
    (['"Tis a start\tx', "b\ty"], [(2, '"Tis a start', "x"), (3, "b", "y")]),
    (['"Tis\tx', 'nobody"\ty'], [(2, '"Tis', "x"), (3, 'nobody"', "y")]),
    (['"Hello," he said\tx'], [(2, '"Hello," he said', "x")]),
    (['"a\tb"\tx', '"c ""d"""\ty'], [(2, "a\tb", "x"), (3, 'c "d"', "y")]),
    (['"two', "", 'lines"\tx', "b\ty"], [(2, "two\n\nlines", "x"), (5, "b", "y")]),
    (['"one value', "b\ty"], [(3, "b", "y")]),
  ],
)
def test_quotation_marks_in_tsv_count_only_around_whole_values(
  tmp_path, lines, expected
):
  path = tmp_path / "a.tsv"
  path.write_text("\n".join(["prompt\treference", *lines]) + "\n")
  found = [(n, *row.values()) for n, row in read(path) if isinstance(row, dict)]
  assert found == expected
  assert len(faults(path)) == ('"one value' in lines)


def test_csv_row_that_swallows_others_is_reported(tmp_path):
  path = tmp_path / "a.csv"
  path.write_text('prompt,reference\n"Tis a start,x\nb,y\n')
  assert "a quotation mark of this row may lack its partner" in faults(path)[2]


@pytest.mark.parametrize(
  ("header", "row", "first"),
  [
    ('prompt;"a, b, or c"', "x;y", 2),
    ("sep=;\nprompt;a,b,c", "x;y", 3),
    ("prompt|reference", "x|y", 2),
    ('prompt,"two\nlines"', "x,y", 3),
  ],
)
def test_delimiter_is_found_outside_of_quotes(tmp_path, header, row, first):
  path = tmp_path / "a.csv"
  path.write_text(f"{header}\n{row}\n")
  assert [(n, *values.values()) for n, values in read(path)] == [(first, "x", "y")]


def test_two_columns_of_one_name_are_refused(tmp_path):
  path = tmp_path / "a.csv"
  path.write_text("prompt,x,x\na,b,c\n")
  with pytest.raises(base.InputError, match="two columns are called 'x'; rename one"):
    read(path)
