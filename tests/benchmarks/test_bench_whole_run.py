"""bench_whole_run at the tiny size: five systems serve the same stream."""

import dataclasses

import bench_whole_run
import figures as pictures
import jax
import numpy as np
import pytest
import systems
import tiny_online
from compilations import Compilations

from osd_jax import base
from osd_jax.engine.requests import Request

pytestmark = pytest.mark.slow

NAMES = [
  "plain",
  "independent frozen",
  "independent online",
  "attached frozen",
  "attached online",
]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
  """Pairs, accounts and rows of one run; an independent draft replaces the attached."""
  folder = tmp_path_factory.mktemp("pair")
  pair = tiny_online.save_lively_pair(folder)
  config = tiny_online.config(pair, folder / "run", keep_drafts=False, warm_start=None)
  config = dataclasses.replace(config, pair=pair)  # a draft without shortlist
  made = {"independent": config, "attached": config}
  with jax.numpy_rank_promotion("allow"):
    loaded = systems.load(made)
    systems.rehearse(loaded["attached"], config)
    spent, figures = bench_whole_run.one_run(made, loaded, 10, NAMES)
  rows = bench_whole_run.rows_of("tiny", 3, "wall", spent, figures)
  return loaded, spent, rows


def values(rows):
  return {row["figure"]: row["value"] for row in rows}


def test_target_is_in_memory_once(ran):
  """Pairs share it, and compiled programs take it as an argument."""
  one, other = ran[0].values()
  assert one.target_params is other.target_params
  served = [pair.target.prepare(pair.target_params) for pair in (one, other)]
  assert served[0] is served[1]
  for pair in (one, other):
    assert not jax.make_jaxpr(pair.target.prepare)(pair.target_params).consts


def test_nothing_compiles_while_systems_are_timed(ran):
  """Warming up compiles both buckets, though the first prompts need only one."""
  pair, run = (
    ran[0]["independent"],
    tiny_online.config(ran[0]["independent"], "nowhere"),
  )
  several = dataclasses.replace(run.decoding, source_lengths=(6, 40))
  run = dataclasses.replace(run, decoding=several)
  requests = [Request(np.full(n, 7, np.int32)) for n in (4, 5, 3, 30)]
  for rival in (pair.plain(), pair):
    with Compilations() as before:
      frozen = systems.Frozen(rival, run, requests)
    with Compilations() as timed:
      frozen.serve(0, len(requests))
    assert before.count and not timed.count


def test_all_systems_serve_the_whole_stream(ran):
  _, spent, rows = ran
  assert spent.block_ends == [10, 20, 24] and list(spent.seconds) == NAMES
  figures = values(rows)
  tokens = {figures[f"{name}, tokens"] for name in NAMES}
  assert len(tokens) == 1 and tokens.pop() > 24
  for name in ("independent online", "attached online"):
    assert figures[f"{name}, updates"] >= 4
    assert 0 < figures[f"{name}, mean overlap"] < 1
  assert "independent frozen, updates" not in figures
  assert "plain, draft acceptance" not in figures
  assert figures["plain, tokens per target call"] == 1


def test_ratios_and_break_even_follow_from_the_accounts(ran):
  _, spent, rows = ran
  figures = values(rows)
  own = figures["attached online, over attached frozen"]
  assert own == spent.total("attached frozen") / spent.total("attached online")
  assert "independent frozen, over independent frozen" not in figures
  asked = {row["figure"] for row in rows if row["asked"]}
  assert asked == bench_whole_run.ASKED.keys() <= figures.keys()
  course = {"plain": [4.0, 8.0], "independent frozen": [2.0, 4.0]}
  course["independent online"] = [3.0, 4.5]
  made = dataclasses.replace(spent, block_ends=[5, 9], seconds=course)
  figures = bench_whole_run.compared(made)
  assert figures["independent online, break-even over plain, requests"] == 5
  never = "independent online, break-even over independent frozen, requests"
  assert figures[never] == float("inf")


def test_figure_can_be_drawn_from_the_rows(ran):
  _, spent, rows = ran
  drawn, served = list(map(by_worth, rows)), (24,)
  courses = [row for row in drawn if "setting" in row]
  assert not pictures.panels(rows, served), "updates by interval are not drawn"
  assert not pictures.panels(drawn), "nor are topics of other lengths"
  ((title, course),) = pictures.panels(drawn, served).items()
  assert title == "the demo's target"
  real = [row | {"setting": "experiments/shift_cpu.gin, by_worth"} for row in courses]
  assert list(pictures.panels(real, served)) == ["four real domains"]
  assert set(course) == {(3, name) for name in NAMES}
  places, share = pictures.saved(course[3, "plain"], course[3, "attached online"])
  assert places == [0, 10, 20, 24] and share[0] == 0
  total = 1 - spent.total("attached online") / spent.total("plain")
  assert share[-1] == pytest.approx(100 * total)
  without = [row for row in drawn if "cumulated_seconds" not in row]
  assert without and not pictures.panels(without, served)


def by_worth(row):
  """Returns a row with the setting of a run whose schedule decides by worth."""
  setting = row.get("setting")
  return row | {"setting": f"{setting}, attached_gin demo_by_worth"} if setting else row


def given(*words):
  return bench_whole_run.options().parse_args(words)


