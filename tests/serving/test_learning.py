"""What a server learns survives restarts; what must not be learnt leaves no trace."""

import concurrent.futures
import contextlib
import dataclasses
import itertools
import shutil
import threading
import time
from functools import partial

import httpx2
import jax
import numpy as np
import pytest
from compilations import Compilations
from serving import running
from serving.running import TEXTS

from osd_jax import base, runs
from osd_jax.loop import loop
from osd_jax.models import weights
from osd_serve import command
from osd_serve.scheduler import EngineFailedError
from osd_serve.service import ServeConfig


def answers(folder):
  """Rows of outputs.jsonl."""
  return list(runs.read(folder / "outputs.jsonl"))


def draft(server):
  service = server.service.server
  trained, _ = service.pair.draft.split(service.draft_params)
  return jax.tree.leaves(jax.device_get(trained))


def same(left, right):
  return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


def learned(server, count):
  server.wait_for(lambda service: service.loop.learned == count)


def on_disk(server, work=lambda: None):
  """Does some work when no checkpoint is being written, and while none can begin.

  A folder that is read while orbax renames it is no state that a kill can leave.
  """
  running_loop = server.service.loop
  saved = running_loop._checkpointer
  return running_loop.submit(lambda: (saved.wait(), work())[1]).result()


@pytest.mark.slow
def test_killed_server_learns_each_answer_exactly_once(pair, tmp_path):
  """A copy of the files is what a kill leaves, at any moment."""
  (tmp_path / "live").mkdir()
  with running.running(pair, tmp_path / "live", checkpoint_every=5) as live:
    for count, text in enumerate(TEXTS * 2, 1):
      live.text(text)  # answered, so it must be on disk
      if count in (3, 8, 12):
        copy = tmp_path / str(count)
        on_disk(live, partial(shutil.copytree, tmp_path / "live", copy))
    learned(live, 12)
  for count in (3, 8, 12):
    with running.running(pair, tmp_path / str(count), checkpoint_every=5) as again:
      assert again.service.loop.learned == count
      assert int(again.service.server.learner.state()[0]["buffer"].added) == count


def test_restarted_server_goes_on_with_its_draft_and_its_logs(pair, tmp_path):
  """Each answer has a row in both logs, and its number never comes again."""
  drafts = [jax.tree.leaves(pair.draft.split(pair.draft_params)[0])]
  for start in (0, 6):
    with running.running(pair, tmp_path, compare_every=2) as server:
      assert server.service.loop.learned == start
      assert same(draft(server), drafts[-1])
      version = server.service.server.engine.draft_version
      assert version == server.service.server.learner.version >= (start > 0)
      for text in TEXTS:
        server.text(text)
      learned(server, start + 6)
    drafts.append(draft(server))
  assert not any(same(*pair) for pair in itertools.combinations(drafts, 2))
  rows = list(runs.read(tmp_path / "metrics.jsonl"))
  requests = [row for row in rows if row["kind"] == "request"]
  assert [row["index"] for row in requests] == list(range(12))
  assert [row["index"] for row in answers(tmp_path)] == list(range(12))
  assert len({row["number"] for row in answers(tmp_path)}) == 12
  compared = [row["certificate"] for row in requests if "certificate" in row]
  assert len(compared) == 6 and all(one["equal"] == 1 for one in compared)
  assert "saved_seconds" in requests[-1]
  assert {row["kind"] for row in rows} >= {"start", "update", "summary"}
  (event,) = (row for row in rows if row["kind"] == "event")
  assert event["name"] == "shared" and "Up to 2 requests" in event["text"]


def test_answer_is_on_disk_before_its_client_has_it(pair, tmp_path, monkeypatch):
  with running.running(pair, tmp_path) as server:
    scheduler, missing = server.service.scheduler, []
    publish = scheduler.publish

    def check(finished):
      stored = {row["number"] for row in answers(tmp_path)}
      missing.extend(one.number for one in finished if one.number not in stored)
      publish(finished)

    monkeypatch.setattr(scheduler, "publish", check)
    for text in TEXTS[:3]:
      server.text(text)
  assert len(answers(tmp_path)) == 3 and not missing


def test_missing_answer_is_an_error(pair, tmp_path):
  with running.running(pair, tmp_path, checkpoint_every=100) as server:
    for text in TEXTS[:3]:
      server.text(text)
    learned(server, 3)
    shutil.copytree(tmp_path, tmp_path / "copy")
  path = tmp_path / "copy" / "outputs.jsonl"
  path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
  with pytest.raises(base.InputError, match="answer 0 is missing"):
    with running.running(pair, tmp_path / "copy"):
      pass


