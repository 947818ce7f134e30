"""Settings for all tests: quick compilation, four fake CPU devices, strict JAX."""

import collections
import contextlib
import csv
import gc
import importlib.metadata
import os
import pathlib
import sys
from collections.abc import Callable

ROOT = pathlib.Path(__file__).resolve().parents[1]

# Set before the imports below, because jax and tensorflow read these variables on
# import. Subprocesses inherit them. Tests spend most of their time in XLA's compiler,
# which takes a quarter as long without optimization and with the older emitters.
_DEVICES = "--xla_force_host_platform_device_count"
_FLAGS = {"--xla_cpu_parallel_codegen_split_count": "1", _DEVICES: "4"}
if importlib.metadata.version("jaxlib").startswith("0.10."):  # 0.11.2 aborts with it
  _FLAGS["--xla_cpu_use_fusion_emitters"] = "false"
for _flag, _value in _FLAGS.items():
  if _flag not in (_flags := os.environ.get("XLA_FLAGS", "")):
    os.environ["XLA_FLAGS"] = f"{_flags} {_flag}={_value}".strip()
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".jax_cache" / "tests"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def xla_flags(devices: int) -> str:
  """The flags for a subprocess with this number of devices; the last flag wins."""
  return f"{os.environ['XLA_FLAGS']} {_DEVICES}={devices}"


import jax  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402

# Array annotations are checked in tests only, because the checks take time.
jaxtyping.install_import_hook(
  ["osd_jax.decoding", "osd_jax.distillation"], "checked.typed"
)

jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_numpy_rank_promotion", "raise")


MANY_MAPS = 15_000  # Linux allows a process 65,530


@pytest.fixture(autouse=True, scope="module")
def few_memory_maps():
  """Clears JAX's caches when the process has many memory maps.

  XLA maps memory for every compiled program. Without this, the process reaches the
  limit of Linux and crashes after about a thousand tests.
  """
  yield
  maps = pathlib.Path("/proc/self/maps")
  if maps.exists() and maps.read_text().count("\n") > MANY_MAPS:
    jax.clear_caches()
    gc.collect()


DURATIONS = pathlib.Path(__file__).with_name("durations.csv")  # suite, file, seconds


def pytest_addoption(parser):
  parser.addoption(
    "--suite", help="write the seconds of every test file to runs/durations/SUITE.csv"
  )


# Their tests start processes and share nothing, so all workers take part. Every other
# file stays on one worker, because its tests share compiled programs.
DIVIDED = (
  *("tests/test_docs.py", "tests/test_notebooks.py"),
  "tests/benchmarks/test_programs.py",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
  """Divides some files among the workers; xdist's loadfile divides none."""
  from xdist.scheduler import LoadFileScheduling

  class Scheduling(LoadFileScheduling):
    def _split_scope(self, nodeid):
      file = super()._split_scope(nodeid)
      return nodeid if file in DIVIDED else file

  return Scheduling(config, log)


def pytest_collection_modifyitems(items):
  """Starts the longest files first, so that two workers finish at the same time."""
  seconds: collections.Counter[str] = collections.Counter()
  for row in csv.DictReader(DURATIONS.read_text().splitlines()):
    seconds[row["file"]] += float(row["seconds"])
  items.sort(key=lambda item: -seconds[item.location[0]])


def pytest_terminal_summary(terminalreporter, exitstatus, config):
  """Writes the seconds of a suite that was not interrupted; see `make durations`."""
  suite = config.getoption("--suite")
  if not suite or exitstatus > pytest.ExitCode.TESTS_FAILED:
    return
  seconds: collections.Counter[str] = collections.Counter()
  for reports in terminalreporter.stats.values():
    for report in reports:
      if hasattr(report, "duration"):
        seconds[report.location[0]] += report.duration
  path = ROOT / "runs" / "durations" / f"{suite}.csv"
  path.parent.mkdir(exist_ok=True, parents=True)
  rows = (f"{suite},{file},{spent:.1f}\n" for file, spent in seconds.most_common())
  path.write_text("".join(rows))


@pytest.fixture(scope="session")
def repository() -> pathlib.Path:
  """The root of the checkout."""
  return ROOT


@pytest.fixture(scope="session")
def shared_data() -> pathlib.Path:
  """The real data sets, which are not part of the repository."""
  folder = ROOT.parent / "shared" / "data"
  if not folder.is_dir():
    pytest.skip("real data absent: no folder ../shared/data next to the repository")
  return folder


@pytest.fixture
def priorities():
  """Skips the test unless threads have priorities and there is a second core."""
  from osd_jax import background

  if sys.platform != "linux" or background.cores() < 2:
    pytest.skip("only Linux gives threads priorities, and it takes two cores")


@pytest.fixture(scope="module")
def full_optimization():
  """Compiles with full optimisation, for tests that draw thousands of samples."""
  before = jax.config.read("jax_disable_most_optimizations")
  jax.config.update("jax_disable_most_optimizations", False)
  yield
  jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module")
def lively_pair(tmp_path_factory):
  """Weights files of a tiny pair whose answers have several lengths."""
  import tiny_online

  return tiny_online.save_lively_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(params=["as on a CPU", "as elsewhere"])
def forms(request):
  """Runs the test with the code for one CPU and with the code for other devices."""
  from osd_jax import native

  elsewhere = request.param == "as elsewhere"
  with native.portable(is_split=False) if elsewhere else contextlib.nullcontext():
    assert native.forms() != elsewhere
    yield


@pytest.fixture
def hasty_gate(monkeypatch):
  """Lets a gate decide after two answers, so that short runs have decisions."""
  from osd_jax.distillation import gate

  monkeypatch.setattr(gate, "CAP", 1e-3)
  monkeypatch.setattr(gate, "WINDOW", 2)


@pytest.fixture
def written(tmp_path: pathlib.Path) -> Callable[..., str]:
  """Writes a gin file and returns its path."""

  def write(text: str, name: str = "run.gin") -> str:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(text)
    return str(path)

  return write


@pytest.fixture
def unprepared(monkeypatch):
  """Keeps the test process's own JAX settings."""
  from osd_jax import main as cli

  monkeypatch.setattr(cli, "_prepare_jax", lambda: None)
