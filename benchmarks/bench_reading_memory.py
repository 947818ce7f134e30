"""What reading a Hugging Face checkpoint takes in memory: its own size and one tensor.

Makes a T5 1.1 of about --gigabytes of float32 in a temporary folder (or bfloat16, and
in shards), reads it in a process of its own and prints one JSON line: growth of that
process's peak memory over its peak before reading, against the size of the model in
float32 and of its largest tensor. `slack` is what is left over, in largest tensors.

  python benchmarks/bench_reading_memory.py [--gigabytes 1] [--dtype bfloat16]
"""

import argparse
import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile

import measure
import ml_dtypes
import numpy as np
import safetensors.flax

from osd_jax.models import convert, t5, tensors
from osd_jax.models.convert import hugging_face

# Linux keeps the peak of resident memory as VmHWM, mapped pages of files included.
READ = """
import json, sys
import jax
import jax.numpy as jnp
from osd_jax.models import convert

def peak():
  lines = open("/proc/self/status").read().splitlines()
  fields = dict(line.split(":", 1) for line in lines)
  return int(fields["VmHWM"].split()[0]) * 1024

convert.read_hugging_face(sys.argv[1])  # a tiny one: what any reading takes
before = peak()
weights = convert.read_hugging_face(sys.argv[2])
grown = peak() - before
size = sum(leaf.nbytes for leaf in jax.tree.leaves(weights.params))
print(json.dumps({"grown": grown, "model": size}))
"""


def shape(gigabytes: float) -> t5.T5Config:
  """A T5 1.1 of about that size in float32, its largest tensor a tenth of it."""
  width = max(16, int((gigabytes * 1e9 / 240) ** 0.5) // 16 * 16)
  return t5.T5Config(
    vocab_size=6 * width,
    width=width,
    num_heads=max(1, width // 64),
    head_dim=64 if width >= 64 else width,
    mlp_dim=2 * width,
    num_encoder_layers=2,
    num_decoder_layers=2,
    mlp_activations=("gelu", "linear"),
    tied_head=False,
  )


def write(folder: pathlib.Path, config: t5.T5Config, dtype: str, shards: int) -> int:
  """Writes a made-up checkpoint; returns the bytes of its largest tensor, float32."""
  rng = np.random.default_rng(0)
  names = {}
  for path, size in tensors.expected_shapes(config).items():
    name = hugging_face.tensor_name(path, config)
    names[name] = hugging_face.file_shape(path, size, config)
  kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
  folder.mkdir()
  fields = convert.config_to_hugging_face(config)
  (folder / "config.json").write_text(json.dumps(fields))
  files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
  files = files if shards > 1 else ["model.safetensors"]
  for index, file in enumerate(files):
    drawn = {
      name: rng.standard_normal(names[name], np.float32).astype(kind)
      for name in list(names)[index :: len(files)]
    }
    safetensors.flax.save_file(drawn, folder / file)
  if shards > 1:
    places = {name: files[i % shards] for i, name in enumerate(names)}
    index_file = folder / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"weight_map": places}))
  return 4 * max(int(np.prod(size)) for size in names.values())


def read(folder: pathlib.Path, gigabytes: float, dtype: str, shards: int) -> dict:
  """Makes both checkpoints, reads them in another process, and compares."""
  config = shape(gigabytes)
  largest = write(folder / "large", config, dtype, shards)
  tiny = dataclasses.replace(config, width=16, vocab_size=64, mlp_dim=32)
  write(folder / "tiny", tiny, dtype, shards)
  done = subprocess.run(
    [sys.executable, "-c", READ, str(folder / "tiny"), str(folder / "large")],
    capture_output=True,
    text=True,
    check=True,
  )
  found = json.loads(done.stdout.splitlines()[-1])
  files = (folder / "large").glob("*.safetensors")
  slack = found["grown"] - found["model"] - largest
  return {
    "file_bytes": sum(file.stat().st_size for file in files),
    "model_bytes": found["model"],
    "largest_tensor_bytes": largest,
    "peak_growth_bytes": found["grown"],
    "growth_over_model": found["grown"] / found["model"],
    "slack": slack / largest,
  }


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--gigabytes", type=float, default=1.0)
  parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
  parser.add_argument("--shards", type=int, default=1)
  given = parser.parse_args()
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder)
    found = read(path, given.gigabytes, given.dtype, given.shards)
  case = f"{given.gigabytes:g} GB of {given.dtype} in {given.shards} file(s)"
  figures = {name.replace("_", " "): value for name, value in found.items()}
  clock = "peak resident memory of its own process"
  rows = measure.rows(case, clock, figures, {"slack": "<= 1"})
  measure.report("reading_memory", rows)


if __name__ == "__main__":
  main()