def test_options_reach_every_run(tmp_path):
  target = tmp_path / "target.safetensors"
  target.touch()
  parsed = given(
    "--target", str(target), "--attached", "attached", "--requests_per_task", "7",
    "--bindings", "DecodingConfig.rows=2",
  )  # fmt: skip
  made = bench_whole_run.configs(parsed, 5)
  assert {kind: config.pair.draft for kind, config in made.items()} == {
    "independent": "shipped:demo_draft.safetensors",
    "attached": "attached",
  }
  for config in made.values():
    assert config.pair.target == str(target) and config.decoding.rows == 2
    assert config.stream.requests_per_task == 7 and config.stream.seed == 5
  assert bench_whole_run.setting_of(parsed) == (
    "runs/demo_independent.gin, target target, attached attached, 7 a task,"
    " DecodingConfig.rows=2"
  )
  assert bench_whole_run.setting_of(given()) == "runs/demo_independent.gin"


def test_systems_option_selects_a_subset(ran):
  loaded, spent, _ = ran
  parsed = given("--attached", "a", "--systems", "attached online", "plain")
  chosen = bench_whole_run.chosen_of(parsed)
  assert chosen == ["plain", "attached online"], "the order of NAMES"
  assert bench_whole_run.chosen_of(given("--attached", "a")) == NAMES
  assert bench_whole_run.chosen_of(given()) == NAMES[:3]
  course = {name: spent.seconds[name] for name in chosen}
  figures = bench_whole_run.compared(dataclasses.replace(spent, seconds=course))
  assert set(figures) == {
    "attached online, over plain",
    "attached online, break-even over plain, requests",
  }
  with pytest.raises(base.InputError, match="--systems: received 'attached online'"):
    bench_whole_run.chosen_of(given("--systems", "attached online"))
  with pytest.raises(SystemExit):
    given("--systems", "attached")


def test_only_selected_systems_serve(ran, tmp_path):
  pair = ran[0]["independent"]
  config = tiny_online.config(pair, tmp_path, keep_drafts=False, warm_start=None)
  config = dataclasses.replace(config, pair=pair)
  made, chosen = {"independent": config}, ["independent frozen"]
  spent, figures = bench_whole_run.one_run(made, ran[0], 24, chosen)
  assert list(spent.seconds) == chosen
  assert all(name.startswith("independent frozen, ") for name in figures)


def test_attached_gin_changes_only_the_attached_draft(written):
  own = written("OptimizerConfig.learning_rate = 0.5\n")
  parsed = given("--attached", "attached", "--attached_gin", own)
  made = bench_whole_run.configs(parsed, 0)
  rates = {
    kind: config.learning.update.optimizer.learning_rate
    for kind, config in made.items()
  }
  assert rates["attached"] == 0.5 != rates["independent"]


def test_attached_draft_is_refused_as_independent_draft(ran):
  pair = ran[0]["independent"]
  bench_whole_run.check_independent(pair)
  draft = dataclasses.replace(pair.draft, frozen="target")
  with pytest.raises(base.InputError, match="--draft: received a draft that is att"):
    bench_whole_run.check_independent(dataclasses.replace(pair, draft=draft))


def test_attached_gin_must_not_change_the_stream(written):
  other = written("StreamConfig.requests_per_task = 9\n")
  parsed = given("--attached", "attached", "--attached_gin", other)
  with pytest.raises(base.InputError, match="changes OnlineConfig.stream, expected"):
    bench_whole_run.configs(parsed, 0)
  with pytest.raises(base.InputError, match="--attached_gin: received"):
    bench_whole_run.configs(given("--attached_gin", other), 0)


@pytest.mark.parametrize(
  ("setting", "clock", "asked"),
  [
    ("runs/demo_independent.gin, attached a", "wall, 2 thread(s)", ">= 1.6"),
    ("runs/demo_independent.gin, attached a", "wall, 1 thread(s)", ">= 1.4"),
    ("runs/d.gin, target t_as_flan-t5-base, 200 a task", "wall, 2 thread(s)", ">= 2.8"),
    ("runs/d.gin, target t_as_flan-t5-small", "wall, 2 thread(s)", None),
    ("runs/d.gin, 1000 a task", "wall, 2 thread(s)", None),
    ("experiments/shift_cpu.gin, attached a", "wall, 2 thread(s)", ">= 1.1"),
  ],
)
def test_goal_depends_on_the_target_and_the_clock(setting, clock, asked):
  found = bench_whole_run.asked_of(f"{setting}, seed 0", clock)
  assert found.get("attached online, over plain") == asked


@pytest.mark.parametrize("target", ["", ", target t_as_flan-t5-base"])
def test_goal_for_maths_alone_bounds_the_cost_of_learning(target):
  """For any target, if the bindings select only the maths topic."""
  topic = "StreamConfig.tasks=(@maths/stream/TaskConfig(),)"
  parsed = given("--bindings", topic)
  config = bench_whole_run.config_of(parsed, 0, [], None)
  assert [task.source for task in config.stream.tasks] == ["maths"]
  setting = f"runs/d.gin{target}, {topic}, seed 0"
  found = bench_whole_run.asked_of(setting, "wall, 2 thread(s)")
  assert found == {"attached online, over attached frozen": ">= 0.97"}