@pytest.mark.slow
@pytest.mark.parametrize("every", [2, 100])
def test_answers_of_a_target_with_other_weights_are_not_learnt(pair, tmp_path, every):
  """Before the first checkpoint, only outputs.jsonl holds them."""
  (tmp_path / "live").mkdir()
  with running.running(pair, tmp_path / "live", checkpoint_every=every) as server:
    for text in TEXTS[:3]:
      server.text(text)
    learned(server, 3)
    on_disk(server, partial(shutil.copytree, tmp_path / "live", tmp_path / "copy"))
  assert (tmp_path / "copy" / "checkpoints" / "2").exists() == (every == 2)
  other = jax.tree.map(lambda leaf: leaf * 1.01, pair.target_params)
  tuned = dataclasses.replace(pair, target_params=other)
  with pytest.raises(base.InputError, match="other weights.*PairConfig.draft"):
    with running.running(tuned, tmp_path / "copy", checkpoint_every=every):
      pass
  # Negative control: the former target goes on.
  with running.running(pair, tmp_path / "copy", checkpoint_every=every) as again:
    assert again.service.loop.learned == 3


def test_answers_that_must_not_be_learnt_leave_no_trace(pair, tmp_path):
  decoding = dataclasses.replace(running.DECODING, cache_tokens=1024)

  def traces(server):
    service = server.service.server
    added = int(service.learner.state()[0]["buffer"].added)
    ids = sum("output_ids" in row for row in answers(tmp_path))
    return added, int(service.engine.memory.table.end), ids

  with running.running(pair, tmp_path, decoding=decoding) as server:
    before = server.text(TEXTS[0], learn=False)
    server.post("/v1/completions", prompt=TEXTS[1], learn=False, stream=True)
    assert traces(server) == (0, 0, 0)
    assert server.text(TEXTS[0]) == before
    learned(server, 1)
    assert traces(server) > (0, 0, 0) and min(traces(server)) > 0


def test_newest_draft_is_a_file_for_those_with_the_token(pair, tmp_path):
  with running.running(pair, token="sesame") as server:
    for text in TEXTS:
      server.text(text)
    learned(server, len(TEXTS))
    served = draft(server)
    file = server.client.get("/admin/draft")
    assert httpx2.get(f"{server.url}/admin/draft").status_code == 401
  (tmp_path / "draft.safetensors").write_bytes(file.content)
  found = weights.load(tmp_path / "draft.safetensors").params
  assert same(jax.tree.leaves(jax.device_get(found)), served)
  with running.running(pair, learn=False) as server:
    assert server.client.get("/admin/draft").status_code == 403


@pytest.mark.slow
def test_draft_of_another_server_is_served_without_a_pause(pair, plain, tmp_path):
  params = jax.tree.map(lambda leaf: leaf * 1.1, pair.draft_params)
  path = pair.save_draft(tmp_path / "other.safetensors", params, "another draft")
  with running.running(pair, learn=False, token="sesame") as server:
    assert server.text(TEXTS[0]) == plain[0]
    loaded = server.client.put("/admin/draft", content=path.read_bytes())
    assert loaded.json() == {"draft_version": 1}
    assert server.text(TEXTS[1]) == plain[1]
    engine = server.service.server.engine
    assert engine.draft_version == 1
    broken = server.client.put("/admin/draft", content=b"no weights")
    said = broken.json()["error"]["message"]
    assert broken.status_code == 400 and "\n" not in said
    assert "cannot read the body:" in said  # not the name of a temporary file
    assert (
      server.client.get("/admin/draft").content[-1000:] == path.read_bytes()[-1000:]
    )


@contextlib.contextmanager
def flowing(server, plain):
  """Three clients send greedy requests meanwhile; yields their answers by number.

  Afterwards every request must have the target's answer.
  """
  found, ended = {}, threading.Event()

  def ask(number):
    while not ended.is_set():
      found[number] = server.text(TEXTS[number % len(TEXTS)])
      number += 3

  with concurrent.futures.ThreadPoolExecutor(3) as threads:
    clients = [threads.submit(ask, number) for number in range(3)]
    try:
      yield found
    finally:
      ended.set()
    for client in clients:
      client.result()
  assert found == {number: plain[number % len(plain)] for number in found}


def after(found, count):
  """Waits until so many more requests are answered."""
  count += len(found)
  while len(found) < count:
    time.sleep(0.01)


@pytest.mark.slow
def test_server_that_learns_goes_on_from_a_loaded_draft_under_load(
  pair, plain, tmp_path
):
  params = jax.tree.map(lambda leaf: leaf * 1.1, pair.draft_params)
  path = pair.save_draft(tmp_path / "other.safetensors", params, "another draft")
  run, versions = tmp_path / "run", []
  run.mkdir()
  with running.running(pair, run, token="sesame", checkpoint_every=100) as server:
    with flowing(server, plain) as found:
      for _ in range(2):
        after(found, 6)
        loaded = server.client.put("/admin/draft", content=path.read_bytes())
        assert loaded.status_code == 200, loaded.text
        versions.append(loaded.json()["draft_version"])
      after(found, 18)
    assert 0 < versions[0] < versions[1]
    assert server.metrics()["osd:learning_failed{}"] == 0
    learned(server, len(found))
    assert server.service.server.learner.version > versions[1]  # it goes on learning
    # Loaded after the last answer: without a checkpoint of it a kill would lose it.
    last = server.client.put("/admin/draft", content=path.read_bytes()).json()
    assert same(draft(server), jax.tree.leaves(pair.draft.split(params)[0]))
    server.client.put("/admin/draft", content=path.read_bytes())  # the same step again
    shutil.copytree(run, tmp_path / "killed")
  for folder in (run, tmp_path / "killed"):
    with running.running(pair, folder, checkpoint_every=100) as again:
      assert same(draft(again), jax.tree.leaves(pair.draft.split(params)[0]))
      version = again.service.server.engine.draft_version
      assert last["draft_version"] <= version <= last["draft_version"] + 1


