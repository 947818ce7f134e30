"""Fuzzed flags and gin files give a valid config, or exit code 2 and a message."""

import dataclasses
import pathlib

import hypothesis
import hypothesis.strategies as st

from osd_jax import base, online
from osd_jax.main import settings

CONFIGS = pathlib.Path(__file__).resolve().parents[1] / "gin_configs"
EXAMPLES = hypothesis.settings(
  max_examples=80,
  deadline=None,
  derandomize=True,
  database=None,
  suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
BASE = "testing/tiny_online.gin"
PAIR = ("PairConfig.target='t'", "PairConfig.draft='d'")

FIELDS = [
  f"{name}.{field}"
  for name, config in settings.configs(online.OnlineConfig).items()
  for field in base.field_types(config)
]
NAMES = st.sampled_from(
  FIELDS
  + "GENERATED_STREAM_ROWS NOWHERE maths/TaskConfig.rows".split()
  + "x/y/z/StreamConfig.seed OnlineConfig OnlineConfig. .seed".split()
  + ["gin.macro.value", "OnlineConfig..seed"]
  + "osd_jax.online.run.config . /".split()
  + ["", "a b.c", "include 'runs/online.gin'\nLearningConfig.seed"]
  + ["LearningConfig.seed\n"]
)
ATOMS = st.sampled_from(
  "0 1 -1 3 1e999 -1e999 1e-999 0.5 True None '' 'jsd' 'coupling' '\\x00' b'x'".split()
  + "1j ... many () [] {} (64,) [None] [[[[[1]]]]] @OnlineConfig() @NoConfig()".split()
  + "@StreamConfig @x/TaskConfig() @ % @() %GENERATED_STREAM_ROWS %NOWHERE".split()
  + "%gin.REQUIRED [%gin.REQUIRED] %a.b.c @maths/stream/TaskConfig()".split()
  + "( ' \"\"\" \\ # 1;2 __import__('os') f'{1}' \u00e9 \x00".split(" ")
  + ["", " ", "1 2", "x = 3", "lambda: 0", "\t1", "[64, 'x']", "{1, 2}"]
  + ["{'a': 1}", "{%GENERATED_STREAM_ROWS: 1}"]
)
DIGITS = st.builds(lambda: "9" * 5000)  # more digits than Python reads
VALUES = st.recursive(
  ATOMS | DIGITS,
  lambda inner: (
    st.lists(inner, max_size=3).map(lambda xs: f"[{', '.join(xs)}]")
    | st.tuples(inner, inner).map(lambda xs: f"{{{xs[0]}: {xs[1]}}}")
  ),
  max_leaves=4,
)
BINDINGS = st.builds("{}={}".format, NAMES, VALUES) | st.text(max_size=20)


@EXAMPLES
@hypothesis.given(bindings=st.lists(BINDINGS, min_size=1, max_size=3))
@hypothesis.example(bindings=["OnlineConfig.stream={[]: 0}"])
@hypothesis.example(bindings=["OnlineConfig.stream=[{%NOWHERE: 0}]"])
@hypothesis.example(bindings=[f"LearningConfig.seed={'9' * 5000}"])
def test_fuzzed_flags_build_or_raise_config_error(bindings):
  try:
    config, text = settings.load(online.OnlineConfig, [BASE], [*PAIR, *bindings])
  except settings.ConfigError as error:
    assert str(error).strip()
    return
  assert type(config) is online.OnlineConfig and text


@st.composite
def damaged(draw):
  """The text of a gin file with some characters replaced."""
  text = draw(st.sampled_from(TEXTS))
  for _ in range(draw(st.integers(1, 4))):
    place = draw(st.integers(0, len(text)))
    length = draw(st.integers(0, 5))
    put = draw(st.text(max_size=3) | st.sampled_from("@%(){}[]'\"\\=/.#\n\t\r\x00"))
    text = text[:place] + put + text[place + length :]
  return text


TEXTS = [
  "".join(
    line
    for line in (CONFIGS / name).read_text().splitlines(keepends=True)
    if not line.startswith("#")
  )
  for name in ("runs/online.gin", "tasks/generated.gin", BASE)
]


@EXAMPLES
@hypothesis.given(
  data=st.binary(max_size=40)
  | damaged().map(lambda text: text.encode("utf-8", "surrogatepass"))
)
@hypothesis.example(data=b"\x80")
def test_damaged_file_builds_or_raises_config_error(tmp_path, data):
  hypothesis.assume(b"import" not in data)
  path = tmp_path / "fuzzed.gin"
  path.write_bytes(data)
  try:
    config, _ = settings.load(online.OnlineConfig, [BASE, str(path)])
  except settings.ConfigError as error:
    assert str(error).strip()
    return
  assert type(config) is online.OnlineConfig


def test_valid_settings_take_effect():
  """Negative control: valid settings are accepted and take effect."""
  valid = ["LearningConfig.seed=5", "DecodingConfig.rows=3"]
  config, _ = settings.load(online.OnlineConfig, [BASE], [*PAIR, *valid])
  assert (config.learning.seed, config.decoding.rows) == (5, 3)
  unchanged = settings.load(online.OnlineConfig, [BASE], PAIR)[0]
  learning = dataclasses.replace(config.learning, seed=0)
  assert dataclasses.replace(config, learning=learning) != unchanged
