"""`osd compile` for the CPU: counts, memory, estimates and refusals."""

import dataclasses
import importlib.util
import itertools
import re

import jax
import numpy as np
import pytest
import tiny_online

from osd_jax import base, pairs, runs, sharding
from osd_jax.costs.table import RoundCosts, expected_tokens
from osd_jax.engine.requests import AdaptiveConfig
from osd_jax.models import weights
from osd_jax.models.convert import hugging_face
from osd_tools import ahead_of_time, chips, hlo
from osd_tools.ahead_of_time import estimates, plan, programs

FOUR = pytest.mark.skipif(len(jax.devices()) < 4, reason="needs four devices")


@pytest.fixture(scope="module", autouse=True)
def compilation_cache_on_again():
  yield
  jax.config.update("jax_enable_compilation_cache", True)


def compile_config(pair, folder, topology="cpu:1", mesh=(1, 1), **changes):
  served = tiny_online.config(pair, folder / "served")
  served = dataclasses.replace(
    served, partition=sharding.PartitionConfig(*mesh), **changes
  )
  return ahead_of_time.CompileConfig(
    served, topology=topology, run_directory=str(folder / "compiled")
  )


def rows_of(found, kind):
  return runs.of_kind(list(runs.read(found.path / "metrics.jsonl")), kind)


@pytest.fixture(scope="module")
def compiled(lively_pair, tmp_path_factory):
  """The run directory of one whole `osd compile`."""
  config = compile_config(lively_pair, tmp_path_factory.mktemp("one"))
  return ahead_of_time.run(config)


def test_every_program_of_a_run_is_compiled_and_counted(
  compiled, lively_pair, tmp_path
):
  found = {row["program"]: row for row in rows_of(compiled, "program")}
  drafted = tiny_online.config(lively_pair, tmp_path).decoding.num_draft_tokens
  expected = ["prefill", "insertion", f"round, K = {drafted}", "read", "plain step"]
  expected += [f"sampled round, K = {drafted}"]
  expected += ["draft step", f"verification of {drafted + 1} tokens", "swap"]
  assert set(expected + ["append", "draw", "slice"]) == set(found)
  assert all(row["compile_s"] > 0 and row["kernels"] > 0 for row in found.values())
  assert not any(row["foreign_calls"] or row["collectives"] for row in found.values())
  assert found[f"round, K = {drafted}"]["inner_loops"] >= 1  # over draft steps
  assert found["append"]["in_place_gb"] > 0.9 * found["append"]["arguments_gb"]
  page = (compiled.path / "report.html").read_text()
  for shown in ("not run", "Memory of a chip", "Highest speeds, estimated"):
    assert shown in page


def test_memory_by_kind_adds_up_to_the_total(compiled):
  """The parts add up to the total, and programs get the parts as arguments."""
  held = {row["what"]: row["gigabytes_a_chip"] for row in rows_of(compiled, "memory")}
  given = {row["program"]: row["arguments_gb"] for row in rows_of(compiled, "program")}
  (fits,) = rows_of(compiled, "fits")
  assert sum(held.values()) == pytest.approx(fits["needed_gb"])
  assert fits["needed_gb"] < fits["memory_gb"] and not fits["advice"]
  assert given["append"] > held["replay buffer"] > 0.9 * given["append"]
  rest = held["optimiser and average"] + held["draft, as loaded"]
  assert given["slice"] == pytest.approx(rest, rel=0.5)


def test_predicted_speed_is_tokens_over_time():
  plain = RoundCosts((4.0,), num_draft_tokens=(0,), request_ms=5.0)
  assert estimates.predict(plain, 30, 30) == pytest.approx(30e3 / (5 + 120))
  online = RoundCosts((11.0,), num_draft_tokens=(7,), rows=2, request_ms=10.0)
  lost = estimates.predict(online, 30, 10, 70, 30.0)
  assert lost == pytest.approx(30e3 / (10 + 55 + 30))


