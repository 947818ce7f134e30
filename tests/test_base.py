"""Configs validate themselves; errors name field, value and expectation."""

import dataclasses
import json
from collections.abc import Callable
from typing import Annotated

import numpy as np
import pytest

from osd_jax import base, pairs, testing
from osd_jax.data.batches import BatchConfig
from osd_jax.data.examples import TaskConfig
from osd_jax.data.streams import StreamConfig
from osd_jax.distillation import buffer, gate, learner, losses, optimizers, schedule
from osd_jax.distillation import update as updates
from osd_jax.models import shapes


@dataclasses.dataclass(frozen=True)
class Inner(base.Config):
  count: base.Count = 1


@dataclasses.dataclass(frozen=True)
class Config(base.Config):
  count: int = 1
  rate: float = 0.5
  name: Annotated[str, base.OneOf("a", "b")] = "a"
  flag: bool = False
  pair: tuple[int, str] = (1, "a")
  many: tuple[Inner, ...] = ()
  either: int | tuple[int, ...] | None = None
  inner: Inner = Inner()
  made: Inner | Callable[[str], Inner] = Inner()
  limit: base.Count | None = None
  share: base.Share = 0.5
  rates: Annotated[tuple[base.Positive, ...], base.NonEmpty("numbers > 0")] = (1.0,)
  decay: Annotated[float, base.AtLeast(0), base.Below(1)] = 0.0
  folder: base.Folder = "x"
  low: int = 0

  def checks(self):
    return {"low": (self.low <= self.count, f"at most count ({self.count})")}


@pytest.mark.parametrize(
  "changes",
  [
    {"count": 2},
    {"rate": 1},  # an integer is a number
    {"name": "b"},
    {"flag": True},
    {"pair": (2, "b")},
    {"many": (Inner(), Inner(2))},
    {"either": 3},
    {"either": (3, 4)},
    {"made": Inner(3)},
    {"made": lambda text: Inner(len(text))},
    {"limit": 1},
    {"share": 1},
    {"rates": (1, 2.5)},
  ],
)
def test_values_of_the_declared_type_are_accepted(changes):
  for field, value in changes.items():
    assert getattr(Config(**changes), field) == value


@pytest.mark.parametrize(
  ("changes", "expected"),
  [
    ({"count": 1.5}, "int"),
    ({"count": "3"}, "int"),
    ({"count": True}, "int"),
    ({"rate": "fast"}, "float"),
    ({"rate": False}, "float"),
    ({"name": None}, "one of 'a', 'b'"),
    ({"name": "c"}, "one of 'a', 'b'"),
    ({"flag": 1}, "bool"),
    ({"pair": (1, 2)}, "tuple[int, str]"),
    ({"pair": (1, "a", "b")}, "tuple[int, str]"),
    ({"many": (1,)}, "tuple[Inner, ...]"),
    ({"either": (1, None)}, "int | tuple[int, ...] | None"),
    ({"inner": {"counts": 1}}, "Inner"),
    ({"made": "Inner"}, "Inner | Callable[[str], Inner]"),
    ({"limit": 0}, "an integer >= 1, or None"),
    ({"limit": True}, "an integer >= 1, or None"),
    ({"share": 1.1}, "a number in 0..1"),
    ({"share": float("nan")}, "a number in 0..1"),
    ({"rates": ()}, "numbers > 0"),
    ({"rates": (1.0, 0.0)}, "numbers > 0"),
    ({"rates": (float("inf"),)}, "numbers > 0"),
    ({"decay": 1.0}, "a number >= 0 and < 1"),
    ({"folder": " "}, "a folder"),
    ({"low": 2}, "at most count (1)"),
  ],
)
def test_invalid_values_are_named_with_the_expected_type(changes, expected):
  with pytest.raises(base.InputError) as caught:
    Config(**changes)
  ((field, value),) = changes.items()
  assert f"Config.{field}: received {value!r}, expected {expected}" in str(caught.value)


def test_lists_become_tuples():
  assert Config(rates=[1.0, 2.0], either=[1]) == Config(rates=(1.0, 2.0), either=(1,))
  assert Config(inner={"count": 2}).inner == Inner(2)


def test_scalars_of_numpy_become_python_numbers():
  config = Config(count=np.int64(2), rate=np.float32(0.5), flag=np.bool_(True))
  values = (config.count, config.rate, config.flag)
  assert values == (2, 0.5, True) and list(map(type, values)) == [int, float, bool]
  with pytest.raises(base.InputError, match="Config.count: received 1.5, expected int"):
    Config(count=np.float32(1.5))
  assert base.is_count(np.uint32(1)) and not base.is_count(np.int32(0))
  assert not base.is_count(np.bool_(True)) and not base.is_count(np.float32(1))


def test_all_invalid_fields_of_a_config_are_listed():
  with pytest.raises(base.InputError) as caught:
    Config(count=1.5, name="c")
  assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
    "Config.count",
    "Config.name",
  ]


def test_config_cannot_override_post_init():
  with pytest.raises(TypeError, match="define `checks` instead"):

    class Unchecked(base.Config):
      def __post_init__(self):
        pass


