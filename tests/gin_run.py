"""A gin file of `osd pretrain` and functions that load it, shared by tests."""

import pathlib

import pytest

from osd_jax.main import settings
from osd_tools import pretrain

CONFIGS = pathlib.Path(__file__).resolve().parents[1] / "gin_configs"

RUN = """
STEPS = 7
PretrainConfig:
  model = @T5Config()
  data = @train/BatchConfig()
  evaluation = @evaluation/BatchConfig()
  optimizer = @OptimizerConfig()
  vocabulary = 'v.model'
  output = 'w.safetensors'
  steps = %STEPS
OptimizerConfig.total_steps = %STEPS
OptimizerConfig.schedule = 'cosine'
OptimizerConfig.warmup_steps = 0
T5Config.mlp_activations = ['gelu', 'linear']
train/BatchConfig.tasks = [@maths/TaskConfig(), @sql/TaskConfig()]
train/BatchConfig.limit_rows = [1, 2]
evaluation/BatchConfig.tasks = (@maths/held_out/TaskConfig(),)
TaskConfig.rows = 10
maths/TaskConfig:
  name = 'm'
  pattern = 'maths.jsonl'
maths/held_out/TaskConfig.split = 'eval'
sql/TaskConfig:
  name = 's'
  pattern = 'sql.jsonl'
"""


def load(files=(), bindings=(), search_paths=()) -> pretrain.PretrainConfig:
  return settings.load(pretrain.PretrainConfig, files, bindings, search_paths)[0]


def complaint(files=(), bindings=(), search_paths=()) -> str:
  with pytest.raises(settings.ConfigError) as caught:
    load(files, bindings, search_paths)
  return str(caught.value)