def test_estimates_are_consistent_with_step_times(compiled):
  found = {row["program"]: row for row in rows_of(compiled, "program")}
  rows = rows_of(compiled, "estimate")
  assert [row["acceptance"] for row in rows] == [0.5, 0.7, 0.8, 0.9]
  step, draft = found["plain step"]["least_ms"], found["draft step"]["least_ms"]
  assert all(row["c"] == pytest.approx(draft / step) for row in rows)
  speeds = [row["frozen_tokens_s"] for row in rows]
  assert speeds == sorted(speeds) and len(set(speeds)) == 4
  assert all(row["online_tokens_s"] < row["frozen_tokens_s"] for row in rows)
  for row in rows:
    pays = row["acceptance"] >= row["break_even_acceptance"]
    # The prefill costs the same with and without a draft, so it does not matter here.
    assert pays == (row["frozen_tokens_s"] >= row["plain_tokens_s"])


def test_break_even_is_the_lowest_rate_that_pays():
  for drafted, ratio in itertools.product((1, 5, 8), (1.0, 1.3, 2.0)):
    rate = estimates.break_even(drafted, ratio)
    assert expected_tokens(rate, drafted) >= ratio - 1e-9
    assert rate == 0 or expected_tokens(rate - 0.002, drafted) < ratio
    assert estimates.break_even(drafted, drafted + 1.1) is None


def test_flops_count_loop_iterations_and_the_largest_branch():
  left, right = np.ones((2, 3)), np.ones((3, 5))

  def product(x):
    return x @ right.astype(np.float32)

  def repeated(x):
    return jax.lax.scan(lambda carry, _: (carry, product(x)), 0, length=7)[1]

  def either(x):
    return jax.lax.cond(
      x[0, 0] > 0, lambda: product(x) + product(2 * x), lambda: product(x)
    )

  once = 2 * 2 * 3 * 5
  for function, times in ((product, 1), (jax.jit(repeated), 7), (either, 2)):
    traced = jax.jit(function).trace(left.astype(np.float32))
    assert hlo.product_flops(traced.jaxpr) == times * once


def test_roofline_is_the_largest_bound():
  chip = chips.Chip(
    memory=1, bandwidth=100.0, flops=1000.0, link=10.0, launch=0.5, clock=7
  )
  assert chip.cycles_to_read(200) == 14
  assert chip.least_seconds(read=200, flops=100) == 2
  assert chip.least_seconds(read=200, flops=5000) == 5
  assert chip.least_seconds(read=200, flops=100, kernels=8) == 4
  # Moved bytes cross the link twice.
  assert chip.least_seconds(read=200, flops=100, moved=10) == 2 + 2


def test_adaptive_k_adds_its_programs(lively_pair, tmp_path):
  config = compile_config(lively_pair, tmp_path)
  chosen = AdaptiveConfig(candidates=(0, 2))
  decoding = dataclasses.replace(config.run.decoding, adaptive=chosen)
  run = dataclasses.replace(config.run, decoding=decoding)
  found = plan.Plan(run, chips.Topology("cpu:1"))
  listed = programs.programs(found)
  own = {f"{call} alone" for call in ("prefill of the target", "prefill of the draft")}
  own |= {"insertion of the target alone", "catch up"}
  assert own <= set(listed)
  assert {"round, K = 0", "round, K = 2"} <= set(listed)
  assert all(programs.compiled(found, listed[name]).kernels for name in own)


@FOUR
def test_weights_and_caches_are_sharded_and_rounds_communicate_only_sums(
  lively_pair, tmp_path
):
  one, two, four = (
    plan.Plan(
      compile_config(lively_pair, tmp_path, "cpu:4", (1, chips_of_a_row)).run,
      chips.Topology("cpu:4"),
    )
    for chips_of_a_row in (1, 2, 4)
  )
  whole, split = one.memory(), two.memory()
  assert split["target, as loaded"] < 0.6 * whole["target, as loaded"]
  assert split["caches and rows"] < 0.75 * whole["caches and rows"]
  # A mesh serves the trained kernels themselves.
  assert whole["target, copies for steps"] == split["target, copies for steps"] == 0
  # A small draft is replicated.
  assert split["draft, as loaded"] == pytest.approx(whole["draft, as loaded"])
  drafted = four.run.decoding.num_draft_tokens
  made = programs.compiled(four, programs.programs(four)[f"round, K = {drafted}"])
  assert made.collectives and not made.inner_collectives and not made.foreign_calls


