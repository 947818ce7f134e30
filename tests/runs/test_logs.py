"""Logs: strict JSON, truncation, incomplete lines, TensorBoard."""

import enum
import json
import os
import struct
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from made_rows import of_kind

from osd_jax.runs import MetricsLog, read


class Color(enum.IntEnum):
  BLUE = 2


def _strict(text: str):
  def refuse(constant):
    raise AssertionError(f"{constant} is not strict JSON")

  return json.loads(text, parse_constant=refuse)


def test_rows_are_read_back_as_plain_values(tmp_path):
  values = {
    "index": 3,
    "source": "maths \u03bc",
    "overlap": np.float32(0.5),
    "flag": True,
    "loss": jnp.float32(0.25),
    "bf16": jnp.asarray([1.5, 2], jnp.bfloat16),
    "counts": np.arange(3),
    "nested": {"a": (1, None)},
    "reason": Color.BLUE,
    "switch": np.bool_(False),
  }
  with MetricsLog(tmp_path / "m.jsonl") as log:
    log.write(of_kind("request", **values))
    log.write(of_kind("update"))
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


def test_nonfinite_floats_become_null_and_are_named(tmp_path):
  with MetricsLog(tmp_path / "m.jsonl") as log:
    log.write(
      of_kind(
        "update",
        loss=float("nan"),
        grad_norm=jnp.float32(np.inf),
        step=1.0,
        per={"position": np.array([0.5, -np.inf])},
      )
    )
  row = _strict(log.path.read_text())
  assert row["loss"] is None and row["grad_norm"] is None and row["step"] == 1.0
  assert row["per"]["position"] == [0.5, None]
  assert row["nonfinite"] == ["loss", "grad_norm", "per.position.1"]


def test_invalid_row_is_refused_and_not_written(tmp_path):
  with MetricsLog(tmp_path / "m.jsonl") as log:
    with pytest.raises(TypeError, match="set is not JSON serializable"):
      log.write(of_kind("request", x={1}))
    assert log.path.read_text() == "" and log.rows == 0


def test_truncate_keeps_the_first_rows(tmp_path):
  path = tmp_path / "m.jsonl"
  with MetricsLog(path) as log:
    for index in range(4):
      log.write(of_kind("request", index=index, text="\u00e9" * index))
      assert len([*read(path)]) == log.rows == index + 1  # each line is flushed
    log.sync()
  with MetricsLog(path) as log:
    assert log.rows == 4
    log.truncate(2)
    log.write(of_kind("request", index="again"))
    assert [row["index"] for row in read(path)] == [0, 1, "again"] and log.rows == 3
    log.truncate(0)
    assert log.rows == 0 and list(read(path)) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_full_disk_error_names_the_row_and_the_remedy(tmp_path):
  log = MetricsLog(tmp_path / "metrics.jsonl")
  log.write(of_kind("request", index=0))
  log._file = open("/dev/full", "ab", buffering=0)
  with pytest.raises(OSError, match=r"row 1 \('request'\).*No space left.*repeat"):
    log.write(of_kind("request", index=1))
  assert [row["index"] for row in read(tmp_path / "metrics.jsonl")] == [0]


def test_incomplete_last_line_is_skipped_and_removed_on_opening(tmp_path):
  path = tmp_path / "m.jsonl"
  path.write_bytes(b'{"kind": "request", "index": 0}\n{"kind": "request", "ind')
  assert [row["index"] for row in read(path)] == [0]
  with MetricsLog(path) as log:
    assert log.rows == 1
    log.write(of_kind("request", index=1))
  assert [row["index"] for row in read(path)] == [0, 1]


@pytest.mark.parametrize("line", [b"{no json}\n", b"[1]\n"])
def test_invalid_line_is_an_error_with_its_number(tmp_path, line):
  path = tmp_path / "m.jsonl"
  path.write_bytes(b'{"kind": "x"}\n' + line)
  with pytest.raises(ValueError, match=r"m\.jsonl line 2"):
    list(read(path))


