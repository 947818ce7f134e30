"""The command line: gin files and flags become configs; mistakes become one line."""

import dataclasses
import importlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import types
from unittest import mock

import jax
import made_rows
import pytest
from gin_run import CONFIGS, RUN, complaint, load

from osd_jax import base, runs
from osd_jax import main as cli
from osd_jax.data.batches import BatchConfig
from osd_jax.data.examples import TaskConfig
from osd_jax.distillation.optimizers import OptimizerConfig
from osd_jax.engine.requests import DecodingConfig, SamplingConfig
from osd_jax.main import commands, settings
from osd_jax.models.shapes import T5Config
from osd_tools import pretrain, sizes


def task(name: str, topic: str, split: str = "train") -> TaskConfig:
  return TaskConfig(name=name, pattern=f"{topic}.jsonl", split=split, rows=10)


BY_HAND = pretrain.PretrainConfig(
  model=T5Config(mlp_activations=("gelu", "linear")),
  vocabulary="v.model",
  data=BatchConfig(tasks=(task("m", "maths"), task("s", "sql")), limit_rows=(1, 2)),
  evaluation=BatchConfig(tasks=(task("m", "maths", "eval"),)),
  output="w.safetensors",
  optimizer=OptimizerConfig(warmup_steps=0, schedule="cosine", total_steps=7),
  steps=7,
)


# ---- Configs from gin equal configs from Python


def test_gin_config_equals_the_one_built_in_python(written):
  built = load([written(RUN)])
  assert built == BY_HAND
  assert hash(built) == hash(BY_HAND)
  assert type(built) is pretrain.PretrainConfig
  assert load([written(RUN)], ["STEPS=8"]) != BY_HAND
  assert load([written(RUN)], ["T5Config.width=24"]).model.width == 24
  assert T5Config().width == 512  # bindings do not change the class


def test_flags_override_files_and_later_files_override_earlier(written):
  first = written(RUN)
  second = written("STEPS = 8\nT5Config.width = 24", "second.gin")
  assert load([first, second]).steps == 8
  built = load([first, second], ["STEPS=9", "evaluation/BatchConfig.batch_size=3"])
  assert (built.steps, built.optimizer.total_steps, built.model.width) == (9, 9, 24)
  assert (built.data.batch_size, built.evaluation.batch_size) == (32, 3)


def test_required_does_not_remove_a_value(written):
  template = written(
    "PretrainConfig.output = %gin.REQUIRED\nSTEPS = %gin.REQUIRED", "template.gin"
  )
  run = written(RUN)
  assert load([run, template]) == load([template, run]) == BY_HAND


def test_printed_settings_rebuild_the_config(written):
  library = written(
    "DATA = %gin.REQUIRED\nother/TaskConfig.data_dir = %DATA\nUNUSED = 3", "library.gin"
  )
  run = written(f"include '{library}'\n{RUN}")
  long = "a" * 100 + ' it\'s "quoted" ' + "b" * 100
  flags = ["STEPS=9", "OptimizerConfig.clip_norm=None"]
  flags.append(f"PretrainConfig.output={long!r}")
  config, text = settings.load(pretrain.PretrainConfig, [run], flags)
  again, same = settings.load(pretrain.PretrainConfig, [written(text, "again.gin")])
  assert again == config
  assert same == text
  assert config.output == long
  assert "UNUSED" not in text and "DATA" not in text
  assert "#   PretrainConfig.data.tasks[1].rows = 10" in text.splitlines()


def test_functions_of_imported_modules_make_values(written, tmp_path, monkeypatch):
  (tmp_path / "my_tasks_for_osd.py").write_text(
    "from osd_jax.data.examples import TaskConfig\n"
    "def my_task(name, rows=10):\n"
    "  return TaskConfig(name, pattern='sql.jsonl', rows=rows)\n"
  )
  monkeypatch.syspath_prepend(str(tmp_path))
  run = written(
    RUN
    + "import my_tasks_for_osd\nmy_task.name = 'mine'\nbig/my_task.rows = 99\n"
    + "train/BatchConfig.tasks = [@big/my_task(), @sql/TaskConfig()]"
  )
  config, text = settings.load(pretrain.PretrainConfig, [run])
  assert [(task.name, task.rows) for task in config.data.tasks] == [
    ("mine", 99),
    ("s", 10),
  ]
  again = settings.load(pretrain.PretrainConfig, [written(text, "again.gin")])[0]
  assert again == config


