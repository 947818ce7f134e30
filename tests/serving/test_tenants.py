"""Tenants of one server learn nothing of each other from the n-gram cache."""

import dataclasses

import pytest
from compilations import Compilations
from serving import running
from serving.running import TEXTS

from osd_jax.decoding import ngrams
from osd_serve.tenants import Tenants

CACHE = 4096


@pytest.fixture(scope="module")
def cache_pair(pair):
  """The tiny target, with the n-gram cache as its draft."""
  return pair.with_draft(ngrams.build(pair.target, CACHE), ngrams.empty(CACHE))


def calls(server, text, **fields):
  """Target calls of a request, as its client sees them."""
  body = server.complete(text, **fields)
  return body["metrics"]["speculative_decoding"]["num_spec_steps"]


@pytest.fixture(scope="module")
def cold(cache_pair):
  """Calls of a question that nobody has asked before."""
  with running.running(cache_pair) as server:
    return calls(server, TEXTS[0])


def test_question_of_another_tenant_saves_no_call(cache_pair, cold):
  with running.running(cache_pair) as server:
    assert calls(server, TEXTS[0], tenant="a") == cold
    assert calls(server, TEXTS[0], tenant="b") == cold
    assert calls(server, TEXTS[0]) == cold  # nor for requests without a tenant
    for fields in ({"tenant": "a"}, {"tenant": "b"}, {}):  # control: their own do
      assert calls(server, TEXTS[0], **fields) < cold


def test_shared_cache_saves_calls_of_other_tenants(cache_pair, cold):
  with running.running(cache_pair, share_cache=True) as server:
    assert calls(server, TEXTS[0], tenant="a") == cold
    assert calls(server, TEXTS[0], tenant="b") < cold


def test_learned_draft_next_to_the_cache_keeps_tenants_apart(pair):
  """Each place of the table has one owner, as with the cache alone."""
  decoding = dataclasses.replace(running.DECODING, cache_tokens=1024)
  with running.running(pair, decoding=decoding, learn=False) as server:
    for tenant in ("a", "b"):
      server.text(TEXTS[0], tenant=tenant)
    table = server.service.server.engine.memory.table
    owners = {divmod(server.service.tenants.of(name).owner, 2**32) for name in "ab"}
    found = {tuple(owner) for owner in table.owners[: int(table.end)].tolist()}
    assert found == owners and len(owners) == 2


def test_new_tenants_compile_nothing(cache_pair):
  with running.running(cache_pair) as server:
    server.text(TEXTS[0])
    with Compilations() as compilations:
      for number in range(3):
        server.text(TEXTS[number], tenant=f"tenant-{number}")
    assert compilations.count == 0


def test_owners_differ_by_tenant_and_by_server():
  one, other = Tenants(share_cache=False), Tenants(share_cache=False)
  names = ["a", "b", "A", "a.", "0"]
  owners = [made.of(name).owner for made in (one, other) for name in names]
  assert len(set(owners)) == len(owners) and min(owners) > 0
  assert one.of("a") == one.of("a")
  assert one.of("").owner == Tenants(share_cache=True).of("a").owner == 0
