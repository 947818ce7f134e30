"""docs/how_to/extend.md: every block runs and does what the text says."""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest

from osd_jax import online, runs
from osd_jax.distillation import losses
from osd_jax.engine import engine
from osd_jax.engine.requests import Request

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ran(repository, tmp_path_factory):
  """The namespace after running all blocks in order."""
  folder = tmp_path_factory.mktemp("extending")
  text = (repository / "docs" / "how_to" / "extend.md").read_text()
  names = {"folder": str(folder / "run")}
  for block in re.findall(r"```python\n(.*?)```", text, flags=re.S):
    exec(block, names)
  names["rows"] = list(runs.read(names["result"].path / "metrics.jsonl"))
  return names


def of(rows, kind):
  return [row for row in rows if row["kind"] == kind]


def test_run_serves_the_stream_and_follows_the_schedule(ran):
  requests, updates = of(ran["rows"], "request"), of(ran["rows"], "update")
  assert [row["query"] for row in requests] == list(range(12))
  assert {row["source"] for row in requests} == {"support"}
  assert [row["launched"] for row in updates] == [2, 4, 8]
  assert all(np.isfinite(row["loss"]) for row in updates)
  assert not ran["questions"]


def test_bigram_draft_learns(ran):
  """Its table is zero at first."""
  before = ran["pair"].draft_params
  overlaps = [row["overlap"] for row in of(ran["rows"], "request")]
  floors = [row["floor_overlap"] for row in of(ran["rows"], "request")]
  assert (ran["result"].path / "draft.safetensors").stat().st_size > before.nbytes
  assert overlaps[0] == floors[0] and overlaps[-1] > floors[-1]


def test_verdict_reports_an_inexact_rule(ran, tmp_path):
  page = (ran["result"].path / "report.html").read_text()
  assert "NOT EXACT by choice" in page
  exact = dataclasses.replace(
    ran["config"],
    stream=lambda vocabulary: ran["streams"].of_prompts(
      ["How many films are there?"], vocabulary, source_length=40
    ),
    decoding=dataclasses.replace(ran["config"].decoding, acceptance_rule="rejection"),
    run_directory=str(tmp_path / "run"),
  )
  page = (online.run(exact).path / "report.html").read_text()
  assert "NOT EXACT" not in page


def test_lenient_rule_accepts_more_and_is_inexact(ran):
  """The draft often proposes the second-best token; rules apply to greedy rows too."""
  pair, counts, texts = ran["pair"], [], []
  prompts = [
    Request(np.array([5, 9, token, 1], np.int32), max_new_tokens=24)
    for token in range(300, 1500, 100)
  ]
  for rule in ("rejection", ran["lenient"]):
    config = dataclasses.replace(ran["config"].decoding, acceptance_rule=rule)
    noisy = jax_noise(pair.target_params)
    decoder = engine.Engine(config, pair.target, pair.target_params, pair.target, noisy)
    finished = sorted(decoder.run(prompts), key=lambda done: done.number)
    accepted, drafted = (
      sum(getattr(x, n) for x in finished) for n in ("accepted", "drafted")
    )
    counts.append(accepted / drafted)
    texts.append([done.tokens.tolist() for done in finished])
  assert counts[1] > counts[0]
  assert texts[0] != texts[1]


def jax_noise(params):
  import jax

  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda leaf: leaf + 0.3 * jnp.std(leaf) * rng.normal(size=leaf.shape), params
  )


def test_loss_uses_a_user_defined_divergence(ran):
  target = jnp.log(jnp.array([[0.5, 0.3, 0.2]]))
  draft = jnp.log(jnp.array([[0.2, 0.3, 0.5]]))
  found = losses.divergence(ran["loss"])(target, draft)
  expected = 1 - np.sqrt([0.1, 0.09, 0.1]).sum()
  np.testing.assert_allclose(found, [expected], rtol=1e-5)