def test_own_parts_are_imported_from_the_current_folder(tmp_path, repository):
  """The files of docs/how_to/extend.md, by a console script, which searches others."""
  page = (repository / "docs" / "how_to" / "extend.md").read_text()
  for name, text in re.findall(r'```\w+ title="(\S+)"\n(.*?)```', page, re.S):
    (tmp_path / name).write_text(text)
  program = (
    "import sys; sys.path.remove(''); from osd_jax import main; sys.exit(main.main())"
  )
  words = ["serve", "--gin_file=mine.gin", "--dry_run"]
  environment = {**os.environ, "PYTHONPATH": str(repository)}
  ran = subprocess.run(
    [sys.executable, "-c", program, *words],
    cwd=tmp_path,
    env=environment,
    capture_output=True,
    text=True,
  )
  assert ran.returncode == 0, ran.stderr
  assert "import myparts\n" in ran.stdout
  assert "LossConfig.divergence = @hellinger\n" in ran.stdout


# ---- Files


def test_search_paths_are_tried_in_order(written, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  written(RUN + "PretrainConfig.seed = 1", "one/models/t5_small.gin")
  written(RUN + "PretrainConfig.seed = 2", "two/models/t5_small.gin")
  name, one, two = "models/t5_small.gin", str(tmp_path / "one"), "two"
  assert load([name], search_paths=[one, two]).seed == 1
  assert load([name], search_paths=[two, one]).seed == 2
  written(RUN + "PretrainConfig.seed = 3", name)
  assert load([name], search_paths=[one]).seed == 3


@pytest.mark.parametrize("prefix", ["", "gin_configs/"])
def test_shipped_gin_files_are_found_from_any_folder(
  written, tmp_path, monkeypatch, prefix
):
  monkeypatch.chdir(tmp_path)
  run = written(f"include '{prefix}models/flan_t5_base.gin'\n{RUN}")
  assert load([run]).model == sizes.size("flan-t5-base")


@pytest.mark.parametrize(
  ("name", "part"),
  [
    ("nowhere.gin", f", {CONFIGS}"),
    ("folder", "is a folder"),
    ("x" * 300, "too long"),
    ("a\0b", "not found"),
    ("run.gin", "includes itself"),
  ],
)
def test_bad_gin_files_are_errors(written, tmp_path, name, part):
  written(f"include '{tmp_path}/run.gin'")
  written("", "folder/x")
  found = complaint([name], search_paths=[str(tmp_path), "here"])
  assert part in found and name[:80].replace("\0", "") in found.replace("\\x00", "")
  if name == "nowhere.gin":  # the searched folders are listed
    assert f"{tmp_path}, {pathlib.Path('here').absolute()}" in found


# ---- Mistakes


@pytest.mark.parametrize(
  ("flag", "parts"),
  [
    ("T5Config.widht=3", ["T5Config.widht", "no field 'widht'", "width"]),
    ("T6Config.width=3", ["'T6Config'", "did you mean T5Config"]),
    ("PretrainConfig.model=@T6Config()", ["@T6Config", "did you mean T5Config"]),
    ("PretrainConfig.seed=%STEP", ["%STEP has no value", "did you mean STEPS"]),
    ("STEP=3", ["no setting uses %STEP", "did you mean STEPS"]),
    ("tran/BatchConfig.seed=3", ["tran/BatchConfig.seed", "@tran/BatchConfig()"]),
    ("STEPS=many", ["cannot read `STEPS=many`: text needs quotes: '\"many\"'"]),
    ("STEPS=[3", ["a bracket is never closed"]),
    ("STEPS=", ["the value is missing"]),
    ("STEPS=3 4", ["Expected newline"]),
    ("include 'x.gin'=3", ["include"]),
    (
      "PretrainConfig.steps='many'",
      ["PretrainConfig.steps: received 'many', expected an integer >= 1"],
    ),
    ("T5Config.width=64.5", ["T5Config.width: received 64.5, expected an integer"]),
    ("PretrainConfig.model=@T5Config", ["PretrainConfig.model", "@T5Config()"]),
    ("PretrainConfig.model=@BatchConfig()", ["BatchConfig.tasks needs a value"]),
    ("PretrainConfig.data=None", ["PretrainConfig.data: received None"]),
    (
      "train/BatchConfig.tasks=(@sql/TaskConfig())",
      ["BatchConfig.tasks", "expected tuple[TaskConfig, ...]", "[x]"],
    ),
    (
      "sql/TaskConfig.preprocessor='sq'",
      ["TaskConfig.preprocessor", "received 'sq'", "'spider'"],
    ),
    ("STEPS=%STEPS", ["circle"]),
  ],
)
def test_error_names_the_wrong_flag(written, flag, parts):
  run = written(RUN)
  found = complaint([run], [flag])
  assert len(found.splitlines()) == 1
  for part in parts:
    assert part in found
  if "circle" not in parts and "BatchConfig.tasks needs a value" not in parts:
    assert f"--gin.{flag}" in found


@pytest.mark.parametrize(
  ("line", "part"),
  [
    ("T5Config.widht = 3", "no field 'widht'"),
    ("T5Config.width = %WIDTH", "%WIDTH"),
    ("T5Config.width 3", "cannot read `T5Config.width 3`: Couldn't parse statement"),
    ("T5Config.width = )", "the value is missing or is not a Python literal"),
    ("tran/BatchConfig.seed = 0", "no effect"),
    ("import no_such_module", "no_such_module"),
    ("from __gin__ import dynamic_registration", "registered already"),
  ],
)
def test_error_names_file_and_line(written, line, part):
  run = written(f"{RUN}\n# comment\n{line}\nT5Config.head_dim = 8\n")
  number = 1 + len(f"{RUN}\n# comment".splitlines())
  found = complaint([run])
  assert f"{run}:{number}" in found
  assert part in found


def test_all_missing_values_are_listed(written):
  assert re.findall(r"^PretrainConfig\.(\w+) needs a value", complaint(), re.M) == [
    field.name
    for field in dataclasses.fields(pretrain.PretrainConfig)
    if field.default is dataclasses.MISSING
  ]
  asked = RUN.replace("STEPS = 7", "STEPS = %gin.REQUIRED")
  asked = asked.replace("  name = 's'\n", "").replace("'w.saf", "%gin.REQUIRED  # '")
  run = written(asked)
  found = complaint([run])
  assert f"--gin.STEPS=VALUE [{run}:2]" in found
  assert f"--gin.PretrainConfig.output=VALUE [{run}:9]" in found
  assert "sql/TaskConfig.name needs a value" in found
  assert len(found.splitlines()) == 3  # STEPS appears once although two fields use it
  assert "--gin.PretrainConfig.data=@BatchConfig()" in complaint()


def test_included_files_may_have_unused_bindings(written):
  library = written("a/TaskConfig.name = 'a'\nb/TaskConfig.name = 'b'", "library.gin")
  run = written(RUN)
  found = complaint([run, library])
  (line,) = found.splitlines()  # one for each file
  assert "a/TaskConfig.name has no effect" in line
  assert load([written(f"include '{library}'\n{RUN}")]) == BY_HAND


def test_open_bracket_is_reported_and_not_the_next_setting(written):
  run = written("T5Config.mlp_activations = ['gelu',\nT5Config.width = 3\n")
  assert f"{run}:2: cannot read `T5Config.width = 3`: a bracket above" in complaint(
    [run]
  )


PROMPTS = BatchConfig(tasks=(task("m", "maths"),), source_length=48)
LONG = dataclasses.replace(PROMPTS, source_length=65)
UNRECORDED = DecodingConfig(record_top_k=0)


@pytest.mark.parametrize(
  ("command", "field", "value"),
  [
    ("online", "decoding", UNRECORDED),
    ("online", "run_directory", ""),
    ("offline", "steps", 0),
    ("offline", "storage", "float16"),
    ("offline", "sample_source", "target"),
    ("offline", "output", ""),
    # Would overwrite the initial draft.
    ("offline", "output", "shipped:demo_attached_draft.safetensors"),
    ("offline", "decoding", UNRECORDED),
    ("offline", "corpus", LONG),
    ("evaluate", "count", 0),
    ("evaluate", "decoding", UNRECORDED),
    ("evaluate", "prompts", LONG),
    ("certify", "sampling", SamplingConfig(temperature=1.0)),
  ],
)
def test_config_of_a_command_names_the_bad_field(command, field, value):
  about = commands.COMMANDS[command]
  config_class = getattr(importlib.import_module(about.module), about.config)
  required = {
    "online": {"stream": lambda vocabulary: None},
    "offline": {"corpus": PROMPTS, "evaluation": PROMPTS, "output": "x"},
  }.get(command, {"prompts": PROMPTS})
  with pytest.raises(base.InputError, match=f"{about.config}.{field}: received") as e:
    config_class(**{**required, field: value})
  assert len(str(e.value)) < 1000


# ---- The command


@pytest.mark.parametrize(
  ("words", "part"),
  [
    (["onlien"], "osd: error: no command is called 'onlien'; did you mean online"),
    (["xyz"], "known: advise, certify"),
    (["online", "--gin.M", "1"], "--gin.M: expected --gin.NAME=VALUE in one word"),
    (["online", "--gin_flie=x"], "osd online: error: unknown option or argument"),
    (["generate", "a", "--temprature", "1"], "'--temprature'; did you mean --temperat"),
    (["convert", "--multihost"], "osd convert: error: unknown option"),
    (["generate", "--multihost"], "an option of osd online"),
    (["convert", "--process_id=0"], "an option of osd online"),
    (["online", "--replicas", "x"], "osd online: error: argument --replicas: invalid"),
    (["compare"], "osd compare: error: the following arguments are required: RUN"),
  ],
)
def test_bad_words_exit_with_2_and_a_suggestion(capsys, words, part):
  with pytest.raises(SystemExit) as stop:
    cli.main(words)
  assert stop.value.code == 2
  assert part in capsys.readouterr().err


@pytest.mark.parametrize("command", commands.COMMANDS)
def test_short_options_are_settings_of_every_command_that_has_them(command):
  """One declaration: the option, its setting and its commands."""
  module = importlib.import_module(commands.COMMANDS[command].module)
  config = getattr(module, commands.COMMANDS[command].config)
  classes = settings.configs(config)
  for name, short in commands.SHORT.items():
    value = {str: "some text", int: 3}[short.kind]
    words = [str(value)] if short.is_positional else [f"--{name}", str(value)]
    if command not in short.commands:
      if not short.is_positional:
        with pytest.raises(SystemExit):
          commands.parse([command, *words])
      continue
    if name == "output":
      words = ["source", *words]
    bindings = commands.bindings_of(commands.parse([command, *words])[0])
    setting = short.setting.format(config=config.__name__)
    assert f"{setting}={value!r}" in bindings
    owner, _, field = setting.partition(".")
    assert setting == "LOG" or field in settings._fields(classes[owner])


def test_short_options_win_over_files_and_need_no_quotes(written, unprepared, capsys):
  file = written("PairConfig.target = 'a'\nServeConfig.port = 1")
  words = ["--target", "it's b", "--port", "8080", "--run_directory", "runs/x"]
  assert cli.main(["serve", f"--gin_file={file}", "--dry_run", *words]) == 0
  text = capsys.readouterr().out
  assert "ServeConfig.port = 8080\n" in text and 'PairConfig.target = "it\'s b"' in text
  assert "ServeConfig.run_directory = 'runs/x'\n" in text
  assert cli.main(["convert", "t5-small", "out.safetensors", "--dry_run"]) == 0
  text = capsys.readouterr().out
  assert "ConvertConfig.output = 'out.safetensors'" in text and "'t5-small'" in text
  assert cli.main(["advise", "log.jsonl", "--dry_run"]) == 0
  assert "LOG = 'log.jsonl'" in capsys.readouterr().out


@pytest.mark.parametrize(
  ("name", "meant"),
  [("runs/dem.gin", "runs/demo.gin"), ("demo.gn", ""), ("/none/x.gin", "")],
)
def test_mistyped_file_is_refused_with_a_suggestion(unprepared, capsys, name, meant):
  assert cli.main(["online", f"--gin_file={name}"]) == 2
  end = f"; did you mean {meant}?" if meant else "."
  line = capsys.readouterr().err.strip().splitlines()[-1]
  assert f"gin file {name!r} not found; looked in" in line and line.endswith(end)


@pytest.mark.parametrize("command", ["certify", "offline"])
def test_missing_file_or_that_of_another_command_is_recognized(
  command, unprepared, capsys, written
):
  assert cli.main(["online"]) == 2
  assert "start from runs/online.gin" in capsys.readouterr().err
  file = written("include 'runs/online.gin'\nStreamConfig.requests_per_task = 3")
  assert cli.main([command, f"--gin_file={file}"]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert "OnlineConfig belongs to `osd online`; run `osd online` instead." in line


def test_help_comes_without_importing_jax_in_less_than_a_second():
  code = "import sys\nfrom osd_jax import main\ntry:\n  main.main(sys.argv[1:])\n"
  code += "finally:\n  print('jax' in sys.modules, file=sys.stderr)"

  def seconds(*words):
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True)
    assert (done.returncode, done.stderr.strip()) == (0, b"False")
    return time.perf_counter() - started

  for words in (["-h"], ["generate", "-h"]):
    assert min(seconds(*words) for _ in range(3)) < 1  # about .1 on an idle machine


@pytest.mark.parametrize(
  "words", [["-h"], *([name, "-h"] for name in commands.COMMANDS)]
)
def test_help_lists_commands_examples_and_notes(words, monkeypatch, capsys):
  monkeypatch.setenv("COLUMNS", "80")
  with pytest.raises(SystemExit, match="0"):
    cli.main(words)
  shown = capsys.readouterr().out
  for part in ("--gin.NAME=VALUE", "--gin_search_paths", "JAX_COMPILATION_CACHE_DIR"):
    assert part in shown
  if words == ["-h"]:
    for name, about in commands.COMMANDS.items():
      assert name in shown and about.summary[:30] in shown
    assert all(f"    {name} " in shown for name in commands.OF_RUNS)
  else:
    assert commands.COMMANDS[words[0]].example in shown
  assert max(map(len, shown.splitlines())) <= 80


@pytest.fixture
def ended(written, unprepared, monkeypatch, capsys):
  """Runs `osd pretrain` with a replaced `run`; returns exit code and standard error."""

  def run(instead, *words):
    monkeypatch.setattr(pretrain, "run", instead)
    code = cli.main(["pretrain", f"--gin_file={written(RUN)}", *words])
    return code, capsys.readouterr().err

  return run


@pytest.mark.parametrize(("exact", "code"), [(True, 0), (False, 1)])
def test_run_receives_the_config_and_its_text(ended, written, exact, code):
  """The exit code is 1 if outputs differ."""
  got = []
  result = runs.RunResult(pathlib.Path("run"), exact)
  flag = "--gin.PretrainConfig.seed=5"
  assert ended(lambda *given: got.extend(given) or result, flag)[0] == code
  config, text = got
  assert config == dataclasses.replace(BY_HAND, seed=5)
  assert load([written(text, "stored.gin")]) == config


def test_dry_run_prints_the_settings_and_runs_nothing(written, unprepared, capsys):
  assert cli.main(["pretrain", f"--gin_file={written(RUN)}", "--dry_run"]) == 0
  printed = capsys.readouterr().out
  assert load([written(printed, "printed.gin")]) == BY_HAND


@pytest.fixture
def default_sigint():
  """Restores the default SIGINT handler, which shells disable in background jobs."""
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  yield
  signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
  ("number", "code", "word"),
  [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)
def test_signals_unwind_the_run_and_print_how_to_continue(
  ended, number, code, word, default_sigint
):
  """Cleanup code, such as writing a checkpoint, runs after both signals."""
  cleaned = []

  def signalled(*_):
    try:
      os.kill(os.getpid(), number)
      time.sleep(30)
    finally:
      cleaned.append(number)

  before = signal.getsignal(signal.SIGTERM)
  found, errors = ended(signalled)
  assert found == code and cleaned == [number]
  (line,) = errors.strip().splitlines()
  assert line.startswith(f"osd pretrain: {word}; the same command continues the run")
  assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("error", [ValueError("a fault"), OSError("a fault")])
def test_bugs_keep_their_traceback(ended, error):
  """Negative control: only the type of an error makes it a user error."""
  with pytest.raises(type(error)):
    ended(mock.Mock(side_effect=error))


@pytest.mark.parametrize("command", ["pretrain", "offline", "convert"])
@pytest.mark.parametrize("path", ["", "file/weights", "."])
def test_unwritable_output_is_refused_before_the_run(
  tmp_path, monkeypatch, command, path
):
  (tmp_path / "file").touch()
  monkeypatch.chdir(tmp_path)
  module = importlib.import_module(commands.COMMANDS[command].module)
  name = commands.COMMANDS[command].config
  config = types.SimpleNamespace(output=path, output_kind="osd")
  named = re.escape(f"{name}.output: received {path!r}, expected a file")
  with pytest.raises(base.InputError, match=named):
    module.run(config)
  for good in ("new.safetensors", "new/folder/new.safetensors"):
    runs.check_output("output", good)


# ---- Reports of runs


def test_reports_are_drawn_from_the_rows_of_runs(tmp_path, capsys):
  for name in ("one", "two"):
    with runs.RunDirectory.start(tmp_path / name) as directory:
      with runs.MetricsLog(directory.metrics_path) as log:
        log.write(made_rows.request())
  one, two, there = (str(tmp_path / name) for name in ("one", "two", "there"))
  assert cli.main(["report", one]) == 0
  assert cli.main(["compare", one, two, "--output", there]) == 0
  errors = capsys.readouterr().err
  for folder in (one, there):
    assert f"report: {folder}/report.html" in errors
    assert (pathlib.Path(folder) / "report.html").is_file()


@pytest.mark.parametrize(
  ("words", "message"),
  [
    (["report", "nowhere"], "RUN: received 'nowhere', expected"),
    (["compare", "a", "b"], "RUN: received 'a', expected"),
    (["report", "run", "--gin.OnlineConfig.seed=1"], "osd report takes no settings"),
  ],
)
def test_report_of_no_run_is_refused(words, message, capsys):
  assert cli.main(words) == 2
  assert message in capsys.readouterr().err


# ---- Documentation of settings


def test_undocumented_field_is_detected():
  """Negative control. Lines of a description are joined."""

  @dataclasses.dataclass(frozen=True)
  class Half:
    """Two fields.

    Attributes:
      one: what it is, said
        in two lines: both.

    More text.
    """

    one: int = 1
    two: int | None = None

  assert commands.documented(Half) == {"one": "what it is, said in two lines: both."}
  described = commands.describe(Half)
  assert "  one: int = 1\n      what it is, said in two lines: both.\n" in described
  assert "  two: int | None = None\n" in described


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_help_config_shows_every_field(name, unprepared, capsys):
  assert cli.main([name, "--help_config"]) == 0
  printed = capsys.readouterr().out
  assert max(map(len, printed.splitlines())) <= 80
  about = commands.COMMANDS[name]
  config = getattr(importlib.import_module(about.module), about.config)
  for name, reached in settings.configs(config).items():
    paragraph = printed.split(f"\n{name}\n")[1].split("\n\n")[1]
    shown = re.findall(r"^  (\w+): ", paragraph, re.M)
    assert shown == list(base.field_types(reached))
    meanings = commands.documented(reached)
    assert meanings.keys() == set(shown) and min(map(len, meanings.values())) >= 4


@pytest.fixture
def jax_updates(monkeypatch) -> list[object]:
  for name in ("COMPILATION_CACHE_DIR", "PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
    monkeypatch.delenv(f"JAX_{name}", raising=False)
  calls: list[object] = []
  monkeypatch.setattr(jax.config, "update", lambda *words: calls.append(words))
  return calls


def test_compilation_cache_is_on_disk_by_default(jax_updates):
  cli._prepare_jax()
  folder = os.path.expanduser("~/.cache/osd_jax/jax")
  assert jax_updates[0] == ("jax_compilation_cache_dir", folder)
  (name, seconds) = jax_updates[1]
  assert name == "jax_persistent_cache_min_compile_time_secs" and 0 < seconds < 1


@pytest.mark.parametrize("folder", ["", "elsewhere"])
def test_environment_variables_override_the_cache(jax_updates, monkeypatch, folder):
  monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", folder)
  monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "5")
  cli._prepare_jax()
  assert jax_updates == []


@pytest.mark.parametrize(("seconds", "said"), [(1.0, True), (0.0, False)])
def test_command_says_that_it_starts_if_importing_takes_long(
  seconds, said, monkeypatch, capsys
):
  """An error in the settings, which is quick, stays a single line."""
  monkeypatch.setattr(cli, "_prepare_jax", lambda: time.sleep(seconds))
  assert cli.main(["online", "--gin_file=missing.gin"]) == 2
  lines = capsys.readouterr().err.splitlines()
  assert ("osd online: starting ..." in lines) == said
  assert len(lines) == 1 + said
