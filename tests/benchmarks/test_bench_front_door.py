"""The program that asks what text in and text out costs, at the tiny size."""

import types

import bench_front_door
import numpy as np
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
  assert len(values) == 7
  for clock in ("cpu, 1 thread(s)", "wall, 1 thread(s)"):
    text = values[clock, "Server.generate, tokens/s"]
    bare = values[clock, "Slots.run, tokens/s"]
    over = values[clock, "Server.generate over Slots.run, speed"]
    assert over == pytest.approx(text / bare)
  assert [row["asked"] for row in rows if row["asked"]] == [">= 0.99", "<= 0.01"]


def test_what_text_adds_is_told_from_the_calls():
  """A tenth of a bare turn, whatever the calls take; the turn that compiles is out."""
  answer = [types.SimpleNamespace(tokens=[1], milliseconds=0.0)]
  text, bare = (bench_front_door.Way(lambda: answer) for _ in range(2))
  text.outside, bare.outside = [900.0, 30.0, 25.0, 41.0], [0.0, 10.0, 5.0, 20.0]
  people = {bench_front_door.TEXT: text, bench_front_door.BARE: bare}
  seconds = np.array([0.2, 0.2, 0.2])
  assert bench_front_door.added(people, seconds) == pytest.approx(0.1)


def test_prompts_are_of_all_topics():
  prompts = set(bench_front_door.held_out(6))
  assert len(prompts) == 6
  for topic in generated.TOPICS:
    of_topic = {example.prompt for example in generated.examples(topic, "eval", 2)}
    assert of_topic & prompts
