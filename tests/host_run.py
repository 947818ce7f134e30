"""Runs an online run as one of several processes, for test_hosts.py.

python host_run.py PAIR_FOLDER RUN_DIRECTORY KIND PORT|cluster PROCESSES PROCESS
"""

import dataclasses
import os
import sys
from pathlib import Path

DEVICES = 4  # of all processes

if __name__ == "__main__":
  folder, directory, kind, port, processes, process = sys.argv[1:]
  count = DEVICES // int(processes)
  # After the flags that compile quickly; the last of two equal flags wins.
  os.environ["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={count}"
  os.environ["JAX_PLATFORMS"] = "cpu"

import tiny_online  # noqa: E402

from osd_jax import (  # noqa: E402
  online,
  pairs,
  sharding,
)


def config(pair, directory, kind):
  """16 requests and 4 updates on a mesh of two by two devices.

  Only with an attached draft are some of them compared with plain decoding.
  """
  if kind == "attached":
    pair = tiny_online.attached(pair)
  made = tiny_online.config(pair, directory)
  return dataclasses.replace(
    made,
    pair=pair,
    partition=sharding.PartitionConfig(2, 2),
    stream=dataclasses.replace(made.stream, requests_per_task=4),
    warm_start=None,
    measure_costs=False,
    compare_every=8 if kind == "attached" else 0,
  )


def main():
  if port == "cluster":
    sharding.join()  # the environment holds all arguments
  elif int(processes) > 1:
    sharding.join(f"localhost:{port}", int(processes), int(process))
  files = {
    name: str(Path(folder) / f"{name}.safetensors") for name in ("target", "draft")
  }
  pair = pairs.PairConfig(**files)
  online.run(config(pair, Path(directory), kind))


if __name__ == "__main__":
  main()
