"""Streamed text: no piece is ever taken back, and the pieces add up to the answer."""

import time

import hypothesis
import numpy as np
import pytest
import tiny_pair
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


def test_cost_of_a_token_does_not_grow_with_the_answer():
  decoded = []

  def decode(tokens):
    decoded.append(len(tokens))
    return VOCABULARY.decode(tokens)

  tokens = np.asarray(VOCABULARY.encode("How many hotels are there in Rome? " * 100))
  for stop in ((), ("zzz",)):
    text = requests.TextSoFar(decode, stop)
    pieces = []
    for end in range(4, len(tokens) + 1, 4):
      text.watch(tokens[:end])
      pieces.append(text.next_piece())
    assert max(decoded) < 64 < len(tokens) / 8
    assert "".join([*pieces, text.finish(tokens)[1]]) == VOCABULARY.decode(tokens)
    decoded.clear()


@pytest.mark.parametrize("count", [1, 3])
def test_long_held_text_is_compared_once(count):
  """A stop string that an answer repeats for long is not searched again and again."""
  stops = ("a" * 3000 + "b", *["c" * 3000] * count)
  text = requests.TextSoFar(lambda ids: "a" * len(ids), stops)
  start = time.process_time()
  for end in range(1, 3000, 3):
    assert text.watch(np.zeros(end, int)) is None
    assert text.next_piece() == ""
  assert time.process_time() - start < 5
  assert text.finish(np.zeros(2999, int))[1] == "a" * 2999


WORDS = ["the ", "naïve ", "🙂", "\n\n", "   ", "日本", "x", "\t", " a", "\ufffd"]


@pytest.fixture(scope="module", params=["shipped", "llama", "bytes"])
def vocabulary(request, tmp_path_factory):
  return tiny_pair.vocabulary(request.param, tmp_path_factory.mktemp("vocabulary"))


@hypothesis.given(data=strategies.data())
def test_growing_text_is_the_text_of_the_tokens(vocabulary, data):
  words = data.draw(strategies.lists(strategies.sampled_from(WORDS), max_size=80))
  tokens = np.asarray(vocabulary.encode("".join(words)), np.int32)
  text, end = requests.GrowingText(vocabulary.decode), 0
  while end < len(tokens):
    end = min(end + data.draw(strategies.integers(1, 5)), len(tokens))
    assert text.read(tokens[:end]) == vocabulary.decode(tokens[:end])


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
