"""PartitionConfig.cpu_threads sets the threads per computation when JAX starts."""

import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys

import pytest

from osd_jax import base, sharding

# Prints the number of XLA's pool threads, and the order in which XLA schedules two
# independent chains of operations. The handler runs at the end of the process, after
# the environment was restored.
PROGRAM = """
import atexit, json, os, pathlib, re, warnings
from osd_jax import sharding
warnings.simplefilter("error")
{before}
found = {{}}
atexit.register(lambda: print(json.dumps(found)))
partitioner = sharding.make(sharding.PartitionConfig(cpu_threads={threads}))
import jax
import jax.numpy as jnp
def chains(x, y):
  for _ in range(3):
    x, y = jnp.sin(x) @ x, jnp.tanh(y) @ y
  return x, y
text = jax.jit(chains).lower(*[jnp.ones((64, 64))] * 2).compile().as_text()
jnp.ones((512, 512)) @ jnp.ones((512, 512))
tasks = pathlib.Path("/proc/self/task")
names = [(t / "comm").read_text() for t in tasks.iterdir()] if tasks.exists() else []
scheduled = re.findall(r"%wrapped_(sin|tanh)\\S* =", text.split("ENTRY")[1])
found["order"] = "".join(scheduled)
found["pool"] = sum("Eigen" in name for name in names)
found["flags"], found["cores"] = (os.environ.get(n) for n in ("XLA_FLAGS", "NPROC"))
"""


@dataclasses.dataclass
class Found:
  order: str
  pool: int
  flags: str | None
  cores: str | None


@functools.cache
def started(threads: int | None, before: str = "") -> Found:
  """What a new process prints that sets this number of threads."""
  environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC")}
  words = [sys.executable, "-c", PROGRAM.format(threads=threads, before=before)]
  done = subprocess.run(words, capture_output=True, text=True, env=environment)
  assert not done.returncode, done.stderr
  return Found(**json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.skipif(
  not pathlib.Path("/proc/self/task").exists(), reason="threads are counted in /proc"
)
def test_computation_uses_the_given_number_of_threads():
  cores = len(os.sched_getaffinity(0))
  assert [started(n).pool for n in (1, 3, None)] == [1, 3, cores]


def test_setting_threads_after_jax_has_started_warns():
  with pytest.raises(AssertionError, match="JAX has started already"):
    started(1, "import jax; jax.devices()")


def test_with_one_thread_independent_operations_run_in_sequence():
  """In parallel they would wait for the only pool thread, which may run an update."""
  alone, shared = started(1).order, started(None).order
  assert alone in ("sinsinsintanhtanhtanh", "tanhtanhtanhsinsinsin")
  assert sorted(shared) == sorted(alone) and shared != alone


def test_cached_programs_are_separate_for_each_thread_count(tmp_path):
  """A run with one thread must not load the parallel program of two threads."""
  kept = f"""
import jax
jax.config.update("jax_compilation_cache_dir", {str(tmp_path)!r})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
"""
  assert started(None, kept).order == started(None).order
  assert any(tmp_path.iterdir())
  assert started(1, kept).order == started(1).order != started(None).order


def test_environment_of_the_user_is_kept():
  flags = "--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_CONCURRENCY_OPTIMIZED"
  found = started(1, f"os.environ |= {{'XLA_FLAGS': '{flags}', 'NPROC': '7'}}")
  # The user's scheduler is used, and the changes for the start are taken back.
  assert found.order == started(None).order
  assert (found.flags, found.cores) == (flags, "7")
  assert (started(1).flags, started(1).cores) == (None, None)


def test_zero_threads_are_refused():
  with pytest.raises(base.InputError, match="PartitionConfig.cpu_threads: received 0"):
    sharding.PartitionConfig(cpu_threads=0)
