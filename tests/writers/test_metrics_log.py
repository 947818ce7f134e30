"""metrics.jsonl is strict JSON, survives torn lines and is cut back exactly."""

import enum
import json
import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from osd_jax.writers import MetricsLog, TensorBoardLog, read


class Colour(enum.IntEnum):
  BLUE = 2


def _strict(text: str):
  def refuse(constant):
    raise AssertionError(f"{constant} is not strict JSON")

  return json.loads(text, parse_constant=refuse)


def test_rows_come_back_as_plain_values(tmp_path):
  values = {
    "index": 3,
    "source": "maths \u03bc",
    "overlap": np.float32(0.5),
    "flag": True,
    "loss": jnp.float32(0.25),
    "bf16": jnp.asarray([1.5, 2], jnp.bfloat16),
    "counts": np.arange(3),
    "nested": {"a": (1, None)},
    "reason": Colour.BLUE,
    "switch": np.bool_(False),
  }
  with MetricsLog(tmp_path / "m.jsonl") as log:
    log.write("request", values)
    log.write("update", {})
  assert list(read(log.path)) == [
    {
      "kind": "request",
      "index": 3,
      "source": "maths \u03bc",
      "overlap": 0.5,
      "flag": True,
      "loss": 0.25,
      "bf16": [1.5, 2.0],
      "counts": [0, 1, 2],
      "nested": {"a": [1, None]},
      "reason": 2,
      "switch": False,
    },
    {"kind": "update"},
  ]


def test_floats_that_are_not_finite_become_null_and_are_named(tmp_path):
  with MetricsLog(tmp_path / "m.jsonl") as log:
    log.write(
      "update",
      {
        "loss": float("nan"),
        "grad_norm": jnp.float32(np.inf),
        "step": 1.0,
        "per": {"position": np.array([0.5, -np.inf])},
      },
    )
  row = _strict(log.path.read_text())
  assert row["loss"] is None and row["grad_norm"] is None and row["step"] == 1.0
  assert row["per"]["position"] == [0.5, None]
  assert row["nonfinite"] == ["loss", "grad_norm", "per.position.1"]


@pytest.mark.parametrize(
  "values, words",
  [
    ({"kind": 1}, "named 'kind'"),
    ({"nonfinite": []}, "named 'nonfinite'"),
    ({"x": {1}}, "received set as 'x'"),
    ({"x": {3: 1}}, "the key 3 in 'x'"),
    ({"x": np.array(["a"])}, "array of <U1 as 'x'"),
  ],
)
def test_a_bad_row_is_refused_by_name_and_not_written(tmp_path, values, words):
  with MetricsLog(tmp_path / "m.jsonl") as log:
    with pytest.raises(ValueError, match=words):
      log.write("request", values)
    assert log.length == 0


def test_length_counts_bytes_and_truncate_cuts_back_to_it(tmp_path):
  path = tmp_path / "m.jsonl"
  with MetricsLog(path) as log:
    lengths = [log.length]
    for i in range(4):
      log.write("request", {"index": i, "text": "\u00e9" * i})
      lengths.append(log.length)
      assert log.length == path.stat().st_size  # flushed line by line
    log.sync()
  with MetricsLog(path) as log:
    assert (log.length, log.lines) == (lengths[4], 4)
    log.truncate(lengths[2])
    assert (log.length, log.lines) == (lengths[2], 2)
    log.write("request", {"index": "again"})
    for wrong in (lengths[1] + 1, log.length + 1, -1):
      with pytest.raises(ValueError, match="metrics log: received"):
        log.truncate(wrong)
    assert [row["index"] for row in read(path)] == [0, 1, "again"]
    log.truncate(0)
    assert log.lines == 0 and list(read(path)) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_is_named_with_the_row_and_what_to_do(tmp_path):
  log = MetricsLog(tmp_path / "metrics.jsonl")
  log.write("request", {"index": 0})
  log._file = open("/dev/full", "ab", buffering=0)
  with pytest.raises(OSError, match=r"row 1 \('request'\).*No space left.*again"):
    log.write("request", {"index": 1})
  assert [row["index"] for row in read(tmp_path / "metrics.jsonl")] == [0]


def test_a_torn_last_line_is_left_out_and_cut_on_opening(tmp_path):
  path = tmp_path / "m.jsonl"
  with MetricsLog(path) as log:
    log.write("request", {"index": 0})
    whole = log.length
  with open(path, "ab") as file:
    file.write(b'{"kind": "request", "ind')
  assert [row["index"] for row in read(path)] == [0]
  with MetricsLog(path) as log:
    assert (log.length, log.lines) == (whole, 1)
    log.write("request", {"index": 1})
  assert [row["index"] for row in read(path)] == [0, 1]


@pytest.mark.parametrize("line", [b"{no json}\n", b"[1]\n"])
def test_a_broken_whole_line_is_named_with_its_number(tmp_path, line):
  path = tmp_path / "m.jsonl"
  path.write_bytes(b'{"kind": "x"}\n' + line)
  with pytest.raises(ValueError, match=r"m\.jsonl line 2"):
    list(read(path))


def test_tensorboard_takes_the_numbers_and_skips_the_rest(tmp_path):
  pytest.importorskip("tensorboardX", reason="the extra [log] is not installed")
  with TensorBoardLog(tmp_path) as log:
    log.write("request", 1, {"overlap": 0.5, "source": "sql", "loss": float("nan")})
  (events,) = tmp_path.iterdir()
  data = events.read_bytes()
  assert b"request/overlap" in data
  assert b"request/source" not in data and b"request/loss" not in data


def test_without_tensorboardx_the_error_says_what_to_install(tmp_path):
  code = (
    "import sys; sys.modules['tensorboardX'] = None\n"
    "from osd_jax.writers import TensorBoardLog\n"
    "try: TensorBoardLog('x')\n"
    "except ImportError as error: print(error)"
  )
  out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
  assert "pip install osd-jax[log]" in out.stdout, out.stderr
