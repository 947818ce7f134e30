"""Is a bigger static draft better, if training it may cost no more?

Attached drafts of several sizes start from random parameters and are distilled on the
same texts of all topics. Compute counts the matrix products of a training step.
"""

import dataclasses
import functools

import jax
from setting import Answers, Cell, Setting, distilled, key_of

from osd_jax import pairs
from osd_jax.distillation.losses import LossConfig
from osd_jax.distillation.update import UpdateConfig, loss_and_grad
from osd_jax.models.shapes import AttachedConfig
from osd_tools import hlo

WIDE = {"width": 256, "num_heads": 8, "mlp_dim": 768}
SIZES = {
  "narrow": {"width": 64, "num_heads": 2, "mlp_dim": 192},
  "as shipped": {},
  "two layers": {"num_layers": 2},
  "twice as wide, two layers": {**WIDE, "num_layers": 2},
}
STEPS, TEXTS = 2000, 600  # steps of the shipped shape; texts of each topic
# As in experiments/demo_ceiling.gin.
LOSS = LossConfig("forward_kl", num_positions=24, num_tokens=256)
RATE = 2e-3  # as experiments/shipped_attached_draft.gin


def bigger(setting: Setting) -> Answers:
  """Yields a cell for each size: at equal compute, and with one seed at equal steps."""
  for seed in range(setting.seeds):
    for equal in ("compute", "steps") if seed == 0 else ("compute",):
      for name, shape in SIZES.items():
        key = key_of(setting, "bigger", f"equal {equal}", name, seed)
        yield key, functools.partial(of_size, setting, shape, equal == "compute", seed)


def of_size(setting: Setting, shape: Cell, same_compute: bool, seed: int) -> Cell:
  """Distils a draft of a size; returns its figures on a stream and held-out overlap."""
  size, usual = sized(setting, shape), sized(setting, {})
  times = products(size) / products(usual)
  steps = round(STEPS / times) if same_compute else STEPS
  folder = (
    setting.out / "bigger" / f"{'_'.join(map(str, shape.values()))}_{steps}_{seed}"
  )
  bindings = [
    "PairConfig.attached=@AttachedConfig()",
    *(f"AttachedConfig.{name}={value}" for name, value in shape.items()),
    f"OptimizerConfig.learning_rate={RATE}",
    f"SamplingConfig.seed={seed}",
  ]
  held_out = distilled(size, folder, steps, TEXTS, bindings)
  order = setting.order("sharp", seed)
  params = size.pair.load_draft(str(folder / "draft.safetensors"))
  course = size.fixed(params, order)
  floor = setting.fixed(setting.pair.draft_params, order)
  return (
    setting.figures(course, floor)
    | {"held_out": held_out["overlap"], "by_topic": held_out["by_topic"]}
    | {"steps": steps, "products": round(times, 3)}
  )


def sized(setting: Setting, shape: Cell) -> Setting:
  """Returns the setting with a new attached draft of another size."""
  files = dataclasses.replace(
    setting.files, draft=pairs.ATTACHED, attached=AttachedConfig(**shape)
  )
  return dataclasses.replace(setting, files=files, pair=pairs.load_pair(files))


def products(setting: Setting) -> float:
  """Returns the operations of the matrix products of training on one answer."""
  pair, row = setting.pair, setting.answers.rows[0]
  trained, frozen = pair.draft.split(pair.draft_params)
  config = UpdateConfig(num_new=0, num_replay=1, length_multiple=0, loss=LOSS)
  step = functools.partial(loss_and_grad, pair.draft, config)
  return hlo.product_flops(jax.make_jaxpr(step)(trained, row, frozen))
