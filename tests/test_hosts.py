"""Two processes serve and learn like one process with the devices of both."""

import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from osd_jax import main as cli
from osd_jax import runs

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parent
RUN, COMMANDS = "host_run.py", "host_commands.py"
PATIENCE = 240


def free_port():
  with socket.socket() as found:
    found.bind(("localhost", 0))
    return found.getsockname()[1]


def step_of_slurm(processes, number):
  """The environment of a Slurm task; the port follows from the job id."""
  return {
    "SLURM_JOB_ID": str(os.getpid()),
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_NTASKS": str(processes),
    "SLURM_PROCID": str(number),
    "SLURM_LOCALID": "0",
  }


def job_of_open_mpi(processes, number):
  """The environment of an mpirun process; the port also follows from the job id."""
  return {
    "OMPI_MCA_orte_hnp_uri": f"{os.getpid() << 12}.0;tcp://127.0.0.1:1",
    "OMPI_COMM_WORLD_SIZE": str(processes),
    "OMPI_COMM_WORLD_RANK": str(number),
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
  }


def started(script, *words, processes=2, cluster=None):
  """Starts the processes of a script; they find each other by `cluster` or a port."""
  port = "cluster" if cluster else free_port()
  return [
    subprocess.Popen(
      [sys.executable, *map(str, (TESTS / script, *words, port, processes, number))],
      env=os.environ | (cluster(processes, number) if cluster else {}),
      cwd=TESTS.parent,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    for number in range(processes)
  ]


def finished(running):
  """Waits for all processes; prints their output if one failed."""
  printed = [process.communicate(timeout=PATIENCE)[0] for process in running]
  codes = [process.returncode for process in running]
  assert not any(codes), f"{codes}\n" + "\n".join(printed)


def served(directory):
  lines = (directory / "outputs.jsonl").read_text().splitlines()
  return [json.loads(line)["text"] for line in lines]


def learnt(directory):
  rows = runs.read(directory / "metrics.jsonl")
  return [(row["version"], row["loss"]) for row in rows if row["kind"] == "update"]


@pytest.fixture(scope="module")
def folder(lively_pair):
  return Path(lively_pair.target).parent


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
  """Runs one process with all devices, once for each kind of draft."""

  @functools.cache
  def run(kind):
    directory = tmp_path_factory.mktemp(kind) / "run"
    finished(started(RUN, folder, directory, kind, processes=1))
    assert len(served(directory)) == 16 and len(learnt(directory)) > 2
    return directory

  return run


def kill(running, victim, directory):
  """Kills a process after the first checkpoint; the other must end within a minute."""
  until = time.monotonic() + PATIENCE
  while not list((directory / "checkpoints").glob("[0-9]*")):
    assert time.monotonic() < until and running[victim].poll() is None
    time.sleep(0.05)
  running[victim].send_signal(signal.SIGKILL)
  killed = time.monotonic()
  printed, _ = running[1 - victim].communicate(timeout=PATIENCE)
  assert time.monotonic() - killed < 60
  assert running[1 - victim].returncode, printed
  assert re.search("heartbeat|UNAVAILABLE|connection|closed", printed, re.IGNORECASE)
  assert not (directory / "draft.safetensors").exists()


def test_loss_of_the_first_process_ends_the_other(folder, tmp_path):
  run = tmp_path / "run"
  kill(started(RUN, folder, run, "independent"), 0, run)


@pytest.mark.parametrize(
  ("kind", "cluster", "is_killed"),
  [("attached", step_of_slurm, False), ("independent", job_of_open_mpi, True)],
)
def test_two_processes_give_the_outputs_and_updates_of_one(
  alone, folder, tmp_path, kind, cluster, is_killed
):
  """Also if the second is killed and the run is started again."""
  expected, directory = alone(kind), tmp_path / "run"
  if is_killed:
    kill(started(RUN, folder, directory, kind), 1, directory)
  finished(started(RUN, folder, directory, kind, cluster=cluster))
  other = tmp_path / "run.process_1"
  assert served(directory) == served(other) == served(expected)
  np.testing.assert_allclose(learnt(directory), learnt(expected), atol=1e-5)
  assert learnt(other) == learnt(directory)
  # Both processes write their checkpoints into the folder of the first.
  assert not (other / "checkpoints").exists()
  for step in (directory / "checkpoints").glob("[0-9]*"):
    wrote = {path.name for path in step.glob("**/ocdbt.process_*")}
    assert wrote == {"ocdbt.process_0", "ocdbt.process_1"}
  one, two = (path / "draft.safetensors" for path in (directory, expected))
  one, two = (safetensors.numpy.load_file(path) for path in (one, two))
  assert one.keys() == two.keys()
  for name, tensor in one.items():
    np.testing.assert_allclose(tensor, two[name], atol=1e-4)


@pytest.mark.release
def test_other_commands_in_two_processes_match_one(tmp_path):
  """Pretraining, distillation, evaluation and certificate give equal results."""
  folders = {count: tmp_path / str(count) for count in (1, 2)}
  for count, folder in folders.items():
    folder.mkdir()
    finished(started(COMMANDS, folder, processes=count))
  alone, together = folders.values()
  for name in ("model", "draft"):
    one, two = (
      safetensors.numpy.load_file(folder / f"{name}.safetensors")
      for folder in folders.values()
    )
    assert one.keys() == two.keys()
    for key, tensor in one.items():
      np.testing.assert_allclose(tensor, two[key], atol=1e-4)
  for name in ("pretrain", "offline", "evaluate"):
    one, two, other = (
      figures(folder)
      for folder in (alone / name, together / name, together / f"{name}.process_1")
    )
    assert len(one) == len(two) == len(other) > 0
    np.testing.assert_allclose(one, two, atol=1e-4)
    np.testing.assert_allclose(two, other, atol=1e-6)
  for folder in folders.values():
    verdict = json.loads((folder / "certify" / "certificate.json").read_text())
    assert verdict["equal"] == verdict["outputs"] == 6


def figures(directory):
  """Returns losses and held-out metrics of a run."""
  found = []
  for row in runs.read(directory / "metrics.jsonl"):
    if row["kind"] == "step":
      found.append(row["loss"])
    for task in row.get("tasks", {}).values() if row["kind"] == "evaluation" else ():
      found += [value for key, value in sorted(task.items()) if key != "rows"]
    if "distribution_overlap" in row:
      found.append(row["distribution_overlap"])
  return found


@pytest.mark.parametrize("words", ["--num_processes 2", "--process_id=0"])
def test_incomplete_process_options_are_refused(words, unprepared, capsys):
  assert cli.main(["online", *words.split()]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert "expected all three, or --multihost" in line
