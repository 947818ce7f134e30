"""Every gin file of the repository builds, and its comments are true."""

import dataclasses
import importlib
import re

import pytest
from gin_run import CONFIGS, RUN, load

from osd_jax import base, online
from osd_jax import main as cli
from osd_jax.data import examples
from osd_jax.distillation.learner import LearningConfig
from osd_jax.main import commands, settings
from osd_jax.models import weights
from osd_tools import pretrain, sizes

FILES = sorted(str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.gin"))

# Supervised training and a fixed corpus have settings of their own.
OWN = ("optimizer", "update")
# Values for required settings, by field name.
FILLED = {
  "tasks": "[@filled/TaskConfig()]",
  "data": "@filled/BatchConfig()",
  "output": "'filled.output'",
}
LIBRARY = (
  "filled/TaskConfig.name = 'filled'\nfilled/TaskConfig.pattern = 'filled.jsonl'\n"
  "filled/TaskConfig.rows = 4\n"
  "filled/BatchConfig.tasks = [@filled/TaskConfig()]\n"
)


def whole_text(name: str) -> str:
  """Text of a gin file together with the files that it includes."""
  text = (CONFIGS / name).read_text()
  included = re.findall(r"""^include ['"](.+)['"]""", text, re.M)
  return "\n".join([text, *map(whole_text, included)])


def config_class(name: str) -> type | None:
  """The config class of a file's command; None if several commands include the file."""
  for text in ((CONFIGS / name).read_text(), whole_text(name)):  # the file itself first
    for about in commands.COMMANDS.values():
      if re.search(rf"^{about.config}\.", text, re.M):
        return getattr(importlib.import_module(about.module), about.config)
  return None


def filled(root: type, files: list[str]) -> object:
  """Builds a config, filling in every value that the error message requires."""
  flags: dict[str, str] = {}
  for _ in range(5):
    try:
      return settings.load(root, files, [f"{k}={v}" for k, v in flags.items()])[0]
    except settings.ConfigError as error:
      missing = re.findall(r"--gin\.(\S+?)=", str(error))
      if not missing or set(missing) & set(flags):
        raise
      for name in missing:
        flags[name] = FILLED.get(name.rpartition(".")[2], "'filled'")
  raise AssertionError(f"still something to fill: {flags}")


@pytest.mark.parametrize("name", FILES)
def test_every_gin_file_builds_a_config(name, written):
  root = config_class(name)
  text = (CONFIGS / name).read_text()
  assert text.startswith("# ") and "# Required:" in text, "the header is missing"
  library = written(LIBRARY, "library.gin")
  if root is None:  # only included by other files
    parts = (library, "tasks/generated.gin", name, "runs/pretrain.gin")
    whole = "\n".join(f"include '{part}'" for part in parts)
    assert filled(pretrain.PretrainConfig, [written(whole)])
  else:  # listed directly, so that bindings without effect are errors
    assert type(filled(root, [written(f"include '{library}'"), name])) is root


@pytest.mark.parametrize("name", FILES)
def test_comments_name_existing_fields(name):
  fields = {}
  for about in commands.COMMANDS.values():
    module = importlib.import_module(about.module)
    for config_name, reached in settings.configs(getattr(module, about.config)).items():
      fields[config_name] = base.field_types(reached)
  comments = "\n".join(re.findall(r"#.*", (CONFIGS / name).read_text()))
  for config, field in re.findall(r"\b(\w+Config)\.(\w+)", comments):
    assert field in fields[config], f"{config}.{field}"


@pytest.mark.parametrize("command", commands.COMMANDS)
def test_run_files_do_not_change_defaults(command, written):
  """The files name nested configs, which must keep their defaults."""
  name = f"runs/{command}.gin"
  root = config_class(name)
  assert root.__name__ == commands.COMMANDS[command].config
  library = written(LIBRARY, "library.gin")
  config = filled(root, [written(f"include '{library}'"), name])
  for field in dataclasses.fields(root):
    if field.default is not dataclasses.MISSING and field.name not in OWN:
      assert getattr(config, field.name) == field.default, field.name


def test_server_defaults_equal_the_demo():
  config, _ = settings.load(online.OnlineConfig, ["runs/demo.gin"])
  assert config.learning == LearningConfig()


@pytest.mark.parametrize("name", sizes.SIZES)
def test_model_files_equal_the_published_sizes(name, written):
  file = f"models/{name.replace('-', '_').replace('.', '_')}.gin"
  name_of_class = type(sizes.size(name)).__name__
  run = written(RUN.replace("T5Config.mlp_act", "#"))
  flag = f"PretrainConfig.model=@{name_of_class}()"
  assert load([run, file], [flag]).model == sizes.size(name)


def test_task_files_make_the_named_tasks(written):
  run = written(
    "include 'runs/pretrain.gin'\ninclude 'tasks/generated.gin'\n"
    "include 'tasks/jsonl.gin'\nDATA_DIR = 'folder'\n"
    "PretrainConfig.vocabulary = 'v'\nPretrainConfig.output = 'w'\n"
  )
  sets = {}
  for split in ("TRAIN", "EVAL", "STREAM", "SEEN"):
    sets[f"GENERATED_{split}"] = (examples.TOPICS_DIR, examples.TOPICS)
  for name in ("JSONL_TRAIN", "JSONL_EVAL"):
    sets[name] = ("folder", ("gsm8k", "spider", "finance_10k", "python"))
  for name, (folder, labels) in sets.items():
    flags = [f"{scope}/BatchConfig.tasks=%{name}" for scope in ("train", "evaluation")]
    tasks = load([run], flags).data.tasks
    assert {task.label for task in tasks} == set(labels)
    assert {task.data_dir for task in tasks} == {folder}
    assert {task.split for task in tasks} == {name.partition("_")[2].lower()}


def test_tiny_pretraining_repeats_from_its_stored_settings(
  tmp_path, repository, unprepared, capfd, written
):
  paths = {
    "vocabulary": repository / "osd_jax" / "assets" / "demo_vocabulary.model",
    "output": tmp_path / "weights.safetensors",
    "run_directory": tmp_path / "run",
  }
  flags = [f"--gin.PretrainConfig.{name}='{path}'" for name, path in paths.items()]
  words = ["pretrain", "--gin_file=testing/tiny_pretrain.gin", *flags]
  assert cli.main(words) == 0
  printed = "".join("".join(capfd.readouterr()).split())
  assert printed.count(f"rundirectory:{paths['run_directory']}") == 1
  assert weights.load(str(paths["output"])).config.width == 16
  stored = paths["run_directory"] / "operative_config.gin"
  bindings = [flag.removeprefix("--gin.") for flag in flags]
  assert load([str(stored)]) == load(["testing/tiny_pretrain.gin"], bindings)
  # The run is already finished.
  assert cli.main(["pretrain", f"--gin_file={stored}"]) == 0
