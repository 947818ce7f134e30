"""Records leave everything in time, and reach no disk if they must not."""

import json
import shutil

import numpy as np
import pytest
from serving import running, traces
from serving.running import TEXTS
from serving.test_deletion import SECRET, rows, secrets
from serving.test_learning import draft, learned, on_disk, same
from serving.test_tenants import CACHE, calls

from osd_jax import base
from osd_jax.decoding import ngrams
from osd_serve import command
from osd_serve.service import ServeConfig


class Clock:
  """A clock that is set by hand."""

  def __init__(self):
    self.seconds = 1000.0

  def __call__(self):
    return self.seconds


def test_records_leave_the_buffer_and_every_file_when_they_are_too_old(pair, tmp_path):
  clock = Clock()
  options = {"clock": clock, "record_seconds": 100, "checkpoint_every": 2}
  with running.running(pair, tmp_path, **options) as server:
    prompt = secrets(server)
    for text in (SECRET, TEXTS[0], TEXTS[1]):
      server.text(text)
      clock.seconds += 40
    learned(server, 3)
    server.service.expire()  # the oldest record is 120 seconds old
    assert not traces.holds(rows(server), prompt) and len(rows(server)) == 2
    assert traces.of(tmp_path, prompt) == []
    server.text(SECRET)
    learned(server, 4)
    clock.seconds += 70
    server.service.expire()
    assert traces.holds(rows(server), prompt) and len(rows(server)) == 1  # control
  assert traces.of(tmp_path, prompt)
  clock.seconds += 31  # while no server runs, nothing is removed
  with running.running(pair, tmp_path, **options) as server:
    assert traces.of(tmp_path, prompt) == [] and len(rows(server)) == 0
    assert server.service.learning.finished == 4


@pytest.mark.slow
def test_old_answers_of_a_journal_are_not_learnt_from(pair, tmp_path):
  clock = Clock()
  options = {"clock": clock, "record_seconds": 100, "checkpoint_every": 50}
  (tmp_path / "live").mkdir()
  with running.running(pair, tmp_path / "live", **options) as live:
    prompt = secrets(live)
    live.text(SECRET)
    clock.seconds += 60
    live.text(TEXTS[0])
    learned(live, 2)
    shutil.copytree(tmp_path / "live", tmp_path / "killed")
  assert traces.of(tmp_path / "killed", prompt) == ["journal.jsonl"]
  clock.seconds += 60
  with running.running(pair, tmp_path / "killed", **options) as again:
    assert again.service.learning.finished == 2 and len(rows(again)) == 1
    assert traces.of(tmp_path / "killed", prompt) == []


def test_cache_is_emptied_before_its_entries_are_too_old(pair):
  clock = Clock()
  alone = pair.with_draft(ngrams.build(pair.target, CACHE), ngrams.empty(CACHE))
  with running.running(alone, clock=clock, record_seconds=100) as server:
    cold = calls(server, TEXTS[0])
    clock.seconds += 99
    server.service.expire()
    assert calls(server, TEXTS[0]) < cold  # control
    clock.seconds += 2
    server.service.expire()
    assert calls(server, TEXTS[0]) == cold


def test_records_are_removed_without_being_asked(pair):
  clock = Clock()
  with running.running(pair, clock=clock, record_seconds=1) as server:
    server.text(TEXTS[0])
    learned(server, 1)
    assert len(rows(server)) == 1
    clock.seconds += 2
    server.wait_for(lambda service: not service.server.learner.tags)


def test_no_token_of_a_request_reaches_the_disk(pair, tmp_path):
  options = {"checkpoint_every": 2, "keep_answers": False}
  live = tmp_path / "live"
  live.mkdir()
  with running.running(pair, live, **options) as server:
    prompt, start = secrets(server), draft(server)
    for count, text in enumerate([SECRET, *TEXTS], 1):
      server.text(text, tenant="zoe")
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
    assert again.service.learning.finished == 7 and same(draft(again), adapted)
    assert len(rows(again)) == 0
    again.text(TEXTS[0])
    learned(again, 8)
  with running.running(pair, tmp_path / "killed", **options) as again:
    assert again.service.learning.finished == 6  # what came after is lost


def test_answers_on_disk_stay_as_they_began(tmp_path):
  config = ServeConfig(run_directory=str(tmp_path / "run"))
  with command._opened(config, ""):
    pass
  other = ServeConfig(run_directory=str(tmp_path / "run"), keep_answers=False)
  with pytest.raises(base.InputError, match="ServeConfig.keep_answers"):
    command._opened(other, "")


def pieces(server, text, **fields):
  """Texts of the chunks of a stream."""
  body = {"prompt": text, "temperature": 0, "stream": True, **fields}
  with server.client.stream("POST", "/v1/completions", json=body) as answer:
    lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
  return [json.loads(line)["choices"][0]["text"] for line in lines[:-1]]


@pytest.mark.parametrize("size", [0, 3, 100])
def test_pieces_of_a_stream_do_not_depend_on_what_was_accepted(pair, plain, size):
  """The second time, all tokens are drafted from the cache."""
  alone = pair.with_draft(ngrams.build(pair.target, CACHE), ngrams.empty(CACHE))
  with running.running(alone, stream_tokens=size) as server:
    cold, warm = (pieces(server, TEXTS[0]) for _ in range(2))
    assert "".join(cold) == "".join(warm) == plain[0]
    assert (cold == warm) is bool(size)  # 0: the control
    if size == 3:  # 24 tokens, and the end of the stream
      assert 4 < len(cold) <= 9
    stop = plain[0][len(plain[0]) // 2 :][:3]
    cut = "".join(pieces(server, TEXTS[0], stop=[stop]))
    assert cut == plain[0][: plain[0].find(stop)]
