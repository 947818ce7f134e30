"""The package: imports, optional packages, the wheel, pins and forbidden content."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from typing import Any

import pytest
import safetensors
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import osd_jax
from osd_jax import assets
from osd_jax.models import weights

OPTIONAL = (
  "gin",
  "matplotlib",
  "seqio",
  "tensorboardX",
  "tensorflow",
  "tensorflow_datasets",
  "tensorflow_text",
  "torch",
  "transformers",
)


def without(names: tuple[str, ...]) -> str:
  """Python code that hides packages: no finder of the import system finds them."""
  return f"""
import sys

class Without:
  def __init__(self, finder):
    self._finder = finder

  def __getattr__(self, name):
    return getattr(self._finder, name)

  def find_spec(self, name, path=None, target=None):
    if name.partition(".")[0] in {names!r}:
      return None
    return self._finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""


BLOCK = without(OPTIONAL)

IMPORT_CORE = (
  BLOCK
  + """
import importlib, json, pkgutil
import osd_jax
from osd_jax import assets
from osd_jax.models import weights

NOT_CORE = ("osd_jax.main",)
names = [m.name for m in pkgutil.walk_packages(osd_jax.__path__, "osd_jax.")]
core = [n for n in names if n not in NOT_CORE]
for name in core:
  importlib.import_module(name)
print(json.dumps(core))
"""
)
TRY_ALL = """
import importlib
for name in {names!r}:
  try:
    importlib.import_module(name)
    print(name)
  except ModuleNotFoundError as error:
    assert error.name == name, error
"""

SPECIFIC = re.compile(
  "|".join(
    [
      "py" + r"pi\.org",
      "python" + r"hosted\.org",
      "index" + "-url",
      "find" + "-links",
      "trusted" + "-host",
      r"[a-z]+://[^\s/@]+:[^\s/@]+@",  # a password in a URL
      r"(?<![\w.~-])/(?:root|work|tmp/pip)[-/]",  # a path of one machine
    ]
  )
)


