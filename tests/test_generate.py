"""`osd generate`: sources of prompts, output formats, options and saved drafts."""

import dataclasses
import gzip
import io
import json
import re
import signal
import sys
import types

import jax
import numpy as np
import pytest

from osd_jax import assets, base, pairs
from osd_jax import main as cli
from osd_jax.engine import server
from osd_jax.engine.requests import Prompt
from osd_jax.main import commands, generate
from osd_jax.models import weights


@dataclasses.dataclass
class Counts:
  requests: int = 0
  tokens: int = 0
  tokens_per_target_call: float = 2.5
  tokens_per_second: float = 100.0
  milliseconds: float = 60.0


class FakeVocabulary:
  """One token per word."""

  is_causal, template = False, None

  def encode_prompt(self, text):
    if "\ud800" in text:
      raise base.InputError("the prompt is not valid Unicode.")
    return text.split()


class FakeServer:
  """Answers with the prompt in capitals, and records its calls."""

  made: "list[FakeServer]" = []
  fails_at = -1

  def __init__(self, pair, decoding, learning, partition):
    self.pair, self.decoding, self.learning = pair, decoding, learning
    self.statistics, self.prompts, self.saved, self.is_open = Counts(), [], [], False
    self.engine, self.is_finished = types.SimpleNamespace(), False
    self.made.append(self)

  def __enter__(self):
    self.is_open = True
    return self

  def __exit__(self, *_):
    self.is_open = False

  def answer(self, prompt):
    index = len(self.prompts)
    self.prompts.append(prompt)
    if index == self.fails_at:
      raise KeyboardInterrupt
    self.statistics.requests += 1
    self.statistics.tokens += len(prompt.text)
    reason = base.StopReason.EOS
    if prompt.text == "broken":
      reason = base.StopReason.NOT_FINITE
    return types.SimpleNamespace(
      index=index,
      prompt=prompt.text,
      text=prompt.text.upper(),
      tokens=np.arange(3, dtype=np.int32),
      stop_reason=reason,
      tokens_per_target_call=2.5,
      milliseconds=1.25,
      log_probs=np.float32([-0.5]) if prompt.log_probs else None,
    )

  def generate(self, prompts, **settings):
    self.settings = settings
    yield from map(self.answer, prompts)

  def stream(self, prompt, **settings):
    text = self.answer(prompt).text
    yield from (text[:2], text[2:])

  def finish_learning(self):
    self.is_finished = True

  def save(self, path):
    assert self.is_finished
    self.saved.append(path)
    return path


class Terminal(io.StringIO):
  def isatty(self):
    return True