def test_tensorboard_has_the_numbers_of_every_row_kind(tmp_path):
  pytest.importorskip("tensorboardX", reason="the extra [log] is not installed")
  with MetricsLog(tmp_path / "m.jsonl", "tensorboard") as log:
    log.write(of_kind("request", index=0, overlap=0.5, source="sql"))
    log.write(of_kind("update", finished=1, loss=float("nan"), steps=2))
    log.write(of_kind("alarm", finished=1, active=True, text="alarm: a loop"))
    log.write(of_kind("evaluation", step=4, tasks={"sql": {"exact_match": 0.5}}))
    log.write(of_kind("summary", wall_seconds=2.0))
  found = scalars(tmp_path / "tensorboard")
  assert found == {
    "request/index": {1: 0.0},
    "request/overlap": {1: 0.5},
    "update/finished": {1: 1.0},
    "update/steps": {1: 2.0},
    "alarm/finished": {1: 1.0},
    "alarm/active": {1: 1.0},
    "evaluation/step": {4: 4.0},
    "evaluation/tasks/sql/exact_match": {4: 0.5},
    "summary/wall_seconds": {4: 2.0},
  }


def test_tensorboard_hides_truncated_rows(tmp_path):
  pytest.importorskip("tensorboardX", reason="the extra [log] is not installed")
  path = tmp_path / "m.jsonl"
  with MetricsLog(path, "tensorboard") as log:
    for index in range(6):
      log.write(of_kind("request", index=index, overlap=0.25))
  with MetricsLog(path, "tensorboard") as log:
    log.truncate(3)
    for index in range(3, 5):
      log.write(of_kind("request", index=index, overlap=0.75))
  found = scalars(tmp_path / "tensorboard")["request/overlap"]
  assert found == {1: 0.25, 2: 0.25, 3: 0.25, 4: 0.75, 5: 0.75}


def scalars(folder):
  """Returns {tag: {step: value}} as TensorBoard shows them, without purged steps."""
  from tensorboardX.proto import event_pb2

  found: dict[str, dict[int, float]] = {}
  for path in sorted(folder.iterdir()):
    data, place = path.read_bytes(), 0
    while place < len(data):
      # A record is the length (8 bytes), a checksum (4), the event, a checksum (4).
      (size,) = struct.unpack("<Q", data[place : place + 8])
      event = event_pb2.Event.FromString(data[place + 12 : place + 12 + size])
      place += 12 + size + 4
      if event.session_log.status == event_pb2.SessionLog.START:
        for steps in found.values():
          for step in [step for step in steps if step >= event.step]:
            del steps[step]
      for value in event.summary.value:
        if value.WhichOneof("value") == "simple_value":
          found.setdefault(value.tag, {})[event.step] = value.simple_value
  return found


TRACKER = """
calls = []
def init(project, name=None, config=None, resume="never"):
  calls.append(("init", project, name, config, resume))
def log(metrics, step=None):
  calls.append(("log", step, metrics))
def finish():
  calls.append(("finish",))
"""


def test_tracker_has_the_numbers_of_every_row_kind(tmp_path, monkeypatch):
  (tmp_path / "own_tracker.py").write_text(TRACKER)
  monkeypatch.syspath_prepend(tmp_path)
  run = tmp_path / "a_run"
  run.mkdir()
  (run / "config.json").write_text('{"learn": true}')
  with MetricsLog(run / "metrics.jsonl", "own_tracker") as log:
    log.write(of_kind("request", index=4, overlap=0.5, source="sql"))
    log.write(of_kind("alarm", finished=5, active=True, text="alarm: a loop"))
    log.write(of_kind("evaluation", step=9, tasks={"sql": {"exact_match": 0.5}}))
  alarm = {"alarm/finished": 5, "alarm/active": True, "alarm": "alarm: a loop"}
  assert sys.modules["own_tracker"].calls == [
    ("init", "osd_jax", "a_run", {"learn": True}, "allow"),
    ("log", 5, {"request/index": 4, "request/overlap": 0.5}),
    ("log", 5, alarm),
    ("log", 9, {"evaluation/step": 9, "evaluation/tasks/sql/exact_match": 0.5}),
    ("finish",),
  ]


def test_missing_tensorboardx_error_names_the_extra(tmp_path):
  code = (
    "import sys; sys.modules['tensorboardX'] = None\n"
    "import pathlib\n"
    "from osd_jax.runs import MetricsLog\n"
    f"path = pathlib.Path({str(tmp_path)!r})\n"
    "try: MetricsLog(path / 'm.jsonl', 'tensorboard')\n"
    "except ImportError as error: print(error)"
  )
  out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
  assert 'pip install "osd_jax[log]"' in out.stdout, out.stderr


def test_tracker_without_the_interface_is_refused_before_any_file(tmp_path):
  for name in ("json", "no_such_tracker"):
    with pytest.raises(ImportError, match=f"OnlineConfig.tracker: received '{name}'"):
      MetricsLog(tmp_path / "m.jsonl", name)
  assert not list(tmp_path.iterdir())
