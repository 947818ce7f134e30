"""The server: answers are those of the target, with any settings and learning."""

import dataclasses
import inspect
import itertools
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_online

import osd_jax
from osd_jax import base, pairs
from osd_jax.decoding import rounds
from osd_jax.distillation import learner, schedule
from osd_jax.engine import requests
from osd_jax.engine.requests import Prompt
from osd_jax.engine.server import LEARNING, Server
from osd_jax.models import weights

DECODING = requests.DecodingConfig(
  rows=2, num_draft_tokens=3, source_lengths=(24, 48), target_length=16
)
QUICK = dataclasses.replace(
  LEARNING, schedule=schedule.ScheduleConfig(update_interval=2)
)
TEXTS = [f"How many hotels are there with rating above {n}?" for n in range(40, 46)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
  return pairs.load_pair(tiny_online.save_lively_pair(tmp_path_factory.mktemp("pair")))


@pytest.fixture(scope="module")
def server(pair):
  with Server(pair, DECODING, QUICK) as made:
    yield made


@pytest.fixture(scope="module")
def plain(pair):
  """Greedy answers of the target alone to TEXTS."""
  with Server(pair.plain(), DECODING) as alone:
    return [answer.text for answer in alone.generate(TEXTS, ordered=True)]


def test_answers_equal_the_targets_in_either_order(server, plain):
  answers = list(server.generate(TEXTS))
  assert [a.text for a in sorted(answers, key=lambda a: a.index)] == plain
  assert sorted(a.prompt for a in answers) == sorted(TEXTS)
  assert len(set(plain)) > 1
  ordered = list(server.generate(iter(TEXTS), ordered=True))
  assert [a.index for a in ordered] == list(range(len(TEXTS)))
  assert [a.text for a in ordered] == plain


def test_generate_reaches_a_round_in_five_calls(pair, monkeypatch):
  """The path described in `engine/engine.py`; closures count as their function."""
  folder, right, paths = str(Path(osd_jax.__file__).parent), rounds.one_round, []

  def one_round(*args):
    names = [
      frame.f_code.co_qualname.partition(".<locals>")[0]
      for frame, *_ in reversed(inspect.stack())
      if frame.f_code.co_filename.startswith(folder)
    ]
    paths.append([name for name, _ in itertools.groupby(names)])
    return right(*args)

  monkeypatch.setattr(rounds, "one_round", one_round)
  # A new shape, so that the call is traced in this test.
  longer = dataclasses.replace(DECODING, target_length=17)
  with Server(pair, longer) as server:
    assert next(server.generate(TEXTS[0])).text
  path = ["Server.generate", "Server.serve", "Engine.step", "advance", "run_rounds"]
  assert paths and all(found == path for found in paths)


def test_single_text_gives_a_single_answer(server, plain):
  (answer,) = server.generate(TEXTS[0])
  assert answer.text == plain[0] and answer.tokens_per_target_call >= 1


def test_endless_prompts_are_read_as_rows_become_free(server, plain):
  taken = []

  def endless():
    for index in itertools.count():
      taken.append(index)
      yield TEXTS[index % len(TEXTS)]

  answers = server.generate(endless(), ordered=True)
  texts = [next(answers).text for _ in range(5)]
  assert texts == plain[:5]
  assert len(taken) <= 5 + 2 * DECODING.rows
  answers.close()
  assert server.engine.in_flight == 0
  assert next(server.generate(TEXTS)).text in plain  # the server still works


def test_running_answers_continue_while_no_prompt_is_waiting(server, plain):
  """Two rows, and a second prompt that arrives after the first answer."""
  assert DECODING.rows == 2
  answered, asked = [], 0

  def arriving():
    nonlocal asked
    yield TEXTS[0]
    while not answered:
      asked += 1
      assert asked < 1000
      yield None
    yield None  # None means no prompt yet, even while nothing is running
    yield TEXTS[1]

  for answer in server.generate(arriving()):
    answered.append((answer.index, answer.text))
  assert answered == [(0, plain[0]), (1, plain[1])]
  assert asked >= 2  # several calls, each followed by a request for prompts


def test_streamed_pieces_add_up_to_the_answer(server, plain):
  for text, expected in zip(TEXTS[:3], plain, strict=False):
    pieces = list(server.stream(text))
    assert "".join(pieces) == expected
    assert len(pieces) > 1 or len(expected) < 4


def test_answer_ends_before_the_stop_string(server, plain):
  stop = plain[0][len(plain[0]) // 2 :][:3]
  for answer in server.generate(TEXTS, stop=[stop], ordered=True):
    assert answer.text == plain[answer.index].split(stop)[0]
    stopped = stop in plain[answer.index]
    assert (answer.stop_reason == base.StopReason.STOP_STRING) == stopped
  assert "".join(server.stream(TEXTS[0], stop=[stop])) == plain[0].split(stop)[0]
  assert list(server.stream(TEXTS[0], stop=[plain[0][0]])) == []  # no empty piece


def test_each_prompt_can_have_its_own_settings(server, plain):
  sampled = Prompt(TEXTS[0], temperature=1.0, seed=5)
  short = Prompt(TEXTS[1], max_new_tokens=3)
  given = [TEXTS[0], sampled, short, sampled, dataclasses.replace(sampled, seed=6)]
  first, one, cut, two, other = server.generate(given, ordered=True)
  assert first.text == plain[0]
  assert len(cut.tokens) == 3 and cut.stop_reason == base.StopReason.LENGTH
  assert one.tokens.tolist() != other.tokens.tolist()
  texts = {a.text for a in server.generate([TEXTS[0]] * 6, temperature=1.0, seed=5)}
  assert len(texts) > 1  # each text of a call has its own seed


def test_server_learns_only_on_request_and_texts_stay_equal(pair, plain, tmp_path):
  with Server(pair, DECODING, QUICK) as server:
    list(server.generate(TEXTS))
    assert server.draft_params is pair.draft_params
    opted_out = [Prompt(text, learn=False) for text in TEXTS]
    list(server.generate(opted_out, learn=True))
    assert server.statistics.updates == 0
    answers = list(server.generate(TEXTS * 2, learn=True, ordered=True))
    assert [answer.text for answer in answers] == plain * 2
    server.finish_learning()
    assert server.statistics.updates >= 2
    assert server.engine.draft_version >= 1
    assert answers[-1].draft_version > answers[0].draft_version
    saved = weights.load(server.save(tmp_path / "draft.safetensors"))
    jax.tree.map(np.testing.assert_array_equal, saved.params, server.draft_params)
  before = jax.tree.leaves(pair.draft_params)
  assert any((a != b).any() for a, b in zip(before, jax.tree.leaves(saved.params)))


def test_closing_a_server_ends_its_threads(pair):
  before = set(threading.enumerate())
  with Server(pair, DECODING, QUICK) as server:
    next(server.generate(TEXTS, learn=True))
  assert set(threading.enumerate()) <= before
  with pytest.raises(base.InputError, match="this server is closed"):
    next(server.generate(TEXTS))


def test_concurrent_calls_are_refused(server):
  one = server.generate(TEXTS)
  next(one)
  with pytest.raises(base.InputError, match="answering another call"):
    next(server.generate(TEXTS))
  one.close()
  assert next(server.generate(TEXTS)).text


def test_invalid_prompt_is_named(server):
  for bad, message in [
    ("word " * 90, "prompt 1: .*expected 1 to 48"),
    ("", "prompt 1: "),
  ]:
    with pytest.raises(base.InputError, match=message):
      list(server.generate([TEXTS[0], bad]))
    assert server.engine.in_flight == 0


def test_draft_learnt_in_another_thread_is_swapped_in_while_serving(pair, plain):
  with Server(pair, DECODING, QUICK) as serving:
    stream = [serving._request(n, text, {}) for n, text in enumerate(TEXTS)]
    answered, swapped = serving.run(stream), []
    for done in itertools.islice(itertools.cycle(answered), 40):
      serving.learner.runner.wait()
      if serving.learn(done, 0.5, background=True):
        break
    else:
      pytest.fail("no update in 40 requests")
    assert serving.engine.draft_version == 0
    real = serving.engine.swap
    serving.engine.swap = lambda *draft: (swapped.append(draft[1]), real(*draft))
    again = [answer.text for answer in serving.generate(TEXTS, ordered=True)]
    assert swapped == [1] and serving.engine.draft_version == 1
    assert again == plain


def test_learning_needs_a_draft_and_records(pair):
  for unfit in (
    Server(pair.plain(), DECODING),
    Server(pair, dataclasses.replace(DECODING, record_top_k=0)),
  ):
    with pytest.raises(base.InputError, match="a draft that learns needs"):
      list(unfit.generate(TEXTS[:1], learn=True))


def broken(params, value=jnp.nan):
  """The parameters with one broken number in the output head."""
  flat, tree = jax.tree_util.tree_flatten_with_path(params)
  leaves = [
    leaf.at[0, 5].set(value) if "logits_dense" in jax.tree_util.keystr(path) else leaf
    for path, leaf in flat
  ]
  assert any(leaf is not old for leaf, (_, old) in zip(leaves, flat, strict=True))
  return jax.tree.unflatten(tree, leaves)


@pytest.mark.parametrize("speculates", [True, False])
def test_answers_of_a_broken_target_end_with_not_finite(pair, speculates):
  nan = dataclasses.replace(pair, target_params=broken(pair.target_params))
  with Server(nan if speculates else nan.plain(), DECODING) as server:
    for answer in server.generate(TEXTS[:2]):
      assert answer.stop_reason == base.StopReason.NOT_FINITE
      assert answer.text == "" and not len(answer.tokens)


def test_broken_draft_is_named_and_changes_no_text(pair, plain):
  nan = dataclasses.replace(pair, draft_params=broken(pair.draft_params))
  with Server(nan, DECODING, QUICK) as server:
    assert [a.text for a in server.generate(TEXTS, ordered=True)] == plain
    with pytest.raises(base.InputError, match="'draft' gives scores that are not"):
      list(server.generate(TEXTS, learn=True))


def test_statistics_agree_with_the_answers(pair):
  with Server(pair, DECODING) as server:
    answers = list(server.generate(TEXTS))
    found = server.statistics
    assert found.requests == len(TEXTS)
    assert found.tokens == sum(len(answer.tokens) for answer in answers)
    calls = sum(answer.target_calls for answer in answers)
    assert found.tokens_per_target_call == found.tokens / calls
    assert found.tokens_per_second > 0


def test_learning_configs_compare_by_value():
  assert learner.LearningConfig() == learner.LearningConfig()
  with pytest.raises(base.InputError, match=r"LearningConfig\.seed: received -1"):
    learner.LearningConfig(seed=-1)
