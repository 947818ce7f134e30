"""experiments/drafters at the tiny size: cells, what is skipped, and the oracle."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import tiny_online

from experiments.drafters import run
from osd_jax import pairs

slow = pytest.mark.slow
ORACLE, REQUESTS, K = run.ORACLE, 24, 3
NOISE = 0.1


def given(folder, *words):
  return run.options().parse_args(["--out", str(folder / "cells.jsonl"), *words])


@pytest.fixture(scope="module")
def small(tmp_path_factory):
  """Returns a function that makes a tiny run instead of that of a stream.

  The draft is the target with noise on its parameters: it is often right, not always.
  """
  named = tiny_online.save_lively_pair(tmp_path_factory.mktemp("pair"))
  pair = pairs.load_pair(named)
  leaves, shape = jax.tree.flatten(pair.target_params)
  rng = np.random.default_rng(0)
  noisy = [leaf * (1 + NOISE * rng.normal(size=leaf.shape)) for leaf in leaves]
  noisy = [leaf.astype(np.float32) for leaf in noisy]
  pair = pair.with_draft(pair.target, jax.tree.unflatten(shape, noisy))

  def config_of(name, given, temperature, rows, seed):
    assert (name, temperature, seed) == ("demo", 0.0, 0)
    made = tiny_online.config(pair, "unused", rows=rows, keep_drafts=False)
    return dataclasses.replace(made, warm_start=None)

  return config_of


@pytest.fixture(scope="module")
def cells(small, tmp_path_factory):
  """The cells of an untimed run of all systems, by name, and their file."""
  folder = tmp_path_factory.mktemp("cells")
  with jax.numpy_rank_promotion("allow"):
    run.run(given(folder, "--untimed", "--requests", "6"), small)
  return {cell["system"]: cell for cell in run.read(folder / "cells.jsonl")}, folder


def calls(cell):
  return [count for _, count in cell["per_request"]]


@slow
def test_every_system_serves_the_same_answers(cells):
  found, _ = cells
  assert set(found) == set(run.OURS)
  lengths = [[tokens for tokens, _ in cell["per_request"]] for cell in found.values()]
  assert len(lengths[0]) == REQUESTS and all(other == lengths[0] for other in lengths)
  assert found["plain"]["tokens_per_call"] == 1
  assert found["online"]["updates"] >= 4 and "updates" not in found["frozen"]
  assert all("ms_per_token" not in cell for cell in found.values())


@slow
def test_oracle_counts_the_calls_of_the_systems_that_ran(cells, small):
  """What it says of the draft alone and of the cache alone is what they took."""
  found, folder = cells
  for name in ("frozen", "cache"):
    better = np.array(calls(found[ORACLE])) <= np.array(calls(found[name]))
    assert better.all() and sum(calls(found[ORACLE])) < sum(calls(found[name]))
  config = small("demo", None, 0.0, 1, 0)
  pair = run.systems.load({"demo": config})["demo"]
  plain = run.create("plain", pair, config, folder)
  plain.serve(0, REQUESTS)
  draft = (pair.draft, pair.draft_params)
  alone = run.oracle.choose(pair.target, draft, plain.answers, K, run.CACHE)
  assert alone["cache"] == calls(found["cache"])
  assert alone["draft"] == calls(found["frozen"])
  # Negative control: another K is told apart.
  other = run.oracle.choose(pair.target, draft, plain.answers, K - 1, run.CACHE)
  assert other["draft"] != calls(found["frozen"])
  plain.close()


@slow
def test_same_command_measures_only_what_is_missing(cells, small):
  _, folder = cells
  path = folder / "cells.jsonl"
  lines = path.read_text().splitlines()

  def refuse(*_):
    raise AssertionError("nothing is missing")

  words = ("--untimed", "--requests", "6")
  run.run(given(folder, *words), refuse)
  assert path.read_text().splitlines() == lines
  gone = [line for line in lines if json.loads(line)["system"] != "lookup"]
  path.write_text("".join(line + "\n" for line in gone))
  run.run(given(folder, *words), small)
  *kept, new = path.read_text().splitlines()
  assert kept == gone and json.loads(new)["system"] == "lookup"
  # Negative control: cells of other settings do not count as measured.
  with pytest.raises(AssertionError, match="nothing is missing"):
    run.run(given(folder, *words, "--bindings", "DecodingConfig.rows=1"), refuse)


@slow
def test_lookup_forgets_what_it_served(small, tmp_path):
  """The same prompt twice: only the cache drafts better the second time."""
  config = small("demo", None, 0.0, 1, 0)
  pair = run.systems.load({"demo": config})["demo"]
  request = run.systems.requests_of(config, pair)[0]
  found = {}
  for name in ("lookup", "cache"):
    system = run.create(name, pair, config, tmp_path)
    # Two objects: answers are told apart by the object that asked.
    system._requests = [request, dataclasses.replace(request)]
    system.serve(0, 2)
    found[name] = [count for _, count in system.per_request()]
    system.close()
  assert found["lookup"][0] == found["lookup"][1] == found["cache"][0]
  assert found["cache"][1] < found["cache"][0]


@slow
def test_timed_systems_take_turns(small, tmp_path):
  words = ("--requests", "6", "--block", "10", "--systems", "cache", "online + cache")
  run.run(given(tmp_path, *words), small)
  found = {cell["system"]: cell for cell in run.read(tmp_path / "cells.jsonl")}
  assert set(found) == {"cache", "online + cache"}  # plain only serves to compare
  for cell in found.values():
    assert cell["block_ends"] == [10, 20, 24]
    assert cell["seconds"] == sorted(cell["seconds"])
    assert cell["ms_per_token"] == 1e3 * cell["seconds"][-1] / cell["tokens"]
    assert cell["over_plain"] > 0
  assert run.table(found.values()).row_count == 2


@pytest.mark.parametrize(("share", "drafted"), [(0.0, 3), (0.5, 1), (0.7, 5), (1.0, 3)])
def test_calls_of_an_answer_follow_from_the_right_positions(share, drafted):
  right = np.random.default_rng(1).random(40) < share
  place, expected = 0, 0
  while place < 40:  # one token of the target after each run of right ones
    ahead = 0
    while ahead < drafted and place + ahead < 40 and right[place + ahead]:
      ahead += 1
    place, expected = place + ahead + 1, expected + 1
  assert run.oracle.calls(right, drafted) == expected
  if share in (0.0, 1.0):
    assert expected == (40 if share == 0 else -(-40 // (drafted + 1)))


def test_summary_separates_topics_and_requests_after_shifts():
  labels = ["one"] * 60 + ["other"] * 60
  counts = [(4, 4)] * 60 + [(6, 3)] * 50 + [(6, 1)] * 10
  cell = run.summary({"per_request": counts}, labels)
  assert cell["after_shifts"] == 2 and cell["by_topic"] == {
    "one": 1,
    "other": 360 / 160,
  }
  assert cell["tokens_per_call"] == 600 / 400


def test_edits_ask_for_code_that_contains_a_new_name(tmp_path):
  code = "def area(side):\n  return side * side"
  rows = [code, "print 1", "x = 1", "def long():\n  return '" + "a" * 300 + "'"]
  path = tmp_path / "python.eval.jsonl"
  path.write_text("".join(json.dumps({"reference": row}) + "\n" for row in rows))
  (edit,) = run.traffic.edits(path)
  assert code in edit["prompt"] and "new_area" in edit["prompt"]
  assert edit["reference"] == code.replace("area", "new_area")


def test_every_stream_has_a_config(tmp_path):
  (tmp_path / "python.eval.jsonl").write_text("")
  for name, kind in run.traffic.PAIRS.items():
    words = ("--data", str(tmp_path), "--qwen", "folder", "--target", "file")
    for extra in ((), ("--by_worth",)):
      config = run.traffic.config_of(name, given(tmp_path, *words, *extra), 0.7, 4, 1)
      assert config.decoding.rows == 4 and config.sampling.temperature == 0.7
      assert (config.decoding.adaptive is None) == (not extra or kind == "demo")
      assert config.stream.seed == config.learning.seed == 1
      target = {"demo": "shipped:demo_target.safetensors", "small": "file"}
      assert config.pair.target == target.get(kind, "folder")
