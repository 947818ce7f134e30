"""Runs the other commands as one of several processes, for test_hosts.py.

python host_commands.py FOLDER PORT PROCESSES PROCESS
"""

import os
import sys
from pathlib import Path

DEVICES = 4  # of all processes
CERTIFY = """
include "runs/certify.gin"
include "tasks/generated.gin"
GENERATED_EVAL_ROWS = 6
BatchConfig.tasks = [@maths/eval/TaskConfig()]
CertifyConfig.count = 6
CertifyConfig.num_draft_tokens = (3,)
CertifyConfig.rows = (2,)
DecodingConfig.target_length = 16
"""


def commands(folder: Path):
  """Yields commands that train a model, distil it into itself, evaluate and certify."""
  made = f"'{folder / 'model.safetensors'}'"
  mesh = {"PartitionConfig.data": 2, "PartitionConfig.model": 2}
  pair = {"PairConfig.target": made, "PairConfig.draft": made, "DecodingConfig.rows": 2}
  distilled = f"'{folder / 'draft.safetensors'}'"
  settings = {
    "pretrain": {"PretrainConfig.output": made},
    "offline": {**pair, "OfflineConfig.output": distilled},
    "evaluate": {**pair, "EvaluateConfig.speed_requests": 0},
    "certify": pair,
  }
  for name, bound in settings.items():
    path = folder / f"{name}.gin"
    included = f'include "testing/tiny_{name}.gin"' if name != "certify" else CERTIFY
    directory = {f"{name.capitalize()}Config.run_directory": f"'{folder / name}'"}
    lines = [f"{k} = {v}" for k, v in {**bound, **mesh, **directory}.items()]
    path.write_text("\n".join([included, *lines]) + "\n")
    yield [name, f"--gin_file={path}"]


def main(folder, port, processes, process):
  # After the flags that compile quickly; the last of two equal flags wins.
  os.environ["XLA_FLAGS"] += (
    f" --xla_force_host_platform_device_count={DEVICES // int(processes)}"
  )
  os.environ["JAX_PLATFORMS"] = "cpu"

  from osd_jax import main as cli
  from osd_jax import sharding

  if int(processes) > 1:
    sharding.join(f"localhost:{port}", int(processes), int(process))
  for words in commands(Path(folder)):
    if cli.main(words):
      sys.exit(f"{words} failed")


if __name__ == "__main__":
  main(*sys.argv[1:])
