"""Records of a tenant that is deleted are gone from memory and from every file."""

import shutil
import threading

import httpx2
import numpy as np
import pytest
from compilations import Compilations
from serving import running, traces
from serving.running import TEXTS
from serving.test_learning import draft, learned, numbers, on_disk, same
from serving.test_tenants import CACHE, calls

from osd_jax.decoding import ngrams

SECRET = "Zoe asks what the wages of Ann and of Bob were in May?"
OPTIONS = {"token": "sesame", "checkpoint_every": 3}


def delete(server, name):
  answer = server.client.delete(f"/admin/tenants/{name}")
  assert answer.status_code == 204, answer.text


def rows(server):
  """Rows of the buffer that have not been erased."""
  data = server.service.server.learner.state()[0]["buffer"].data
  return np.asarray(data.source)[np.asarray(data.weight) > 0]


def secrets(server):
  """Token ids of the secret question."""
  return server.service.encode(SECRET, is_chat=False)


def test_deleted_tenant_is_in_no_file_and_not_in_the_buffer(pair, tmp_path):
  with running.running(pair, tmp_path, **OPTIONS) as server:
    prompt = secrets(server)
    for number, text in enumerate(TEXTS * 2):
      tenant, asked = ("zoe", SECRET) if number % 3 == 1 else ("bob", text)
      server.text(asked, tenant=tenant)
      learned(server, number + 1)
    on_disk(server)
    before = traces.of(tmp_path, prompt, '"zoe"')  # control: they can be found
    assert "journal.jsonl" in before and len(before) > 2
    assert traces.holds(rows(server), prompt)
    version = server.service.server.engine.draft_version
    delete(server, "zoe")
    assert traces.of(tmp_path, prompt, '"zoe"') == []
    assert not traces.holds(rows(server), prompt)
    assert len(rows(server)) == 8  # bob's
    # Learning goes on, and so does the numbering.
    server.text(TEXTS[0], tenant="zoe")
    learned(server, 13)
    assert server.service.server.engine.draft_version >= version
  after = draft(server)
  assert traces.of(tmp_path, prompt) == []
  with running.running(pair, tmp_path, **OPTIONS) as again:
    assert again.service.learning.finished == 13
    assert len(rows(again)) == 9
    assert same(draft(again), after)
    delete(again, "bob")
    assert len(rows(again)) == 1


@pytest.mark.slow
def test_server_that_is_killed_after_a_deletion_continues_without_the_records(
  pair, tmp_path
):
  (tmp_path / "live").mkdir()
  with running.running(pair, tmp_path / "live", **OPTIONS) as live:
    prompt = secrets(live)
    for text in (TEXTS[0], SECRET, TEXTS[1]):
      live.text(text, tenant="zoe" if text is SECRET else "bob")
    learned(live, 3)
    for count in range(2):  # the second time there is nothing new to write
      delete(live, "zoe")
      shutil.copytree(tmp_path / "live", tmp_path / str(count))
  for count in range(2):
    assert traces.of(tmp_path / str(count), prompt, '"zoe"') == []
    with running.running(pair, tmp_path / str(count), **OPTIONS) as again:
      assert again.service.learning.finished == 3 and len(rows(again)) == 2


def test_answers_that_wait_for_the_learner_are_dropped(pair, tmp_path):
  """The learning thread is held up while answers arrive and the tenant is deleted."""
  with running.running(pair, tmp_path, **OPTIONS) as server:
    prompt, gate = secrets(server), threading.Event()
    server.service.learning.submit(gate.wait)
    server.text(SECRET, tenant="zoe")
    server.text(TEXTS[0], tenant="bob")
    assert traces.of(tmp_path, prompt) == ["journal.jsonl"]  # control
    thread = threading.Thread(target=delete, args=(server, "zoe"))
    thread.start()
    server.wait_for(lambda service: service.tenants.of("zoe").generation)
    gate.set()
    thread.join()
    assert traces.of(tmp_path, prompt) == [] and len(rows(server)) == 1
    assert server.service.learning.finished == 2 and numbers(tmp_path) == []
    assert int(server.service.server.learner.state()[0]["buffer"].added) == 1


def test_request_in_flight_is_answered_but_not_kept(pair, plain, tmp_path):
  with running.running(pair, tmp_path, **OPTIONS) as server:
    gate, found = running.Gate(server.service), []
    ask = lambda: found.append(server.text(TEXTS[0], tenant="zoe"))
    threads = [threading.Thread(target=ask)]
    threads[0].start()
    server.wait_for(lambda service: service.scheduler.load.running)
    threads.append(threading.Thread(target=delete, args=(server, "zoe")))
    threads[1].start()
    server.wait_for(lambda service: service.tenants.of("zoe").generation)
    gate.open()
    for thread in threads:
      thread.join()
    assert found == plain[:1]
    assert server.service.learning.finished == 0 and numbers(tmp_path) == []


def test_deletion_waits_for_an_answer_that_is_being_kept(pair, tmp_path, monkeypatch):
  """An answer that is kept after its tenant's records were removed would stay."""
  seen = []
  with running.running(pair, tmp_path, **OPTIONS) as server:
    service, add = server.service, server.service.learning.add

    def held(done, tenant, is_dropped):
      seen.append(service.scheduler.holds(service.tenants.of(tenant)))
      add(done, tenant, is_dropped)

    monkeypatch.setattr(service.learning, "add", held)
    server.text(TEXTS[0], tenant="zoe")
    assert not service.scheduler.holds(service.tenants.of("zoe"))
  assert seen == [True]


@pytest.mark.parametrize("share_cache", [False, True])
def test_deleted_tenant_finds_none_of_its_cache_entries(pair, share_cache):
  alone = pair.with_draft(ngrams.build(pair.target, CACHE), ngrams.empty(CACHE))
  options = {"token": "sesame", "share_cache": share_cache}
  with running.running(alone, **options) as server:
    cold = calls(server, TEXTS[0], tenant="zoe")
    assert calls(server, TEXTS[0], tenant="zoe") < cold  # control
    calls(server, TEXTS[1], tenant="bob")
    delete(server, "zoe")
    entries = int(server.service.server.engine.memory.table.end)
    assert (entries > 0) is not share_cache  # without sharing, those of others stay
    assert calls(server, TEXTS[0], tenant="zoe") == cold


def test_deletion_compiles_nothing(pair):
  with running.running(pair, token="sesame") as server:
    for text in TEXTS:
      server.text(text, tenant="zoe")
    learned(server, len(TEXTS))
    with Compilations() as compilations:
      delete(server, "zoe")
    assert compilations.count == 0 and len(rows(server)) == 0
    for text in TEXTS:
      server.text(text, tenant="bob")
    learned(server, 2 * len(TEXTS))
    assert not server.service.learning.failure and len(rows(server)) == len(TEXTS)


def test_deletion_needs_a_token_a_name_and_a_learner(pair, tmp_path):
  with running.running(pair, token="sesame") as server:
    bad = server.client.delete("/admin/tenants/two%20words")
    assert bad.status_code == 400 and "tenant: received" in bad.text
    assert httpx2.delete(f"{server.url}/admin/tenants/zoe").status_code == 401
  (tmp_path / "checkpoints").mkdir()
  with running.running(pair, tmp_path, token="sesame", learn=False) as server:
    refused = server.client.delete("/admin/tenants/zoe")
    assert refused.status_code == 400 and "ServeConfig.learn = True" in refused.text
  with running.running(pair, learn=False) as server:
    assert server.client.delete("/admin/tenants/zoe").status_code == 403