def test_published_model_names_need_no_weights(tmp_path):
  pair = pairs.PairConfig(
    target="nowhere/flan-t5-small", draft="attached", dtype="bfloat16"
  )
  config = compile_config(pair, tmp_path, learn=False)
  made = plan.Plan(config.run, chips.Topology("cpu:1"), layers=1)
  assert made.target.vocab_size == 32_128 and made.draft.state_width == 512
  names = programs.programs(made)
  assert "slice" not in names  # because learn=False
  found = programs.compiled(made, names["draft step"])
  assert found.kernels and found.least_ms
  kernel = made.target_params["decoder"]["layers_0"]["mlp"]["wo"]["kernel"]
  served = made.served.target["decoder"]["layers_0"]["mlp"]["wo"]["kernel"]
  assert kernel.dtype == jax.numpy.bfloat16 and served.dtype == jax.numpy.bfloat16
  # They are loaded as they are served, so no copy takes memory.
  assert served.shape == kernel.shape
  assert made.memory()["target, copies for steps"] == 0


@pytest.mark.parametrize(("family", "form"), [("t5", "file"), ("llama", "folder")])
def test_bytes_of_a_target_follow_its_storage(tmp_path, family, form):
  """In memory and in the bytes that a step reads; the draft stays in float32."""
  pair = tiny_online.attached(tiny_online.save_lively_pair(tmp_path, family))
  held = weights.load(pair.target)
  found = {}
  for storage in ("float32", "bfloat16"):
    path = weights.save(tmp_path / f"{storage}.safetensors", held, storage)
    if form == "folder":
      stored = weights.load(path, as_stored=True)
      path = hugging_face.write(tmp_path / storage, stored)
    run = compile_config(dataclasses.replace(pair, target=str(path)), tmp_path).run
    made = plan.Plan(run, chips.Topology("cpu:1"))
    loaded = pairs.load_pair(run.pair)
    expected = sum(leaf.nbytes for leaf in jax.tree.leaves(loaded.target_params))
    memory = made.memory()
    assert round(memory["target, as loaded"] * 1e9) == expected
    step = programs.compiled(made, programs.programs(made)["plain step"])
    over = estimates.advice(made, {**memory, "target, as loaded": 17.0})
    found[storage] = memory, step, over
  (wide, wide_step, wide_advice), (short, short_step, short_advice) = found.values()
  target = wide["target, as loaded"]
  assert short["target, as loaded"] == target / 2
  assert short["optimiser and average"] == wide["optimiser and average"]
  read = wide_step.arguments_gb - short_step.arguments_gb
  assert 0.2 * target < read <= target / 2  # a T5's step does not read its encoder
  # There is nothing left to halve by another type.
  assert "dtype" in wide_advice and "PartitionConfig.model" in short_advice


def test_existing_folder_with_a_published_name_is_read(tmp_path):
  """Its weights decide, not the shape that goes by that name."""
  held = weights.load(tiny_online.save_lively_pair(tmp_path).target)
  hugging_face.write(tmp_path / "flan-t5-small", held)
  pair = pairs.PairConfig(target="flan-t5-small", draft="attached")
  assert plan._shapes(pair, 0)[0].width == 512
  here = dataclasses.replace(pair, folder=str(tmp_path))
  assert plan._shapes(here, 0)[0].width == held.config.width


@pytest.mark.parametrize(
  ("dtype", "advised"), [("float32", "bfloat16"), ("bfloat16", "PartitionConfig.model")]
)
def test_advice_names_the_setting_that_reduces_memory(
  lively_pair, tmp_path, dtype, advised
):
  pair = dataclasses.replace(lively_pair, dtype=dtype)
  found = plan.Plan(compile_config(pair, tmp_path).run, chips.Topology("cpu:1"))
  held = found.memory()
  assert not estimates.advice(found, held)
  assert advised in estimates.advice(found, {**held, "target, as loaded": 17.0})
  assert "rows" in estimates.advice(found, {**held, "caches and rows": 17.0})


