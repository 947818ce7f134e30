"""What requests leave behind: salts keep the cache apart, and disks may stay empty."""

import dataclasses
import shutil

import numpy as np
import pytest
from compilations import Compilations
from serving import running, traces
from serving.running import TEXTS
from serving.test_learning import draft, learned, on_disk, same

from osd_jax.decoding import ngrams

CACHE = 4096
SECRET = "Zoe asks what the wages of Ann and of Bob were in May?"


@pytest.fixture(scope="module")
def cache_pair(pair):
  """The tiny target, with the n-gram cache as its draft."""
  return pair.with_draft(ngrams.build(pair.target, CACHE), ngrams.empty(CACHE))


def calls(server, text, **fields):
  """Target calls of a request, as its client sees them."""
  body = server.complete(text, **fields)
  return body["metrics"]["speculative_decoding"]["num_spec_steps"]


def test_question_with_another_salt_saves_no_call(cache_pair):
  with running.running(cache_pair) as server:
    assert server.client.get("/live").json()["sources"] == ["cache"]
    cold = calls(server, TEXTS[0], cache_salt="a")
    assert calls(server, TEXTS[0], cache_salt="b") == cold
    assert calls(server, TEXTS[0]) == cold  # nor for requests without a salt
    with Compilations() as compilations:
      for fields in ({"cache_salt": "a"}, {"cache_salt": "b"}, {}):  # the control
        assert calls(server, TEXTS[0], **fields) < cold
      server.text(TEXTS[1], cache_salt="new")
    assert compilations.count == 0


def test_learned_draft_next_to_the_cache_keeps_salts_apart(pair):
  decoding = dataclasses.replace(running.DECODING, cache_tokens=1024)
  with running.running(pair, decoding=decoding, learn=False) as server:
    for salt in ("a", "b"):
      server.text(TEXTS[0], cache_salt=salt)
    table = server.service.server.engine.memory.table
    salts = {tuple(salt) for salt in table.salts[: int(table.end)].tolist()}
    assert len(salts) == 2 and (0, 0) not in salts


def rows(server):
  """Rows of the buffer that are in use."""
  data = server.service.server.learner.state()[0]["buffer"].data
  return np.asarray(data.source)[np.asarray(data.weight) > 0]


def test_no_token_of_a_request_reaches_the_disk(pair, tmp_path):
  options = {"checkpoint_every": 2, "keep_answers": False}
  live = tmp_path / "live"
  live.mkdir()
  with running.running(pair, live, **options) as server:
    prompt = server.service.encode(SECRET, is_chat=False)
    start = draft(server)
    for count, text in enumerate([SECRET, *TEXTS], 1):
      server.text(text, cache_salt="zoe")
      learned(server, count)
      assert on_disk(server, lambda: traces.of(live, prompt, '"zoe"')) == []
    assert traces.holds(rows(server), prompt)  # control: it is in memory
    on_disk(server, lambda: shutil.copytree(live, tmp_path / "killed"))
    tokens = np.asarray(rows(server))[:, :8]
  adapted = draft(server)
  assert not same(start, adapted)
  for row in tokens:
    assert traces.of(live, row[row > 0]) == []
  with running.running(pair, live, **options) as again:  # the draft is kept
    assert again.service.loop.learned == 7 and same(draft(again), adapted)
    assert len(rows(again)) == 0
    again.text(TEXTS[0])
    learned(again, 8)
  with running.running(pair, tmp_path / "killed", **options) as again:
    assert again.service.loop.learned == 6  # what came after is lost


def test_files_of_a_server_are_for_their_owner_only(pair, tmp_path):
  tmp_path.chmod(0o755)
  with running.running(pair, tmp_path, checkpoint_every=2) as server:
    for count, text in enumerate([SECRET, *TEXTS], 1):
      server.text(text)
      learned(server, count)
  assert {"outputs.jsonl", "checkpoints", "draft.safetensors"} <= {
    path.name for path in tmp_path.iterdir()
  }
  for path in tmp_path.iterdir():  # what is in a private folder is private, too
    assert path.stat().st_mode & 0o077 == 0, path


def test_answers_on_disk_are_found_unless_they_are_left_out(pair, tmp_path):
  """The control of the test above."""
  with running.running(pair, tmp_path, checkpoint_every=2) as server:
    prompt = server.service.encode(SECRET, is_chat=False)
    for count, text in enumerate([SECRET, *TEXTS], 1):
      server.text(text)
      learned(server, count)
    assert len(on_disk(server, lambda: traces.of(tmp_path, prompt))) > 1
