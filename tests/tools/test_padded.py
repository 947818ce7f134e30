"""Padded weights keep their logits and have the larger sizes."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from osd_jax import assets, base, online, pairs, testing
from osd_jax.main import settings
from osd_jax.models import attached, families, weights
from osd_jax.models.shapes import AttachedConfig
from osd_tools import padded, sizes

SMALL = testing.TINY_T5
BIG = dataclasses.replace(
  SMALL, width=48, num_heads=3, head_dim=24, mlp_dim=80,
  num_encoder_layers=2, num_decoder_layers=3,
)  # fmt: skip
ROWS, LENGTH = 4, 20
TOLERANCE = 5e-4 / 15  # difference of logits over the largest logit


@pytest.fixture(scope="module")
def small():
  params = families.build(SMALL).init(jax.random.key(0))
  return weights.Weights(SMALL, params, "a vocabulary", "random")


def logits_of(model: base.Model, params: base.Params) -> np.ndarray:
  source, mask = testing.random_sources(ROWS, LENGTH, model.vocab_size, seed=0)
  output, _ = testing.random_sources(ROWS, LENGTH, model.vocab_size, seed=1)
  return np.asarray(model.score(params, source, mask, output))


def assert_same(one: np.ndarray, other: np.ndarray, tolerance: float = TOLERANCE):
  assert np.abs(one - other).max() <= tolerance * np.abs(one).max()


def attached_logits(target: weights.Weights, draft: weights.AttachedWeights):
  model = attached.build(draft.config, target.config)
  frozen = attached.frozen_of(target.config, target.params)
  return logits_of(model, model.join(draft.params, frozen))


def test_padded_weights_have_the_logits_of_the_small_ones(small):
  big = padded.padded_weights(small, BIG)
  assert big.config == BIG and big.vocabulary == small.vocabulary
  assert weights.expected_shapes(BIG) == padded.tensors.shapes(big.params)
  assert_same(logits_of(small.model, small.params), logits_of(big.model, big.params))


def test_padding_without_its_factors_changes_the_logits(small, monkeypatch):
  monkeypatch.setattr(padded, "_growth", lambda config, shape: np.float32(1))
  big = padded.padded_weights(small, BIG)
  with pytest.raises(AssertionError):
    assert_same(logits_of(small.model, small.params), logits_of(big.model, big.params))


def test_attached_draft_follows_its_padded_target(small, tmp_path):
  shape = AttachedConfig(width=16, num_heads=2, head_dim=8, mlp_dim=24)
  params = attached.build(shape, SMALL).init(jax.random.key(1))
  draft = weights.AttachedWeights(
    shape, params, weights.identity(small, "small").fingerprint
  )
  path = weights.save(tmp_path / "draft.safetensors", draft)
  big = padded.padded_weights(small, BIG)
  again = padded.attached_draft(path, small, weights.identity(big, "big"))
  assert_same(attached_logits(small, draft), attached_logits(big, again))
  moved = weights.save(tmp_path / "moved.safetensors", again)
  attached.load(moved, weights.identity(big, "big"))
  with pytest.raises(base.InputError, match="is attached to the target"):
    attached.load(moved, weights.identity(small, "small"))


def test_added_layers_cost_what_trained_ones_do(small):
  big = padded.tensors.flat(padded.padded_weights(small, BIG).params)
  old = padded.tensors.flat(small.params)
  for name in big.keys() - old.keys():
    leaf = np.abs(np.asarray(big[name]))
    if name.endswith(padded.WRITERS):
      assert not leaf.any(), name
    else:  # normal numbers: denormal ones would be slower, and zeros might be skipped
      assert np.mean(leaf > np.finfo(np.float32).tiny) > 0.999, name


@pytest.fixture(scope="module")
def shipped_pair():
  """The shipped pair at the cost of the smallest flan-t5 that holds it."""
  return pairs.load_pair(pairs.PairConfig(target="padded:flan-t5-small"))


def test_shipped_pair_is_padded_when_it_is_loaded(shipped_pair):
  small = pairs.load_pair(pairs.PairConfig())
  big = shipped_pair
  assert big.identity.config.width == sizes.SIZES["flan-t5-small"].width
  assert_same(*(logits_of(pair.target, pair.target_params) for pair in (small, big)))
  assert_same(*(logits_of(pair.draft, pair.draft_params) for pair in (small, big)))


def test_draft_that_learned_on_a_padded_target_is_loaded_again(shipped_pair, tmp_path):
  draft, params = shipped_pair.draft, shipped_pair.draft_params
  trained, frozen = draft.split(params)
  learned = draft.join(jax.tree.map(lambda x: x + 1, trained), frozen)
  path = shipped_pair.save_draft(tmp_path / "draft.safetensors", learned, "learned")
  again = shipped_pair.load_draft(path)
  assert jax.tree.all(jax.tree.map(np.array_equal, learned, again))


def test_independent_draft_is_padded_too():
  config = pairs.PairConfig(target="padded:flan-t5-base", draft="padded:t5-small")
  assert pairs.shape_of(config, "target").num_decoder_layers == 12
  assert pairs.shape_of(config, "draft").width == sizes.SIZES["t5-small"].width
  path = assets.resolve("shipped:demo_draft.safetensors")
  draft, big = weights.load(path), padded.Reader("t5-small").load(path)
  assert_same(logits_of(draft.model, draft.params), logits_of(big.model, big.params))


@pytest.mark.parametrize(
  ("size", "problem"),
  [
    ("flan-t5-bass", "received the size 'flan-t5-bass', expected one of"),
    ("vicuna-7b", "received the size 'vicuna-7b', expected one of"),
    ("demo-draft", "width: demo-draft has 128, expected at least the 256"),
  ],
)
def test_unfit_sizes_are_refused_by_name(size, problem):
  config = pairs.PairConfig(target=f"padded:{size}")
  with pytest.raises(base.InputError, match=f"PairConfig.target: padded: .*{problem}"):
    pairs.load_pair(config)


def test_tied_head_is_refused():
  with pytest.raises(base.InputError, match="tied_head"):
    padded.padded_shape(dataclasses.replace(SMALL, tied_head=True), "flan-t5-base")


def test_padding_is_said_in_words():
  assert "padded with zeros to the cost of flan-t5-base" in (
    pairs.PairConfig(target="padded:flan-t5-base").padding
  )
  assert not pairs.PairConfig().padding
  assert not pairs.PairConfig(target="flan-t5-base").padding


# The demo at the cost of the shipped target itself, with one request of each topic.
SHORT = [
  'PairConfig.target = "padded:demo-target"',
  "PartitionConfig.cpu_threads = None",
  *(f"{t}/stream/TaskConfig.rows = 1" for t in ("maths", "sql", "python", "finance")),
  "warm_start/BatchConfig.limit_rows = 1",
  "OnlineConfig.learn = False",
  "OnlineConfig.measure_costs = False",
  "OnlineConfig.floor_metering = False",
]


@pytest.mark.slow
def test_demo_and_its_report_say_first_that_the_target_is_padded(tmp_path, capsys):
  bindings = [*SHORT, f"OnlineConfig.run_directory = {str(tmp_path / 'run')!r}"]
  config, _ = settings.load(online.OnlineConfig, ["runs/demo_padded.gin"], bindings)
  result = online.run(config)
  assert result.exact
  printed = capsys.readouterr().err
  assert printed.startswith("The target is the shipped model, padded with zeros")
  page = (result.path / "report.html").read_text()
  first = re.search(r"</h1>\s*<p[^>]*>(.*)</p>", page)
  assert first and first[1] == config.pair.padding


def test_demo_pads_the_shipped_pair_and_serves_four_topics():
  config, _ = settings.load(online.OnlineConfig, ["runs/demo_padded.gin"])
  assert config.pair == pairs.PairConfig(
    target="padded:flan-t5-base", draft_serving=config.pair.draft_serving
  )
  assert config.decoding.cache_tokens and config.learning.schedule.needs_costs
  assert len({task.label for task in config.stream.tasks}) == 4