def check_call(words: Sequence[str], **changes: Any) -> str:
  """Runs a command that must exit with 0; returns its output."""
  done = subprocess.run(
    words, capture_output=True, text=True, timeout=900, check=False, **changes
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


def run_python(code: str, *arguments: str, **changes: Any) -> str:
  return check_call([sys.executable, "-c", code, *arguments], **changes)


@pytest.fixture(scope="module")
def project(repository: pathlib.Path) -> dict:
  return tomllib.loads((repository / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def pins(repository: pathlib.Path) -> dict[str, str]:
  pins = {}
  for line in (repository / "constraints.txt").read_text().splitlines():
    if line and not line.startswith("#"):
      requirement = Requirement(line)
      (specifier,) = requirement.specifier
      assert specifier.operator == "==", line
      pins[canonicalize_name(requirement.name)] = specifier.version
  return pins


@pytest.fixture(scope="module")
def tracked_texts(repository: pathlib.Path) -> dict[str, str]:
  listed = subprocess.run(
    ["git", "ls-files", "-z"], cwd=repository, capture_output=True, check=False
  )
  if listed.returncode:
    pytest.skip("not a git checkout, so no list of the files that are published")
  texts = {}
  for name in filter(None, listed.stdout.decode().split("\0")):
    file = repository / name
    content = file.read_bytes() if file.is_file() else b""
    if b"\0" not in content[:8192]:
      texts[name] = content.decode(errors="replace")
  return texts


def test_core_modules_import_without_the_optional_packages():
  core = json.loads(run_python(IMPORT_CORE))
  assert "osd_jax.base" in core


def test_blocked_packages_cannot_be_imported():
  """Negative control of the test above: the packages are hidden, though installed."""
  assert run_python(BLOCK + TRY_ALL.format(names=OPTIONAL)) == ""
  assert run_python(TRY_ALL.format(names=("gin",))).strip() == "gin"


# ---- The wheel, in an environment with its required dependencies only

DEMO = (  # eight requests of the demo with updates; small, so that little is compiled
  "--gin_file=runs/demo.gin",
  "--gin.StreamConfig.requests_per_task=2",
  "--gin.warm_start/BatchConfig.limit_rows=(2, 2, 2, 2)",
  "--gin.DecodingConfig.source_lengths=(32,)",
  "--gin.OnlineConfig.measure_costs=False",
  "--gin.DecodingConfig.num_draft_tokens=2",
  "--gin.DecodingConfig.target_length=32",
  "--gin.OnlineConfig.compare_every=0",
)
PROMPT = "What is the average price of hotels with country 'Italy'?"
ASK_SERVER = f"""set -e
osd serve --port 0 2> log &
until url=$(grep -o 'http://.*' log); do kill -0 $!; sleep 0.1; done
curl -s $url/v1/completions -H 'Content-Type: application/json' \\
  -d "{{\\"prompt\\": \\"{PROMPT}\\", \\"temperature\\": 0}}"
kill $!; wait $!"""
README = pathlib.Path(__file__).resolve().parents[1] / "README.md"
(README_LINES,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)
TINY = (
  "--gin_file=testing/tiny_pretrain.gin",
  "--gin.PretrainConfig.vocabulary='shipped:demo_vocabulary.model'",
  "--gin.PretrainConfig.output='tiny.safetensors'",
)
# Commands of a new user, and what they print or write.
COMMANDS = (
  (("osd", "--version"), osd_jax.__version__),
  (("osd", "online", *DEMO), "runs/demo/report.html"),
  (("osd", "certify", "--help_config"), "num_draft_tokens"),
  (("osd", "generate", PROMPT, "--learn"), "SELECT AVG(price)"),
  (("osd", "pretrain", *TINY), "tiny.safetensors"),  # of osd_tools
  (("python", "-c", README_LINES), "SELECT AVG(rating), SUM(price)"),
)


def copy_parts(
  repository: pathlib.Path, names: Sequence[str], folder: pathlib.Path
) -> None:
  for name in names:
    if (repository / name).is_dir():
      ignored = shutil.ignore_patterns("__pycache__")
      shutil.copytree(repository / name, folder / name, symlinks=True, ignore=ignored)
    else:
      shutil.copy(repository / name, folder / name)


def new_environment(folder: pathlib.Path, **changes: str) -> dict[str, str]:
  """Makes an environment, and returns the variables that commands in it need."""
  check_call([sys.executable, "-m", "venv", str(folder)])
  path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
  ours = {key: x for key, x in os.environ.items() if key != "PYTHONPATH"}
  return {**ours, "PATH": path, **changes}


@pytest.fixture(scope="module")
def installed(repository: pathlib.Path, tmp_path_factory) -> pathlib.Path:
  """A folder with a wheel, which was built from a source archive, and what it holds."""
  folder = tmp_path_factory.mktemp("wheel")
  source = folder / "source"
  folders = ("osd_jax", "osd_serve", "osd_tools", "gin_configs")
  copy_parts(repository, (*folders, "pyproject.toml", "README.md", "LICENSE"), source)
  code = "import setuptools.build_meta as b, sys; b.build_sdist(sys.argv[1])"
  run_python(code, str(folder), cwd=source)
  (archive,) = folder.glob("*.tar.gz")
  pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
  here = ["--no-index", "--no-deps", "--no-cache-dir", "--no-build-isolation"]
  built = check_call([*pip, "wheel", *here, "-v", "-w", str(folder), str(archive)])
  assert "Warning:" not in built  # of setuptools
  (wheel,) = folder.glob("*.whl")
  check_call([*pip, "install", *here[:2], "-q", "-t", str(folder / "site"), str(wheel)])
  return folder


@pytest.fixture(scope="module")
def environment(installed: pathlib.Path, repository: pathlib.Path) -> dict[str, str]:
  """Variables for a new environment with the wheel and its required dependencies."""
  pins = str(repository / "constraints.txt")
  variables = new_environment(installed / "new", PIP_CONSTRAINT=pins, PIP_QUIET="1")
  (wheel,) = installed.glob("*.whl")
  check_call(["pip", "install", str(wheel)], env=variables, cwd=installed)
  return variables


def test_wheel_contains_the_gin_files(
  installed: pathlib.Path, repository: pathlib.Path
):
  def texts(folder):
    return {
      str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.gin")
    }

  ours = texts(repository / "gin_configs")
  assert len(ours) > 40
  assert texts(installed / "site" / "osd_jax" / "gin_configs") == ours


@pytest.mark.slow
@pytest.mark.parametrize(("words", "result"), COMMANDS, ids=lambda x: str(x)[:40])
def test_wheel_runs_without_extras(
  environment: dict[str, str], tmp_path: pathlib.Path, words, result
):
  printed = check_call(words, cwd=tmp_path, env=environment)
  assert result in printed or (tmp_path / result).is_file()
  assert (tmp_path / "adapted_draft.safetensors").is_file() == ("--learn" in words)


@pytest.mark.slow
def test_error_of_osd_serve_names_the_command_that_adds_its_extra(
  environment: dict[str, str], tmp_path: pathlib.Path
):
  """All three packages come with the wheel; `osd serve` then needs its extra."""
  place = {"cwd": tmp_path, "env": environment}
  code = "import osd_jax as j, osd_serve as s, osd_tools as t; print(j, s, t)"
  printed = check_call(["python", "-c", code], **place)
  assert printed.count("new/lib/") == 3, printed
  refused = subprocess.run(["osd", "serve"], capture_output=True, text=True, **place)
  line = refused.stderr.strip().removeprefix("osd serve: starting ...").strip()
  command = re.fullmatch(r"osd serve: .* needs \w+; (pip install \"\S+\").*", line)
  assert refused.returncode == 2 and command is not None, refused.stderr
  check_call(["bash", "-c", command[1]], **place)
  answer = json.loads(check_call(["bash", "-c", ASK_SERVER], **place))
  assert "SELECT AVG(price)" in answer["choices"][0]["text"]


@pytest.mark.release
def test_container_installs_the_package_and_its_extras(
  environment: dict[str, str], repository: pathlib.Path, tmp_path: pathlib.Path
):
  """Runs the pip command of the Dockerfile, from its files."""
  text = (repository / "Dockerfile").read_text()
  (command,) = re.findall(r"^RUN (pip install .*)", text, flags=re.M)
  (extras,) = re.findall(r"^ARG EXTRAS=(.*)", text, flags=re.M)
  copied = re.findall(r"^!(.*)", (repository / ".dockerignore").read_text(), re.M)
  (tmp_path / "copied").mkdir()
  copy_parts(repository, copied, tmp_path / "copied")
  check_call(["pip", "uninstall", "-y", "osd_jax"], env=environment)
  place = {"cwd": tmp_path, "env": {**environment, "EXTRAS": extras}}
  check_call(["bash", "-c", f"cd copied && {command}"], **place)
  code = "import osd_jax.main, osd_serve.app, osd_tools.gguf, transformers, gguf"
  check_call(["python", "-c", code], **place)
  assert "  host: str" in check_call(["osd", "serve", "--help_config"], **place)


# ---- Import time, version and pins


def test_importing_the_package_imports_nothing_heavy():
  heavy = ("jax", "flax", "numpy", *OPTIONAL)
  code = f"import osd_jax, sys; print([n for n in {heavy!r} if n in sys.modules])"
  assert run_python(code).strip() == "[]"


def test_import_is_not_slower_than_jax_and_flax():
  def seconds(statement: str) -> float:
    code = "import time; start = time.perf_counter()"
    return float(run_python(f"{code}\n{statement}\nprint(time.perf_counter() - start)"))

  rounds = [(seconds("import jax, flax"), seconds("import osd_jax")) for _ in range(2)]
  libraries, package = map(min, zip(*rounds, strict=True))
  assert package <= libraries + 0.3


def test_version_equals_the_project_version(project: dict, repository):
  assert osd_jax.__version__ == project["version"]
  cited = (repository / "CITATION.cff").read_text()
  assert f"\nversion: {project['version']}\n" in cited


def test_every_dependency_is_pinned_within_its_range(project: dict, pins: dict):
  extras = project["optional-dependencies"]
  accelerators = {"gpu", "tpu"}  # their pins depend on the machine
  listed = project["dependencies"] + [
    line for name in extras.keys() - accelerators for line in extras[name]
  ]
  for requirement in map(Requirement, listed):
    name = canonicalize_name(requirement.name)
    assert name in pins, f"constraints.txt has no pin for {name}"
    assert pins[name] in requirement.specifier, f"{name}: {pins[name]}"


def test_texts_name_extras_that_exist_in_one_quoted_command(
  project: dict, tracked_texts: dict[str, str]
):
  """Shells such as zsh expand brackets, so a command that is copied needs quotes."""
  commands = [
    (name, *words)
    for name, text in tracked_texts.items()
    for words in re.findall(r"""(.{13})osd[-_]jax\[([^\]]*)\](.)""", text)
    if not name.startswith(("tests/", "notebooks/", "pyproject"))
  ]
  assert len(commands) >= 5
  extras = {*project["optional-dependencies"], "{name}"}
  for name, before, extra, after in commands:
    assert (before, after) == ('pip install "', '"') and extra in extras, name


def test_published_files_name_no_package_index_or_machine(
  tracked_texts: dict[str, str],
):
  found = {
    name: match.group()
    for name, text in tracked_texts.items()
    if (match := SPECIFIC.search(text))
  }
  assert not found


def test_the_linter_reads_every_file(repository, tracked_texts):
  """A folder that shares its name with an ignored one would be left out."""
  command = [sys.executable, "-m", "ruff", "check", "--show-files"]
  found = subprocess.run(command, cwd=repository, capture_output=True, check=True)
  read = set(found.stdout.decode().splitlines())
  code = [path for path in tracked_texts if pathlib.Path(path).suffix == ".py"]
  assert code and [path for path in code if str(repository / path) not in read] == []


@pytest.mark.parametrize(
  "text",
  [
    "https://" + "py" + "pi.org/simple",
    "--extra-" + "index" + "-url=x",
    "https://user:" + "word@host/simple",
    "see /" + "work/main/x",
  ],
)
def test_search_finds_planted_names(text: str):
  assert SPECIFIC.search(text)


def test_shipped_weights_take_at_most_40_mib():
  """40 MiB for all files, which every wheel and every clone contains."""
  folder = pathlib.Path(osd_jax.__file__).parent / "assets"
  size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
  assert 8 << 20 < size <= 40 << 20


@pytest.mark.parametrize("size", ["0_5b", "1_5b"])
def test_draft_for_a_published_model_names_it_and_takes_at_most_8_mb(size: str):
  path = assets.resolve(f"shipped:qwen2_5_coder_{size}_draft.safetensors", "draft")
  assert path.stat().st_size <= 8e6
  with safetensors.safe_open(path, "numpy") as file:
    target = file.metadata()["target_name"]
  assert target == f"Qwen2.5-Coder-{size.replace('_', '.').upper()}-Instruct"
  assert weights.shape_of(path).reads == "tokens"
