"""Published figures of accelerators, and devices to compile for without having them.

JAX's compilers run without the device that they compile for. Lower bounds of run times
follow from a chip's published figures; they are never measurements.
"""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import jax

from osd_jax import base


@dataclasses.dataclass(frozen=True)
class Chip:
  """Published figures of one chip.

  Attributes:
    memory: bytes of memory.
    bandwidth: bytes of memory per second.
    flops: floating-point operations per second in bfloat16 products.
    link: bytes per second to and from the neighbours, both directions together.
    launch: minimum seconds per kernel.
    clock: cycles per second, for compilers that estimate cycles.
  """

  memory: float
  bandwidth: float
  flops: float
  link: float
  launch: float = 0.0
  clock: float = 0.0

  def cycles_to_read(self, read: float) -> float:
    """Returns the cycles that reading this number of bytes takes at least."""
    return read / self.bandwidth * self.clock

  def least_seconds(
    self, read: float, flops: float, moved: float = 0.0, kernels: float = 0.0
  ) -> float:
    """Returns the roofline: a lower bound of a program's seconds.

    Args:
      read: bytes read from memory; weights and caches count once.
      flops: floating-point operations of matrix products, per chip.
      moved: bytes that collectives return; an all-reduce transfers each byte twice.
      kernels: number of kernels, which run one after the other.
    """
    # Reading and computing overlap, so the slower one bounds the time. Collectives are
    # added, because the programs here wait for them.
    computed = max(read / self.bandwidth, flops / self.flops)
    return max(computed, kernels * self.launch) + 2 * moved / self.link


# TPUs: Austin et al., "How to Scale Your Model" (2025), table of chips. A v4 chip has
# two cores and its compiler counts cores, so the figures of v4 are per core. The book
# gives v5e's clock, 1.5 GHz: `flops` / 131,072 for four matrix units of 128 x 128, with
# two operations per cell and cycle. The other clocks are computed in the same way, with
# 4 such units a core on v4, 8 on v5p, and 4 of 256 x 256 on v6e, because libtpu's
# estimate of a product of two [8192, 8192] needs more than two. H100: NVIDIA's data
# sheet (SXM); `launch` is the time per kernel in a CUDA graph.
CHIPS = {
  "v4": Chip(16e9, 6e11, 1.375e14, 9e10, clock=1.05e9),
  "v5e": Chip(16e9, 8.1e11, 1.97e14, 9e10, clock=1.5e9),
  "v5p": Chip(96e9, 2.8e12, 4.59e14, 1.8e11, clock=1.75e9),
  "v6e": Chip(32e9, 1.6e12, 9.2e14, 1.8e11, clock=1.75e9),
  "h100": Chip(80e9, 3.35e12, 9.9e14, 9e11, 2.5e-6),
  "cpu": Chip(16e9, 2e10, 1e11, 1e10),  # not a real chip; it makes the command testable
}

_CUDA = "jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12"
_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132
  fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 84978434048
  shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


@dataclasses.dataclass(frozen=True)
class Topology:
  """A named machine: "v5e:2x2", "v4:2x2x1", "v6e:2x4", "h100:4", "cpu:4".

  Attributes:
    name: kind of chip, a colon and the number of chips; for TPUs the sides of the grid.
  """

  name: str

  def __post_init__(self):
    kind, _, sides = self.name.partition(":")
    counts = sides.split("x")
    if kind not in CHIPS or not all(map(str.isdigit, counts)):
      raise base.InputError(
        f"CompileConfig.topology: received {self.name!r}, expected a kind of"
        f" {', '.join(CHIPS)}, a colon and a size, as in 'v5e:2x2' or 'h100:4'."
      )

  @property
  def kind(self) -> str:
    return self.name.partition(":")[0]

  @property
  def chip(self) -> Chip:
    return CHIPS[self.kind]

  def devices(self) -> Sequence[Any]:
    """Returns devices to compile for, which need not exist.

    Raises:
      InputError: the compiler is not installed or does not know the machine.
    """
    size = self.name.partition(":")[2]
    if self.kind == "cpu":
      return jax.devices("cpu")[: int(size)]
    if self.kind == "h100":
      # The compiler needs the description of the GPU, because no driver can report it.
      options = {"target_config": _H100, "topology": f"1x1x{size}"}
      return self._described("cuda", "h100", _CUDA, options)
    # Without a TPU no metadata server answers, and libtpu would wait for one.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no TPU is locked
    return self._described("tpu", self.name, "libtpu", {})

  def _described(
    self, platform: str, name: str, packages: str, options: dict[str, str]
  ) -> Sequence[Any]:
    from jax.experimental import topologies

    try:
      topology = topologies.get_topology_desc(
        platform=platform, topology_name=name, **options
      )
    except Exception as error:  # plug-ins raise different types
      message = str(error).splitlines()[0]
      raise base.InputError(
        f"CompileConfig.topology: no compiler for {self.name!r} ({message}). It comes"
        f" with `pip install {packages}` of this JAX's version, best in an environment"
        " of its own; a TPU's size is a whole host's at least, as 2x2."
      ) from error
    return topology.devices
