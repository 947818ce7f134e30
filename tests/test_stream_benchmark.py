"""The benchmark of streams: fixed traces, and figures of known results."""

import hashlib
import json
import sys

import numpy as np
import pytest
from conftest import ROOT

sys.path += [str(ROOT / "benchmarks")]

import http_load

from experiments.stream_benchmark import run

# The traces of version 1. Another order or another prompt is another version.
DIGESTS = {
  "sharp": "ce1bdfb15938",
  "gradual": "3ed6f34636b6",
  "returns": "2fe65bfd6061",
  "quick": "d1c408232174",
  "bursty": "c4564630fdf7",
  "mixture": "d8038e62c118",
}


def result(*parts, trace="returns"):
  """A run: (topic, tokens per call) of every request, with 12 tokens each."""
  rows = [[topic, 12, 12 / rate, 10.0] for topic, rate in parts]
  return {"trace": trace, "requests": rows}


@pytest.mark.parametrize("name", run.TRACES)
def test_a_trace_never_changes(name):
  queries = run.trace(name)
  text = "\n".join(f"{query.topic}\t{query.prompt}" for query in queries)
  assert hashlib.sha256(text.encode()).hexdigest()[:12] == DIGESTS[name]
  assert len({query.prompt for query in queries}) == len(queries) == 400


def test_a_shift_is_a_stretch_that_is_long_enough():
  assert run.shifts(["a"] * 30 + ["b"] * 20) == [(30, 50)]
  assert run.shifts(["a", "b"] * 20) == []
  assert run.shifts(["a"] * 50) == []


def test_recovery_counts_the_requests_until_a_run_is_as_good_as_the_oracle():
  oracle = result(*[("a", 4)] * 30, *[("b", 4)] * 60)
  slow = result(*[("a", 4)] * 30, *[("b", 2)] * 40, *[("b", 4)] * 20)
  never = result(*[("a", 4)] * 30, *[("b", 2)] * 60)

  def requests(one):
    return run.figures(one, oracle=oracle)["requests to recover"]

  assert requests(oracle) == run.RECENT // 2
  assert 40 < requests(slow) <= 50
  assert requests(never) == 60


def test_what_a_topic_lost_is_seen_when_it_comes_again():
  kept = result(*[("a", 4)] * 20, *[("b", 2)] * 20, *[("a", 4)] * 20)
  lost = result(*[("a", 4)] * 20, *[("b", 4)] * 20, *[("a", 2)] * 20)
  assert run.figures(kept)["kept at a return"] == 1
  assert run.figures(lost)["kept at a return"] == 0.5
  assert "kept at a return" not in run.figures(result(*[("a", 4)] * 40))


def test_the_worst_stretch_is_not_hidden_by_the_mean():
  floor = result(*[("a", 2)] * 400)
  run_of = result(*[("a", 4)] * 300, *[("a", 1)] * 100)
  found = run.figures(run_of, floor)
  assert found["worst stretch over floor"] == 0.5
  assert run.figures(floor, floor)["worst stretch over floor"] == 1


def test_calls_are_verifications_or_tokens():
  def calls(steps):
    field = {"speculative_decoding": {"num_spec_steps": steps}}
    return run.calls_of({"metrics": field, "usage": {"completion_tokens": 9}})

  assert (calls(4), calls(0)) == (4, 9)
  with pytest.raises(RuntimeError, match="num_spec_steps"):
    run.calls_of({"usage": {"completion_tokens": 9}})


def test_results_are_measured_once_and_compared(tmp_path, monkeypatch, capsys):
  """The whole command, with a server that is asked for nothing real."""
  asked = []

  def ask(url, body):
    asked.append(body["messages"][0]["content"])
    metrics = {"speculative_decoding": {"num_spec_steps": 3}}
    usage = {"completion_tokens": 6}
    body = {"metrics": metrics, "usage": usage}
    return http_load.Reply(0.0, 200, ended=0.01, body=body)

  monkeypatch.setattr(http_load, "ask", ask)
  monkeypatch.setattr(http_load, "send", lambda *_: (200, json.dumps({"version": "1"})))
  command = ["run.py", "--url", "http://x:1", "--name", "ours", "--traces", "sharp"]
  monkeypatch.setattr(
    sys, "argv", [*command, "--per_topic", "5", "--out", str(tmp_path)]
  )
  run.main()
  assert asked == [query.prompt for query in run.trace("sharp", 5)]
  run.main()  # nothing is left to measure
  assert len(asked) == 20
  stored = json.loads((tmp_path / "sharp_ours.json").read_text())
  assert np.asarray(stored["requests"], object)[:, 1:3].tolist() == [[6, 3]] * 20
  assert "tokens per call" in capsys.readouterr().out