def test_cache_is_emptied_under_load(pair, plain):
  decoding = dataclasses.replace(running.DECODING, cache_tokens=1024)
  with running.running(pair, learn=False, token="sesame", decoding=decoding) as server:
    emptied, engine = [], server.service.server.engine
    clear = engine.clear_memory

    def noted():
      emptied.append(int(engine.memory.table.end))
      clear()
      assert int(engine.memory.table.end) == 0

    engine.clear_memory = noted
    with Compilations() as compiled:
      with flowing(server, plain) as found:
        for _ in range(2):
          after(found, 6)
          assert server.client.delete("/admin/cache").status_code == 204
        after(found, 6)
    assert len(emptied) == 2 and min(emptied) > 0
    assert compiled.count == 0
    assert int(engine.memory.table.end) > 0  # answers since then
    assert server.client.delete("/admin/cache").status_code == 204  # while idle
    assert int(engine.memory.table.end) == 0
    assert httpx2.delete(f"{server.url}/admin/cache").status_code == 401
  with running.running(pair, learn=False, token="sesame") as server:
    refused = server.client.delete("/admin/cache")
    assert refused.status_code == 400 and "cache_tokens" in refused.text
    assert server.client.delete("/admin/draft").status_code == 405


def test_emptied_cache_leaves_the_checkpoints(pair, tmp_path):
  """Regression: emptying the cache of a server with checkpoints failed."""
  decoding = dataclasses.replace(running.DECODING, cache_tokens=1024)
  changes = {"token": "sesame", "decoding": decoding, "checkpoint_every": 2}
  with running.running(pair, tmp_path, **changes) as server:
    for text in TEXTS:
      server.text(text)
    learned(server, len(TEXTS))
    saved = server.service.loop._checkpointer
    assert on_disk(server, lambda: len(saved.steps())) > 1  # negative control
    assert server.client.delete("/admin/cache").status_code == 204
    assert on_disk(server, saved.steps) == [len(TEXTS)]
  with running.running(pair, tmp_path, **changes) as again:
    assert int(again.service.server.engine.memory.table.end) == 0


@contextlib.contextmanager
def closed(server):
  """Keeps the serving thread between two calls meanwhile."""
  entered, ended = threading.Event(), threading.Event()
  server.service.scheduler.between_calls(lambda: (entered.set(), ended.wait(30)))
  entered.wait(30)
  yield
  ended.set()


def test_function_between_calls_ends_with_the_server(pair):
  with running.running(pair, learn=False) as server:
    scheduler = server.service.scheduler
    assert scheduler.between_calls(lambda: 7).result(10) == 7
    failed = scheduler.between_calls(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
      failed.result(10)
    with closed(server):
      left = scheduler.between_calls(lambda: 7)
      assert left.cancel()
    assert server.text(TEXTS[0])  # the serving thread goes on
  with pytest.raises(EngineFailedError):
    scheduler.between_calls(lambda: 7)


def test_error_of_the_learner_does_not_stop_serving(pair, plain, monkeypatch):
  with running.running(pair) as server:

    def observe(*arguments, **named):
      raise base.InputError("distillation: the draft is broken.")

    monkeypatch.setattr(server.service.server.learner, "observe", observe)
    assert [server.text(text) for text in TEXTS] == plain
    server.wait_for(lambda service: service.loop.failure)
    assert "osd:learning_failed" in server.client.get("/metrics").text
    assert server.client.get("/live").json()["learning_failure"]
    assert server.client.get("/health").status_code == 200


def test_slow_learner_drops_answers_instead_of_delaying_them(pair, plain, monkeypatch):
  monkeypatch.setattr(loop, "MAX_PENDING_LIVE", 0)
  with running.running(pair) as server:
    assert server.text(TEXTS[0]) == plain[0]
    assert server.service.loop.dropped == 1


def test_run_directory_is_locked_and_checks_the_settings(tmp_path):
  config = ServeConfig(run_directory=str(tmp_path / "run"))
  with command._opened(config, ""):
    with pytest.raises(base.InputError, match="is being written by"):
      command._opened(config, "")
  with command._opened(dataclasses.replace(config, port=1, learn=False), ""):
    pass  # these may change
  for name, value in (("decoding", running.DECODING), ("keep_answers", False)):
    other = dataclasses.replace(config, **{name: value})
    with pytest.raises(base.InputError, match=f"ServeConfig.{name}"):
      command._opened(other, "")
