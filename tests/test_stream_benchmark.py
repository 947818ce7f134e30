"""The benchmark of streams: its traces never change, and the whole command."""

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


@pytest.mark.parametrize("name", run.TRACES)
def test_a_trace_never_changes(name):
  queries = run.trace(name)
  text = "\n".join(f"{query.topic}\t{query.prompt}" for query in queries)
  assert hashlib.sha256(text.encode()).hexdigest()[:12] == DIGESTS[name]
  assert len({query.prompt for query in queries}) == len(queries) == 400


def result(*parts):
  """A run: (topic, tokens per call, requests) of its parts, with 12 tokens each."""
  rows = [[topic, 12, 12 / rate, 10.0] for topic, rate, n in parts for _ in range(n)]
  return {"trace": "returns", "requests": rows}


def test_figures_of_runs_with_known_results():
  oracle = result(("a", 4, 30), ("b", 4, 60))
  slow = result(("a", 4, 30), ("b", 2, 40), ("b", 4, 20))
  never = result(("a", 4, 30), ("b", 2, 60))
  recovery = [
    run.figures(one, oracle=oracle)["requests to recover"]
    for one in (oracle, slow, never)
  ]
  assert recovery[0] == run.RECENT // 2 and recovery[2] == 60
  assert 40 < recovery[1] <= 50
  for rate in (4, 2):
    returns = result(("a", 4, 20), ("b", 2, 20), ("a", rate, 20))
    assert run.figures(returns)["kept at a return"] == rate / 4
  # A bad stretch is not hidden by the mean.
  floor, mixed = result(("a", 2, 400)), result(("a", 4, 300), ("a", 1, 100))
  assert run.figures(mixed, floor)["worst stretch over floor"] == 0.5


def test_results_are_measured_once_and_compared(tmp_path, monkeypatch, capsys):
  """The whole command, with a server whose answers are made up."""
  prompts, steps = [], 3

  def ask(url, body):
    prompts.append(body["messages"][0]["content"])
    metrics = {"speculative_decoding": {"num_spec_steps": steps}}
    body = {"metrics": metrics, "usage": {"completion_tokens": 6}}
    return http_load.Reply(0.0, 200, ended=0.01, body=body)

  monkeypatch.setattr(http_load, "ask", ask)
  monkeypatch.setattr(http_load, "send", lambda *_: (200, json.dumps({"version": "1"})))
  command = "run.py --url http://x:1 --name ours --traces sharp --per_topic 5 --out"
  monkeypatch.setattr(sys, "argv", [*command.split(), str(tmp_path)])
  run.main()
  assert prompts == [query.prompt for query in run.trace("sharp", 5)]
  run.main()  # nothing is left to measure
  assert len(prompts) == 20
  rows = json.loads((tmp_path / "sharp_ours.json").read_text())["requests"]
  assert np.asarray(rows, object)[:, 1:3].tolist() == [[6, 3]] * 20
  assert "tokens per call" in capsys.readouterr().out
  with pytest.raises(RuntimeError, match="num_spec_steps"):
    run.calls_of({"usage": {"completion_tokens": 9}})
