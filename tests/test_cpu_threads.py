"""PartitionConfig.cpu_threads sets the threads per computation when JAX starts."""

import os
import pathlib
import subprocess
import sys

import pytest

from osd_jax import base, sharding

TASKS = pathlib.Path("/proc/self/task")

STARTED = """
import pathlib
import warnings
from osd_jax import sharding
warnings.simplefilter("error")
{before}
partitioner = sharding.make(sharding.PartitionConfig(cpu_threads={threads}))
import jax.numpy as jnp
jnp.ones((512, 512)) @ jnp.ones((512, 512))
{then}
tasks = pathlib.Path("/proc/self/task").iterdir()
print(sum("Eigen" in (task / "comm").read_text() for task in tasks))
"""


# Prints the order in which XLA schedules two independent chains of operations.
TWO_CHAINS = """
import jax
import re
def chains(x, y):
  for _ in range(3):
    x, y = jnp.sin(x) @ x, jnp.tanh(y) @ y
  return x, y
text = jax.jit(chains).lower(*[jnp.ones((64, 64))] * 2).compile().as_text()
print("".join(re.findall(r"%wrapped_(sin|tanh)\\S* =", text.split("ENTRY")[1])))
"""


def pool(
  threads: int | None, before: str = "", then: str = ""
) -> subprocess.CompletedProcess:
  """Runs a process that prints the number of XLA's pool threads."""
  environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC")}
  code = STARTED.format(threads=threads, before=before, then=then)
  command = (sys.executable, "-c", code)
  return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.skipif(not TASKS.exists(), reason="threads are counted in /proc")
def test_computation_uses_the_given_number_of_threads():
  assert int(pool(1).stdout) == 1
  assert int(pool(3).stdout) == 3
  assert int(pool(None).stdout) == len(os.sched_getaffinity(0))


def test_setting_threads_after_jax_has_started_warns():
  done = pool(1, before="import jax; jax.devices()")
  assert done.returncode and "JAX has started already" in done.stderr


def test_with_one_thread_independent_operations_run_in_sequence():
  """In parallel they would wait for the only pool thread, which may run an update."""
  alone, shared = (pool(n, then=TWO_CHAINS).stdout.split()[0] for n in (1, None))
  assert alone in ("sinsinsintanhtanhtanh", "tanhtanhtanhsinsinsin")
  assert sorted(shared) == sorted(alone) != shared


KEPT = """
import jax
jax.config.update("jax_compilation_cache_dir", {folder!r})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
"""


def test_cached_programs_are_separate_for_each_thread_count(tmp_path):
  """A run with one thread must not load the parallel program of two threads."""
  kept = KEPT.format(folder=str(tmp_path))
  orders = [pool(n, kept, TWO_CHAINS).stdout.split()[0] for n in (None, 1, None, 1)]
  assert orders[0] == orders[2] != orders[1] == orders[3]
  assert any(tmp_path.iterdir())


def test_scheduler_set_by_the_user_is_kept():
  chosen = "--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_CONCURRENCY_OPTIMIZED"
  before = f"import os; os.environ['XLA_FLAGS'] = '{chosen}'"
  own = pool(1, before, TWO_CHAINS).stdout.split()[0]
  assert own == pool(None, then=TWO_CHAINS).stdout.split()[0]


def test_environment_variables_are_restored():
  # Handlers run at the end of the process, the last one first.
  code = "import os; os.environ['NPROC'] = '7'; import atexit;"
  code += " atexit.register(lambda: print(os.environ['NPROC']))"
  code += "; atexit.register(lambda: print('XLA_FLAGS' in os.environ))"
  assert pool(1, before=code).stdout.split()[-2:] == ["False", "7"]


def test_zero_threads_are_refused():
  with pytest.raises(base.InputError, match="PartitionConfig.cpu_threads: received 0"):
    sharding.PartitionConfig(cpu_threads=0)
