"""The program that asks what text in and text out costs, at the tiny size."""

import bench_front_door
import pytest
import tiny_pair

from osd_jax.data import generated
from osd_jax.serving import slots
from osd_jax.serving.server import Server


def test_both_ways_are_timed_by_both_clocks(tmp_path):
  decoding = slots.DecodingConfig(rows=2, source_lengths=(64,), target_length=8)
  with Server(tiny_pair.save_tiny_pair(tmp_path), decoding) as server:
    rows = bench_front_door.rows_of(server, bench_front_door.held_out(3), 1, 1)
  values = {(row["clock"], row["figure"]): row["value"] for row in rows}
  assert len(values) == 6
  for clock in ("cpu, 1 thread(s)", "wall, 1 thread(s)"):
    text = values[clock, "Server.generate, tokens/s"]
    bare = values[clock, "Slots.run, tokens/s"]
    over = values[clock, "Server.generate over Slots.run, speed"]
    assert over == pytest.approx(text / bare)
  assert [row["asked"] for row in rows if "asked" in row] == [">= 0.99"] * 2


def test_prompts_are_of_all_topics():
  prompts = set(bench_front_door.held_out(6))
  assert len(prompts) == 6
  for topic in generated.TOPICS:
    of_topic = {example.prompt for example in generated.examples(topic, "eval", 2)}
    assert of_topic & prompts
