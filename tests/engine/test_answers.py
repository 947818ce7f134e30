"""Streamed text: no piece is ever taken back, and the pieces add up to the answer."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

from osd_jax import assets, base
from osd_jax.data.vocabulary import Vocabulary
from osd_jax.engine import requests

VOCABULARY = Vocabulary.load(assets.resolve("shipped:demo_vocabulary.model"))
DECODING = requests.DecodingConfig(source_lengths=(4,), target_length=4)
TOKENS = strategies.lists(strategies.integers(2, VOCABULARY.size - 1), max_size=24)
SIZES = strategies.lists(strategies.integers(1, 5), min_size=1, max_size=24)


def read(tokens, sizes, stop=()):
  """Reads growing prefixes; returns the pieces, the whole text and the tokens used."""
  text, pieces, shown = requests.TextSoFar(VOCABULARY.decode, stop), [], 0
  for size in sizes:
    shown = min(shown + size, len(tokens))
    count = text.watch(np.asarray(tokens[:shown]))
    if count is not None:
      tokens = tokens[:count]
      break
    pieces.append(text.next_piece())
  whole, rest = text.finish(np.asarray(tokens))
  return [*pieces, rest], whole, tokens


@hypothesis.given(TOKENS, SIZES)
def test_pieces_add_up_to_the_text(tokens, sizes):
  pieces, whole, _ = read(tokens, sizes)
  assert "".join(pieces) == whole == VOCABULARY.decode(tokens)


@hypothesis.given(TOKENS, SIZES, strategies.sampled_from(["a", "the", " 1", "e "]))
def test_text_ends_before_the_stop_string_for_any_grouping(tokens, sizes, stop):
  sizes = [*sizes, len(tokens)]
  pieces, whole, read_tokens = read(tokens, sizes, (stop,))
  expected = VOCABULARY.decode(tokens).split(stop)[0]
  assert "".join(pieces) == whole == expected
  at_once, _, all_read = read(tokens, [len(tokens)] if tokens else [], (stop,))
  assert all_read == read_tokens  # however the tokens were grouped
  if stop in VOCABULARY.decode(tokens):
    # No more tokens are used than the stop string needs.
    assert stop not in VOCABULARY.decode(read_tokens[:-1])


def test_text_ends_before_the_first_stop_string_that_occurs():
  tokens = VOCABULARY.encode("How many hotels are there?")
  for stop in (("are", "many"), ("many", "are")):
    assert read(tokens, [1] * 30, stop)[1] == "How "


@pytest.mark.parametrize("stop", ["\n", "\n\n", " ", "\t", "\u2028", "```\n"])
def test_white_space_is_a_stop_string(stop):
  assert requests.Prompt("a", stop=(stop,)).stop == (stop,)
  text = requests.TextSoFar(lambda ids: "".join(map(chr, ids)), (stop,))
  tokens = np.asarray([*map(ord, f"one{stop}two")])
  assert text.watch(tokens) == 3 + len(stop)
  assert text.finish(tokens[: 3 + len(stop)]) == ("one", "one")


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"temperature": -1}, r"SamplingConfig\.temperature: received -1"),
    ({"top_p": 0}, r"SamplingConfig\.top_p: received 0"),
    ({"max_new_tokens": 0}, r"Prompt\.max_new_tokens: received 0"),
    ({"stop": ["a\ud800b"]}, r"Prompt\.stop: received .*lone surrogates"),
    ({"stop": ""}, r"Prompt\.stop: received ''"),
    ({"stop": ["a", ""]}, r"Prompt\.stop: received \('a', ''\)"),
    ({"temprature": 1}, r"a setting 'temprature', expected some of \['learn'"),
  ],
)
def test_invalid_settings_are_named(settings, message):
  with pytest.raises(base.InputError, match=message):
    requests.Prompt.of("a text", 0, settings)


@pytest.mark.parametrize("given", [3, None, "", "  ", {"a": 1}, "a\ud800b"])
def test_prompt_must_be_a_text(given):
  with pytest.raises(base.InputError, match=r"Prompt\.text: received"):
    requests.Prompt.of(given, 0, {})


def test_numpy_scalars_are_settings():
  given = {
    "temperature": np.float32(0.5),
    "top_k": np.int64(3),
    "seed": np.uint32(7),
    "max_new_tokens": np.int16(4),
    "learn": np.bool_(False),
  }
  prompt = requests.Prompt("a", **given)
  assert prompt == requests.Prompt("a", 0.5, 3, seed=7, max_new_tokens=4, learn=False)
  assert type(prompt.seed) is int and prompt.learn is False
  requests.Request(np.ones(2, int), max_new_tokens=np.int64(4)).check(DECODING, 9)


def test_prompts_without_a_seed_get_consecutive_seeds():
  seeds = [requests.Prompt.of("a", i, {"seed": 2**32 - 1}).seed for i in range(2)]
  assert seeds == [2**32 - 1, 0]
  own = requests.Prompt("a", seed=7)
  assert requests.Prompt.of(own, 5, {"seed": 1}) is own
