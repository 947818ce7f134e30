"""experiments/drafters with a tiny pair: its cells, what it skips, and its oracle."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import tiny_online

from experiments.drafters import run
from osd_jax import pairs

REQUESTS, K = 24, 3


@pytest.fixture(scope="module")
def config_of(tmp_path_factory):
  """Returns a function that returns a tiny run instead of that of a stream.

  The draft is the target with noise on its parameters: it is often right, not always.
  """
  pair = pairs.load_pair(tiny_online.save_lively_pair(tmp_path_factory.mktemp("pair")))
  leaves, shape = jax.tree.flatten(pair.target_params)
  rng = np.random.default_rng(0)
  noisy = [leaf * (1 + 0.1 * rng.normal(size=leaf.shape)) for leaf in leaves]
  noisy = [leaf.astype(np.float32) for leaf in noisy]
  pair = pair.with_draft(pair.target, jax.tree.unflatten(shape, noisy))

  def tiny(name, arguments, temperature, rows, seed):
    config = tiny_online.config(pair, "unused", rows=rows, keep_drafts=False)
    return dataclasses.replace(config, warm_start=None)

  return tiny


def arguments(folder, *words):
  out = str(folder / "cells.jsonl")
  return run.options().parse_args(["--out", out, "--requests", "6", *words])


def calls(cell):
  return [count for _, count in cell["per_request"]]


@pytest.mark.slow
def test_every_system_serves_the_same_answers_and_the_oracle_counts_their_calls(
  config_of, tmp_path
):
  path, untimed = tmp_path / "cells.jsonl", arguments(tmp_path, "--untimed")
  run.run(untimed, config_of)
  cells = {cell["system"]: cell for cell in run.read(path)}
  assert set(cells) == set(run.OURS)
  lengths = [[tokens for tokens, _ in cell["per_request"]] for cell in cells.values()]
  assert len(lengths[0]) == REQUESTS and all(other == lengths[0] for other in lengths)
  assert cells["plain"]["tokens_per_call"] == 1
  assert cells["online"]["updates"] >= 4 and "updates" not in cells["frozen"]
  # The oracle's recount of the draft alone and of the cache alone is what they took.
  config = config_of("demo", None, 0.0, 1, 0)
  pair = run.systems.load({"demo": config})["demo"]
  plain = run.create("plain", pair, config, tmp_path)
  plain.serve(0, REQUESTS)
  draft = (pair.draft, pair.draft_params)
  alone = run.oracle.choose(pair.target, draft, plain.answers, K, run.CACHE)
  assert alone["cache"] == calls(cells["cache"])
  assert alone["draft"] == calls(cells["frozen"])
  assert sum(alone[run.ORACLE]) == sum(calls(cells[run.ORACLE])) < sum(alone["draft"])
  # Negative control: another K is told apart.
  other = run.oracle.choose(pair.target, draft, plain.answers, K - 1, run.CACHE)
  assert other["draft"] != calls(cells["frozen"])
  plain.close()

  # The same command measures only what is missing.
  lines = path.read_text().splitlines()
  rest = [line for line in lines if json.loads(line)["system"] != "lookup"]
  path.write_text("".join(line + "\n" for line in rest))
  run.run(untimed, config_of)
  *before, new = path.read_text().splitlines()
  assert before == rest and json.loads(new)["system"] == "lookup"


@pytest.mark.slow
def test_timed_systems_take_turns(config_of, tmp_path):
  systems = ("cache", "online + cache")
  run.run(arguments(tmp_path, "--block", "10", "--systems", *systems), config_of)
  cells = {cell["system"]: cell for cell in run.read(tmp_path / "cells.jsonl")}
  assert set(cells) == set(systems)  # plain decoding only serves to compare
  for cell in cells.values():
    assert cell["block_ends"] == [10, 20, 24]
    assert cell["ms_per_token"] == 1e3 * cell["seconds"][-1] / cell["tokens"]
    assert cell["over_plain"] > 0
  assert run.table(cells.values()).row_count == 2


def test_every_stream_has_a_config(tmp_path):
  (tmp_path / "python.eval.jsonl").write_text("")
  for name in run.traffic.PAIRS:
    words = ("--data", str(tmp_path), "--qwen", "folder", "--target", "file")
    config = run.traffic.config_of(name, arguments(tmp_path, *words), 0.7, 4, 1)
    assert config.decoding.rows == 4 and config.sampling.temperature == 0.7
    assert config.stream.seed == config.learning.seed == 1