@pytest.fixture
def osd(unprepared, monkeypatch, capsys, tmp_path):
  """Runs `osd generate`; returns exit code, output, errors and the server."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(FakeServer, "made", [])
  monkeypatch.setattr(server, "Server", FakeServer)
  target = types.SimpleNamespace(max_positions=None, absorb=None)
  monkeypatch.setattr(
    pairs,
    "load_pair",
    lambda config, _, default: types.SimpleNamespace(
      config=dataclasses.replace(config, draft=config.draft or default),
      target=target,
      vocabulary=FakeVocabulary(),
      draft_bytes=1,
      identity=None,
    ),
  )

  def run(*words, typed="", terminal=False):
    stdin = io.StringIO(typed) if isinstance(typed, str) else typed
    monkeypatch.setattr("sys.stdin", Terminal() if terminal else stdin)
    if terminal:
      monkeypatch.setattr("sys.stdout", out := Terminal())
    code = cli.main(["generate", *words])
    captured = capsys.readouterr()
    text = out.getvalue() if terminal else captured.out
    server = FakeServer.made[-1] if FakeServer.made else None
    assert server is None or not server.is_open
    return code, text, captured.err, server

  return run


def test_prompts_come_from_arguments_files_or_standard_input(osd, tmp_path):
  (tmp_path / "p.txt").write_text("one\n\n two \n")
  (tmp_path / "p.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two", "x": 1}\n')
  (tmp_path / "p.csv").write_text("prompt,x\none,1\n")
  (tmp_path / "q.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "two"}'))
  for words, typed in (
    (["one", "two"], ""),
    (["--file", "p.txt"], ""),
    (["--file", "p.jsonl"], ""),
    (["--file", "p.csv", "--file", "q.jsonl.gz"], ""),
    ([], "one\n\ntwo\n"),
  ):
    code, out, errors, _ = osd(*words, typed=typed)
    assert (code, out) == (0, "ONE\nTWO\n")
    summary = (
      "loading target and draft ...\n"
      r"the demo's model answers, which knows four topics \(maths, .*\n"
      "2 answers, 6 tokens, 2.50 tokens per target call, 100.0 tokens per second;"
      r" [\d.]+ s of loading, [\d.]+ s of compiling, 0.1 s of decoding\n"
    )
    assert re.fullmatch(summary, errors)


def test_empty_standard_input_is_reported(osd):
  code, out, errors, _ = osd(typed="\n")
  assert (code, out) == (0, "") and "standard input has no prompt" in errors


LONG = " ".join(["word"] * 1100)


@pytest.mark.parametrize(
  ("on_long", "code", "answered", "said"),
  [
    ([], 2, 3, "more than 1024; see --on_long, or set a longer"),
    (["--on_long=skip"], 0, 3, "more than 1024; it is skipped."),
    (["--on_long=truncate"], 0, 4, "more than 1024; it is truncated."),
  ],
)
def test_long_prompt_is_reported_by_line_and_the_others_are_answered(
  osd, tmp_path, on_long, code, answered, said
):
  (tmp_path / "p.txt").write_text(f"one\n\n{LONG}\n\ntwo\nthree words long\n")
  found, out, errors, server = osd("--file", "p.txt", "--format", "jsonl", *on_long)
  rows = [json.loads(line) for line in out.splitlines()]
  assert (found, len(rows)) == (code, answered)
  assert f"p.txt:3: the prompt has 1100 tokens, {said}" in errors
  assert [row["index"] for row in rows] == [0, *range(5 - answered, 4)]
  assert [prompt.seed for prompt in server.prompts][-2:] == [2, 3]
  longest = max(len(prompt.text.split()) for prompt in server.prompts)
  assert longest == (1024 if answered == 4 else 3)


def test_bad_lines_are_reported_and_the_others_are_answered(osd, tmp_path):
  lines = ['{"prompt": "one"}', '{"prom', '{"answer": "x"}', '{"prompt": "two"}']
  (tmp_path / "p.jsonl").write_text("\n".join([*lines, r'{"prompt": "\ud800"}']))
  code, out, errors, _ = osd("--file", "p.jsonl")
  assert (code, out) == (2, "ONE\nTWO\n")
  for number in (2, 3, 5):
    assert f"osd generate: p.jsonl:{number}: " in errors
  code, out, errors, _ = osd("", "one")
  assert (code, out) == (2, "ONE\n")
  assert "osd generate: prompt 1: Prompt.text: received ''" in errors


def test_prompt_lengths_are_allocated_as_needed(osd):
  assert osd("one")[3].decoding.source_lengths == (64, 256, 1024)
  assert osd(typed="one")[3].decoding.source_lengths == (64, 256, 1024)
  default = generate.GenerateConfig().decoding.target_length
  assert osd("one", "--max_new_tokens", "9")[3].decoding.target_length == default
  assert osd("one", "--max_new_tokens", "200")[3].decoding.target_length == 200
  # The learner pads to the longest length.
  assert osd("one", "--learn")[3].decoding.source_lengths == (64,)
  assert osd("w " * 70, "--learn")[3].decoding.source_lengths == (64, 256)
  flag = "--gin.DecodingConfig.source_lengths=(8,)"
  code, _, errors, server = osd("w " * 9, "one", flag)
  assert (code, len(server.prompts)) == (2, 1)
  assert "prompt 1: the prompt has 9 tokens, more than 8" in errors


def test_lines_are_answered_one_by_one(osd, monkeypatch):
  """Prompts from an endless standard input are read one at a time."""
  shown = []

  class Typed(io.StringIO):
    def __iter__(self):
      yield "one\n"
      shown.append(sys.stdout.getvalue())
      yield "two\n"

  monkeypatch.setattr("sys.stdout", io.StringIO())
  assert osd(typed=Typed())[0] == 0
  assert shown == ["ONE\n"]


def test_jsonl_output_has_one_object_per_answer(osd):
  code, out, _, _ = osd("é", "b", "--format", "jsonl", "--log_probs")
  first, second = map(json.loads, out.splitlines())
  assert code == 0 and second["index"] == 1
  assert first == {
    "index": 0,
    "prompt": "é",
    "text": "É",
    "tokens": [0, 1, 2],
    "stop_reason": "eos",
    "tokens_per_target_call": 2.5,
    "milliseconds": 1.25,
    "log_probs": [-0.5],
  }
  _, out, _, _ = osd("é", "--format", "jsonl")
  assert json.loads(out) == {k: v for k, v in first.items() if k != "log_probs"}


def test_options_reach_the_server(osd):
  options = "--temperature .5 --top_k 3 --top_p .9 --seed 7 --max_new_tokens 9 --rows 2"
  options += " --num_draft_tokens 3 --stop ; --stop end --target t --draft d"
  options += " --min_p .1 --repetition_penalty 1.2"
  code, _, _, server = osd("one", *options.split(), "--vocabulary", "v'v")
  assert code == 0
  options = {"learn": False, "ordered": True, "return_failed": True}
  assert server.settings == options
  assert server.prompts == [
    Prompt(*("one", 0.5, 3, 0.9, 7, 9, (";", "end")), min_p=0.1, repetition_penalty=1.2)
  ]
  assert (server.decoding.rows, server.decoding.num_draft_tokens) == (2, 3)
  assert not server.decoding.cache_tokens
  assert osd("one", "--draft", "attached")[3].decoding.cache_tokens
  pair = server.pair.config
  assert (pair.target, pair.draft, pair.vocabulary) == ("t", "d", "v'v")


def test_streaming_prints_pieces_and_seeds_each_prompt(osd):
  code, out, _, server = osd("one", "two", "--stream", "--seed", "5")
  assert (code, out) == (0, "ONE\nTWO\n")
  assert [prompt.seed for prompt in server.prompts] == [5, 6]


def test_options_are_short_for_gin_settings(osd, written):
  file = written("DecodingConfig.rows = 3\nDecodingConfig.max_rounds = 5")
  flag = "--gin.DecodingConfig.max_rounds=6"
  decoding = osd("one", f"--gin_file={file}", "--rows=4", flag)[3].decoding
  assert (decoding.rows, decoding.max_rounds) == (4, 6)
  lengths = (64, 256, 1024)
  defaults = dataclasses.replace(
    generate.GenerateConfig().decoding, source_lengths=lengths
  )
  assert osd("one")[3].decoding == defaults
  code, out, _, _ = osd("--dry_run", "--rows=4")
  assert code == 0 and "DecodingConfig.rows = 4" in out
  assert osd("one", f"--gin_file={written(out, 'kept.gin')}")[3].decoding.rows == 4


def test_learned_draft_is_saved_also_after_an_interrupt(osd, monkeypatch):
  _, _, errors, server = osd("one", "--learn")
  assert server.saved == ["adapted_draft.safetensors"]
  assert "adapted draft: adapted_draft.safetensors" in errors
  assert osd("one", "--learn", "--save", "d.st")[3].saved == ["d.st"]
  assert osd("one")[3].saved == []
  assert osd("--learn")[3].saved == []  # without prompts nothing is learned
  monkeypatch.setattr(FakeServer, "fails_at", 1)
  code, out, errors, server = osd("one", "two", "--learn")
  assert (code, out) == (130, "ONE\n")
  assert server.saved and "1 answer, 3 tokens" in errors


@pytest.mark.parametrize(
  ("end", "expected"), [(EOFError, 2), (KeyboardInterrupt, 2), (signal.SIGTERM, 143)]
)
def test_terminal_answers_each_line_and_ends_cleanly(osd, monkeypatch, end, expected):
  lines = iter(["one", "", LONG, "two"])

  def typed(shown):
    assert shown == "> "
    for line in lines:
      return line
    if end is signal.SIGTERM:
      signal.raise_signal(end)
    raise end

  monkeypatch.setattr("builtins.input", typed)
  code, out, errors, server = osd(terminal=True)
  assert code == expected and out.startswith("ONE\nTWO\n")
  assert "osd generate: prompt: the prompt has 1100" in errors and "2 answers" in errors


@pytest.mark.parametrize(
  ("words", "part"),
  [
    (["--file", "none.txt"], "--file: none.txt does not exist"),
    (["--file", "."], "--file: . is a folder"),
    (["--file", "bad.jsonl"], "--file: bad.jsonl has no prompt"),
    (["one", "--file", "bad.jsonl"], "--file: received prompts as arguments too"),
    (["one", "--stream", "--format", "jsonl"], "--stream: cannot be combined with"),
    (["one", "--log_probs"], "--log_probs: needs --format jsonl"),
    (["one", "--save", "x"], "--save: the draft changes only with --learn"),
    (["one", "--learn", "--save", "p.txt/x"], "--save: received 'p.txt/x', expected"),
    (["one", "--learn", "--save", "."], "--save: received '.', expected"),
    (["one", "--learn", "--draft", "cache"], "--learn: the draft 'cache' takes up"),
    (["one", "--learn", "--draft", "none"], "--learn: the draft 'none' is plain"),
    (["one", "--own_sampling"], "OwnSampling: "),  # the shipped pair states none
    (["one", "--rows", "0"], "DecodingConfig.rows: received 0"),
    (["one", "--temperature", "-1"], "SamplingConfig.temperature: received -1.0"),
    (["one", "--max_new_tokens", "0"], "Prompt.max_new_tokens: received 0"),
  ],
)
def test_bad_options_exit_with_2_and_one_line(osd, tmp_path, words, part):
  (tmp_path / "p.txt").touch()
  (tmp_path / "bad.jsonl").write_text('{"answer": "x"}\n{"prom\n')
  code, _, errors, made = osd(*words)
  assert code == 2 and part in errors and made is None
  assert len(errors.splitlines()) == 1


def test_own_sampling_comes_from_the_folder_of_the_target(osd, tmp_path):
  (tmp_path / "m").mkdir()
  fields = {"do_sample": True, "temperature": 0.7, "top_k": 20, "eos_token_id": 3}
  (tmp_path / "m" / "generation_config.json").write_text(json.dumps(fields))
  words = ["one", "two", "--target", "m", "--seed", "4"]
  code, _, _, server = osd(*words, "--own_sampling")
  assert code == 0
  found = [(one.temperature, one.top_k, one.seed) for one in server.prompts]
  assert found == [(0.7, 20, 4), (0.7, 20, 5)]
  _, _, _, greedy = osd(*words)  # negative control
  assert [one.temperature for one in greedy.prompts] == [0, 0]
  code, _, errors, _ = osd(*words, "--own_sampling", "--top_k", "3")
  assert code == 2 and "--own_sampling: received --top_k too" in errors


def test_closed_pipe_ends_the_command_quietly(osd, monkeypatch):
  class Closed(io.StringIO):
    def write(self, text):
      raise BrokenPipeError

    def fileno(self):
      return spare.fileno()

  with open("spare", "w") as spare:
    monkeypatch.setattr("sys.stdout", Closed())
    assert osd("one")[0] == 141


def test_target_alone_drafts_only_what_can_pay(osd, tmp_path):
  """A new draft knows nothing, and a few tokens do not pay for compiling."""
  (tmp_path / "many.txt").write_text("one\n" * 20)
  target = ["--target", "t"]

  def served(*words, **settings):
    made = osd(*words, *target, **settings)[3]
    return made.pair.config.draft, made.decoding.adaptive is not None

  assert served("one") == ("none", False)
  assert served("one", "--max_new_tokens", "600") == ("cache", True)
  assert served("--file", "many.txt") == ("cache", True)
  assert served(typed="one\n") == ("cache", True)
  assert served("one", "--learn")[0] == ""
  assert served("one", "--draft", "cache") == ("cache", True)
  assert served("one", "--draft", "d") == ("d", False)


@pytest.fixture(params=[False, True])
def hinted(request, lively_pair, tmp_path, monkeypatch, unprepared):
  """Returns options of a target, itself or tuned, and those of the draft that ships."""
  pair = pairs.load_pair(pairs.PairConfig(lively_pair.target, "attached"))
  target, is_copy = lively_pair.target, request.param
  if is_copy:
    tuned = weights.load(target)
    params = jax.tree.map(lambda leaf: leaf * 1.01, tuned.params)
    target = str(tmp_path / "tuned.safetensors")
    weights.save(target, dataclasses.replace(tuned, params=params))
  words = ["--target", target, "--vocabulary", str(lively_pair.path("vocabulary"))]
  pair.save_draft(tmp_path / "shipped" / "own.safetensors", pair.draft_params, "")
  (tmp_path / "shipped" / "topics").symlink_to(assets.FOLDER / "topics")
  monkeypatch.setattr(assets, "FOLDER", tmp_path / "shipped")
  pairs._note.cache_clear()
  options = "--draft shipped:own.safetensors"
  options += " --gin.PairConfig.sibling_draft=True" * is_copy
  return words, options


def test_hint_names_the_options_of_a_shipped_draft(hinted, capsys, caplog):
  words, options = hinted
  words = ["generate", "one", "--max_new_tokens", "4", *words]
  assert cli.main(words) == 0
  assert "ships with this package" in caplog.text
  assert caplog.text.endswith(f"add {options}\n")
  pairs._note.cache_clear()
  caplog.clear()
  assert cli.main([*words, *options.split()]) == 0  # the options do what the hint says
  assert caplog.text == ""


@pytest.mark.parametrize("hinted", [True], indirect=True)
@pytest.mark.parametrize("command", commands.SHORT["draft"].commands)
def test_every_command_hints_at_a_shipped_draft(
  command, hinted, capsys, monkeypatch, tmp_path
):
  def note(text):
    raise base.InputError(text)

  monkeypatch.setattr(pairs, "_note", note)
  monkeypatch.chdir(tmp_path)
  (tmp_path / "log.jsonl").write_text('{"prompt": "one", "text": "two"}\n')
  words, options = hinted
  names = {"online": ["StreamConfig"]}
  names["offline"] = ["corpus/BatchConfig", "evaluation/BatchConfig"]
  lines = [f"include '{file}.gin'" for file in (f"runs/{command}", "tasks/generated")]
  for name in names.get(command, ["BatchConfig"]):
    lines += [f"{name}.tasks = %GENERATED_EVAL"]
  lines += ["OfflineConfig.output = 'd'"] * (command == "offline")
  (tmp_path / "my.gin").write_text("\n".join(lines))
  first = {"generate": ["one"], "advise": ["log.jsonl"], "serve": ["--port", "0"]}
  words = [command, *first.get(command, ["--gin_file=my.gin"]), *words]
  assert cli.main(words) == 2
  assert f"add {options}\n" in capsys.readouterr().err


def test_draft_none_decodes_plainly(capsys):
  answers = []
  for draft in ("none", "cache"):
    words = ["How many films are there?"] * 4
    words += ["--draft", draft, "--format", "jsonl"]
    assert cli.main(["generate", *words]) == 0
    answers.append(list(map(json.loads, capsys.readouterr().out.splitlines())))
  (*_, plain), (*_, drafted) = answers
  assert plain["text"] == drafted["text"]
  assert plain["tokens_per_target_call"] == 1 < drafted["tokens_per_target_call"]


@pytest.mark.parametrize("options", [[], ["--stream"]])
def test_target_that_overflows_exits_with_1(unprepared, capsys, tmp_path, options):
  """Its logits are finite: normalisation turns activations that overflow into zeros."""
  found = weights.load(assets.resolve(pairs.SHIPPED))
  norm = found.params["encoder"]["encoder_norm"]
  norm["scale"] = np.where(np.arange(len(norm["scale"])) == 3, 3.39e38, norm["scale"])
  weights.save(tmp_path / "broken.safetensors", found)
  words = ["--target", str(tmp_path / "broken.safetensors"), "How many?", *options]
  assert cli.main(["generate", *words, "--max_new_tokens", "4"]) == 1
  assert "not finite" in capsys.readouterr().err