# ---- The configs of the project

TASKS = tuple(TaskConfig(name, pattern="a.jsonl") for name in ("a", "b"))
REQUIRED = {
  TaskConfig: {"name": "a", "pattern": "a.jsonl"},
  BatchConfig: {"tasks": TASKS},
  StreamConfig: {"tasks": TASKS},
  shapes.LlamaConfig: vars(testing.TINY_LLAMA),
}


@pytest.mark.parametrize(
  ("config", "fields", "message"),
  [
    (buffer.BufferConfig, {"recency_half_life": 0.0}, "received 0.0"),
    (gate.GateConfig, {"error_rate": 0.0}, "received 0.0"),
    (learner.LearningConfig, {"seed": -1}, "received -1"),
    (losses.LossConfig, {"divergence": "kl"}, "received 'kl'"),
    (losses.LossConfig, {"jsd_beta": 1.0}, "received 1.0"),
    (losses.LossConfig, {"num_negatives": 4, "num_tokens": 0}, "received 4"),
    (optimizers.OptimizerConfig, {"name": "adam"}, "received 'adam'"),
    (
      optimizers.OptimizerConfig,
      {"total_steps": 9, "warmup_steps": 9},
      r"received 9, expected an integer above warmup_steps \(9\)",
    ),
    (
      optimizers.OptimizerConfig,
      {"total_steps": None, "schedule": "cosine"},
      "received None",
    ),
    (schedule.ScheduleConfig, {"much_to_gain": -0.1}, "received -0.1"),
    (schedule.WorthConfig, {"horizon": 1.5}, "received 1.5"),
    (schedule.WorthConfig, {"trial_share": 1.0}, "received 1.0"),
    (updates.UpdateConfig, {"num_replay": 0, "num_new": 0}, ".*expected num_new"),
    (updates.UpdateConfig, {"ema_decay": 1.0}, "received 1.0"),
    (pairs.PairConfig, {"extra_ids": 1.5}, "received 1.5"),
    (pairs.PairConfig, {"target": ""}, "received"),
    (pairs.PairConfig, {"draft": None}, "received None"),
    (pairs.PairConfig, {"draft_serving": True}, "received True"),
    (TaskConfig, {"name": "a b"}, "received 'a b'"),
    (TaskConfig, {"name": "ä"}, "received"),
    (TaskConfig, {"preprocessor": "nope"}, ".*gsm8k"),
    (TaskConfig, {"pattern": ""}, ".*expected a path"),
    (TaskConfig, {"prompt": "question"}, ".*'question'.*in braces"),
    (TaskConfig, {"reference": "{question"}, ".*in braces"),
    (BatchConfig, {"tasks": ()}, "received"),
    (BatchConfig, {"tasks": TASKS[:1] * 2}, ".*each of them once"),
    (BatchConfig, {"limit_rows": True}, "received True"),
    (BatchConfig, {"limit_rows": (1, 0)}, "received"),
    (BatchConfig, {"limit_rows": (1,)}, "received"),
    (StreamConfig, {"tasks": ()}, "received"),
    (StreamConfig, {"tasks": ("maths",)}, "received"),
    (StreamConfig, {"tasks": TASKS[:1], "kind": "cyclic"}, ".*at least 2"),
    (StreamConfig, {"source_length": 1}, "received 1"),
    (shapes.T5Config, {"mlp_activations": ("swish",)}, ".*at least one name; .*'relu'"),
    (shapes.T5Config, {"relative_buckets": 7}, ".*an even number >= 4"),
    (shapes.T5Config, {"relative_max_distance": 16}, ".*more than 16"),
    (shapes.T5Config, {"embedding_std": float("nan")}, ".*a number > 0"),
    (shapes.LlamaConfig, {"num_kv_heads": 3}, "received 3"),
    (shapes.LlamaConfig, {"head_dim": 7}, "received 7"),
    (shapes.LlamaConfig, {"eos_ids": ()}, "received"),
    (shapes.LlamaConfig, {"eos_ids": (64,)}, "received"),
    (shapes.LlamaConfig, {"state_layer": 3}, "received 3"),
    (shapes.LlamaConfig, {"windows": ()}, "received"),
    (shapes.RopeScaling, {"high_freq_factor": 1.0}, ".*more than low_freq_factor"),
    (shapes.AttachedConfig, {"mlp_activations": ("tanh",)}, "received"),
    (shapes.DraftServing, {"shortlist": 1}, ".*at least 2"),
  ],
)
def test_config_errors_name_class_field_and_value(config, fields, message):
  field = next(iter(fields))
  with pytest.raises(base.InputError, match=rf"{config.__name__}\.{field}: {message}"):
    config(**REQUIRED.get(config, {}) | fields)


def test_fields_read_from_json_make_the_same_config():
  config = learner.LearningConfig(
    schedule=schedule.WorthConfig(horizon=7), gate=gate.GateConfig(0.05)
  )
  values = json.loads(json.dumps(dataclasses.asdict(config)))
  assert base.from_json(values, learner.LearningConfig) == config
  assert values["gate"] == {"error_rate": 0.05}