@pytest.mark.parametrize(
  ("error", "said"),
  [
    ("RESOURCE_EXHAUSTED: 20 GB of 16", "does not fit.* compiler: 20 GB of 16"),
    ("INTERNAL: no tiles for %dot.1, metadata={x}\nmore", "says: .* %dot.1"),
  ],
)
def test_programs_that_a_compiler_refuses_are_named(
  lively_pair, tmp_path, monkeypatch, error, said
):
  """The others are compiled nevertheless."""
  real, turn = jax.stages.Lowered.compile, itertools.count()

  def compile_or_refuse(lowered, *arguments):
    if next(turn) in (2, 10):  # the round, and the slice
      raise jax.errors.JaxRuntimeError(error)
    return real(lowered, *arguments)

  monkeypatch.setattr(jax.stages.Lowered, "compile", compile_or_refuse)
  found = ahead_of_time.run(compile_config(lively_pair, tmp_path))
  refused = {row["program"]: row["text"] for row in rows_of(found, "refused")}
  names = [row["program"] for row in rows_of(found, "program")]
  assert len(refused) == 2 and len(names) == 10 and not set(names) & set(refused)
  for name, text in refused.items():
    assert re.fullmatch(f"{name} .*{said}", text)
    assert text in (found.path / "report.html").read_text()


def test_unknown_and_too_small_machines_are_refused(lively_pair, tmp_path):
  for topology, message in (
    ("v9:2x2", "expected a kind of v4, v5e"),
    ("v5e", "a colon and a size"),
    ("v5e:2xtwo", "a colon and a size"),
  ):
    with pytest.raises(
      ValueError, match=f"CompileConfig.topology: received.*{message}"
    ):
      compile_config(lively_pair, tmp_path, topology)
  config = compile_config(lively_pair, tmp_path, "cpu:1", (2, 2))
  with pytest.raises(ValueError, match="which needs 4 devices, but there are 1"):
    ahead_of_time.run(config)
  assert not (tmp_path / "compiled").exists()


@pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is not None, reason="the compiler is installed"
)
def test_missing_compiler_is_an_error(lively_pair, tmp_path):
  with pytest.raises(ValueError, match="pip install libtpu"):
    ahead_of_time.run(compile_config(lively_pair, tmp_path, "v5e:2x2"))


def test_finished_report_is_not_overwritten(compiled, lively_pair):
  before = (compiled.path / "metrics.jsonl").read_bytes()
  config = compile_config(lively_pair, compiled.path.parent)
  ahead_of_time.run(config)
  assert (compiled.path / "metrics.jsonl").read_bytes() == before


def test_target_returns_the_state_layer_of_the_pair():
  pair = pairs.PairConfig(target="vicuna-7b", draft="attached", state_layer=8)
  target, _ = plan._shapes(pair, 0)
  assert target.last_state_layer == 8
  with pytest.raises(base.InputError, match=r"PairConfig\.state_layer: received 99"):
    plan._shapes(dataclasses.replace(pair, state_layer=99), 0)


def test_mixture_with_an_n_gram_cache_is_compiled(tmp_path):
  pair = pairs.PairConfig(target="nowhere/flan-t5-small", draft="attached")
  config = compile_config(pair, tmp_path, learn=False)
  costs = (RoundCosts((1.0, 1.2, 1.4)),)
  decoding = dataclasses.replace(
    config.run.decoding,
    cache_tokens=256,
    num_draft_tokens=2,
    adaptive=AdaptiveConfig((0, 1, 2), costs),
  )
  run = dataclasses.replace(config.run, decoding=decoding)
  made = plan.Plan(run, chips.Topology("cpu:1"), layers=1)
  # As in an engine, rounds choose how much to draft, in a loop.
  assert made.spec.widths == made.spec.drafter.widths == (1, 2)
  listed = programs.programs(made)
  assert [name for name in listed if name.startswith("round")] == ["round, K = 2"]
  for name in ("round, K = 2", "draft step", "catch up"):
    assert programs.compiled(made, listed[name]).kernels
  # A sampled round does more than a greedy one.
  sampled = programs.compiled(made, listed["sampled round, K = 2"])
  assert sampled.kernels > programs.compiled(made, listed["round, K = 2"]).kernels
