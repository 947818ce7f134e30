"""How a `Server` decodes and learns by default: as suits the shipped pair."""

from osd_jax.distillation.buffer import BufferConfig
from osd_jax.distillation.learner import LearningConfig
from osd_jax.distillation.losses import LossConfig
from osd_jax.distillation.optimizers import OptimizerConfig
from osd_jax.distillation.schedule import ScheduleConfig
from osd_jax.distillation.update import UpdateConfig
from osd_jax.engine.requests import DecodingConfig

# One bucket: what is learnt on is as long as the longest of them.
DECODING = DecodingConfig(num_draft_tokens=7)
# As in `gin_configs/runs/demo.gin`.
LEARNING = LearningConfig(
  buffer=BufferConfig(recency_half_life=800.0),
  update=UpdateConfig(
    optimizer=OptimizerConfig(
      learning_rate=8e-4, query_multiplier=0.18, warmup_steps=20
    ),
    loss=LossConfig(divergence="jsd", jsd_beta=0.1, num_positions=12, num_tokens=256),
    steps_per_update=16,
    num_new=4,
    num_replay=12,
    length_multiple=16,
    ema_decay=0.9,
  ),
  schedule=ScheduleConfig(
    update_interval=4,
    window=40,
    flat_tolerance=0.01,
    pause_after_flat=15,
    enough=0.95,
    much_to_gain=0.25,
  ),
)
