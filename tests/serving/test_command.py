"""`osd serve` as a process: its port, its signals and its settings."""

import contextlib
import dataclasses
import signal
import sys
import threading
import time

import httpx2
import pytest
import tiny_online
from conftest import ROOT
from serving import running

from osd_jax import base, pairs
from osd_jax.main import commands, settings
from osd_serve import command, connections
from osd_serve.service import ServeConfig

sys.path.append(str(ROOT / "benchmarks"))

import http_load

PROGRAM = "import sys; from osd_jax.main import main; sys.exit(main())"
SETTINGS = (
  "DecodingConfig.rows=2",
  "DecodingConfig.num_draft_tokens=3",
  "DecodingConfig.target_length=60",
  "ScheduleConfig.update_interval=4",
  "UpdateConfig.steps_per_update=2",
  "UpdateConfig.num_replay=2",
  "UpdateConfig.num_new=2",
  "ServeConfig.checkpoint_every=5",
  "ServeConfig.max_waiting=64",
)


def test_port_in_use_is_an_error_before_anything_is_loaded():
  with command._listening(ServeConfig(port=0)) as listening:
    port = listening.getsockname()[1]
    with pytest.raises(base.InputError, match=f"received 127.0.0.1 port {port}"):
      command.run(ServeConfig(pair=pairs.PairConfig("missing"), port=port))


def test_only_addresses_of_this_machine_are_loopback():
  local = ("127.0.0.1", "127.1.2.3", "::1", "localhost")
  assert all(map(connections.is_loopback, local))
  others = ("0.0.0.0", "::", "10.0.0.1", "example.org")
  assert not any(map(connections.is_loopback, others))


def test_gin_file_states_the_defaults():
  config, text = settings.load(ServeConfig, ["runs/serve.gin"])
  assert config == ServeConfig()
  assert "ServeConfig.port = 8000" in text


def test_wrong_settings_are_refused():
  with pytest.raises(base.InputError, match="free_updates = True"):
    learning = dataclasses.replace(running.QUICK, free_updates=False)
    ServeConfig(learning=learning)
  with pytest.raises(base.InputError, match="record_top_k >= 1"):
    ServeConfig(decoding=dataclasses.replace(running.DECODING, record_top_k=0))
  for draft in (pairs.CACHE, pairs.NONE):
    assert not ServeConfig(pair=pairs.PairConfig(draft=draft)).learns
  assert "serve" in commands.BEGUN


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
  pair = tiny_online.save_lively_pair(tmp_path_factory.mktemp("pair"))
  files = [f"PairConfig.{name}={getattr(pair, name)!r}" for name in ("target", "draft")]
  return (*SETTINGS, *files)


@pytest.mark.slow
def test_sigterm_finishes_answers_and_saves_and_a_second_one_ends_at_once(
  tiny, tmp_path
):
  settings = (f"ServeConfig.run_directory={str(tmp_path / 'run')!r}", *tiny)
  answers = []

  @contextlib.contextmanager
  def answering():
    """A server that answers a request; yields the server and the client's thread."""
    server = http_load.Server(settings, tmp_path)
    server.wait_until_ready()

    def ask():
      body = {"prompt": "How many hotels?", "n": 20}
      with contextlib.suppress(httpx2.TransportError):
        answers.append(
          httpx2.post(f"{server.url}/v1/completions", json=body, timeout=60)
        )

    live = lambda: httpx2.get(f"{server.url}/live").json()
    assert live()["learned"] == 20 * len(answers)
    client = threading.Thread(target=ask)
    client.start()
    while client.is_alive() and not live()["running"]:
      time.sleep(0.01)
    yield server.process
    client.join()

  with answering() as process:
    process.send_signal(signal.SIGTERM)
  assert answers[0].status_code == 200 and len(answers[0].json()["choices"]) == 20
  assert process.wait(60) == 0
  assert (tmp_path / "run" / "draft.safetensors").exists()
  with answering() as process:
    for _ in range(2):
      process.send_signal(signal.SIGTERM)
      time.sleep(0.05)
    # The second signal may arrive after the end.
    assert process.wait(10) in (0, 128 + signal.SIGTERM, -signal.SIGTERM)
