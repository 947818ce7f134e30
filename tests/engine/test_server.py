"""The server: answers are those of the target, with any settings and learning."""

import dataclasses
import inspect
import itertools
import os
import signal
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_online

import osd_jax
from osd_jax import base, pairs
from osd_jax.costs import measure
from osd_jax.costs.table import Costs, RoundCosts
from osd_jax.decoding import rounds
from osd_jax.distillation import learner, schedule
from osd_jax.engine import requests
from osd_jax.engine.requests import Prompt
from osd_jax.engine.server import Server
from osd_jax.models import weights

DECODING = requests.DecodingConfig(
  rows=2, num_draft_tokens=3, source_lengths=(24, 48), target_length=16
)
QUICK = learner.LearningConfig(schedule=schedule.ScheduleConfig(update_interval=2))
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


def test_prompts_that_must_not_be_learned_from_leave_no_trace_in_the_cache(pair, plain):
  decoding = dataclasses.replace(DECODING, cache_tokens=1024)
  with Server(pair, decoding) as cached:
    places = []
    for learn in (False, True):
      prompts = [Prompt(text, learn=learn) for text in TEXTS]
      answers = cached.generate(prompts, ordered=True)
      assert [answer.text for answer in answers] == plain
      places.append(int(cached.engine.state()[0]["memory"].table.end))
    running = cached.generate(TEXTS)
    next(running)
    with pytest.raises(base.InputError, match="answering another call"):
      cached.clear_cache()
    running.close()
    cached.clear_cache()
    assert int(cached.engine.state()[0]["memory"].table.end) == 0
  assert places[0] == 0 < places[1]


def test_draft_from_elsewhere_is_served_and_answers_stay(pair, plain):
  params = jax.tree.map(lambda leaf: leaf * 1.1, pair.draft_params)
  with Server(pair, DECODING, QUICK) as frozen:
    before = [answer.draft_version for answer in frozen.generate(TEXTS[:2])]
    assert frozen.serve_draft(params) == 1
    answers = list(frozen.generate(TEXTS, ordered=True))
    assert [answer.text for answer in answers] == plain
    assert before == [0, 0] and {answer.draft_version for answer in answers} == {1}
    assert frozen.serve_draft(params) == 2 and frozen.draft_params is params
    with pytest.raises(base.InputError, match="shapes of the parameters differ"):
      frozen.serve_draft(jax.tree.map(lambda leaf: leaf[:1], params))
    broken = jax.tree.map(lambda leaf: leaf * np.nan, params)
    with pytest.raises(base.BrokenDraftError, match="NaN or infinite"):
      frozen.serve_draft(broken)


def test_draft_that_learns_goes_on_from_one_from_elsewhere(pair, plain):
  params = jax.tree.map(lambda leaf: leaf * 1.1, pair.draft_params)
  with Server(pair, DECODING, QUICK) as server:
    list(server.generate(TEXTS * 2, learn=True))
    server.finish_learning()
    before = server.learner.version
    assert before > 0
    version = server.serve_draft(params)
    answers = list(server.generate(TEXTS, ordered=True))
    assert [answer.text for answer in answers] == plain
    assert version == before + 1 == answers[-1].draft_version
    served = jax.tree.leaves(server.draft_params)
    expected = jax.tree.leaves(params)
    assert all(map(np.array_equal, served, expected))
    list(server.generate(TEXTS * 2, learn=True))
    server.finish_learning()
    assert server.learner.version > version


@pytest.mark.parametrize("cache_tokens", [0, 1024])
def test_schedule_receives_the_acceptance_of_draft_and_cache(pair, cache_tokens):
  costs = Costs(RoundCosts((11.0,), num_draft_tokens=(3,)), lost_ms=1e9)
  config = learner.LearningConfig(schedule=schedule.WorthConfig(costs=costs))
  decoding = dataclasses.replace(DECODING, cache_tokens=cache_tokens)
  with Server(pair, decoding, config) as one:
    (answer,) = one.generate(TEXTS[0], learn=True)
    mixed = one.learner.state()[1]["schedule"]["mixed"]
  assert mixed == (answer.accepted / answer.drafted if cache_tokens else 0)


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
  path = ["Server.generate", "Server._serve", "Engine.step", "advance", "run_rounds"]
  assert paths and all(found == path for found in paths)


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


def test_answer_ends_before_the_stop_string(server, plain):
  stop = plain[0][len(plain[0]) // 2 :][:3]
  for answer in server.generate(TEXTS, stop=[stop], ordered=True):
    assert answer.text == plain[answer.index].split(stop)[0]
    stopped = stop in plain[answer.index]
    assert (answer.stop_reason == base.StopReason.STOP_STRING) == stopped
  assert "".join(server.stream(TEXTS[0], stop=[stop])) == plain[0].split(stop)[0]
  pieces = list(server.stream(TEXTS[0]))
  assert "".join(pieces) == plain[0] and len(pieces) > 1
  assert list(server.stream(TEXTS[0], stop=[plain[0][0]])) == []  # no empty piece


def test_each_prompt_can_have_its_own_settings(server, plain):
  sampled = Prompt(TEXTS[0], temperature=1.0, seed=5)
  short = Prompt(TEXTS[1], max_new_tokens=3)
  mute = Prompt(TEXTS[0], speculative=False)
  given = [mute, sampled, short, sampled, dataclasses.replace(sampled, seed=6)]
  first, one, cut, two, other = server.generate(given, ordered=True)
  assert first.text == plain[0] and not first.drafted
  assert first.tokens_per_target_call == 1
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


def test_compiling_does_not_count_as_decoding(pair):
  """The first answer of a server compiles; "1 token per second" counted that."""
  odd = dataclasses.replace(DECODING, target_length=DECODING.target_length + 3)
  with Server(pair, odd) as server:
    started, before = time.perf_counter(), measure.compiling_ms()
    (answer,) = server.generate([TEXTS[0]])
    wall_ms = (time.perf_counter() - started) * 1e3
    compiled_ms = measure.compiling_ms() - before
    assert 0.2 * wall_ms < compiled_ms < wall_ms
    assert 0 < answer.milliseconds <= 1.05 * (wall_ms - compiled_ms)
    assert server.statistics.milliseconds == pytest.approx(answer.milliseconds)


def test_closing_a_server_ends_its_threads(pair):
  before = set(threading.enumerate())
  with Server(pair, DECODING, QUICK) as server:
    next(server.generate(TEXTS, learn=True))
  assert set(threading.enumerate()) <= before
  with pytest.raises(base.InputError, match="this server is closed"):
    next(server.generate(TEXTS))


def token_requests(server):
  encode = server.pair.vocabulary.encode_prompt
  return [requests.Request(encode(text), tag=n) for n, text in enumerate(TEXTS)]


@pytest.mark.parametrize("first", ["generate", "serve"])
def test_concurrent_calls_are_refused(server, first):
  given = {"generate": TEXTS, "serve": token_requests(server)}[first]
  one = getattr(server, first)(given)
  next(one)
  for other in (
    lambda: next(server.generate(TEXTS)),
    lambda: next(server.stream(TEXTS[0])),
    lambda: next(server.serve(token_requests(server))),
    lambda: server.run(token_requests(server)),
  ):
    with pytest.raises(base.InputError, match="answering another call"):
      other()
  one.close()
  server.engine.clear()
  assert next(server.generate(TEXTS)).text


def test_closed_server_ends_running_calls_and_refuses_new_ones(pair):
  served = Server(pair, DECODING)
  answers, requested = 0, token_requests(served)
  for _ in served.generate(TEXTS):
    served.close()
    answers += 1
  assert answers < len(TEXTS) and served.engine.in_flight == 0
  for call in (served.run, lambda given: next(served.serve(given))):
    with pytest.raises(base.InputError, match="this server is closed"):
      call(requested)
  halfway = Server(pair, DECODING)
  with pytest.raises(base.InputError, match="closed during this call"):
    halfway.run(requested, lambda done: halfway.close())


@pytest.mark.filterwarnings("ignore:.*fork")
def test_forked_process_gets_an_error_and_does_not_hang(server):
  list(server.generate(TEXTS[:1]))
  child = os.fork()
  if not child:
    found = 0
    try:
      server.close()  # must not wait for threads that only the parent has
      for call in (lambda: next(server.generate(TEXTS)), lambda: server.save("draft")):
        try:
          call()
        except base.InputError as error:
          found += "forked" in str(error)
    finally:
      os._exit(0 if found == 2 else 1)
  for _ in range(300):
    done, status = os.waitpid(child, os.WNOHANG)
    if done:
      break
    time.sleep(0.1)
  else:
    os.kill(child, signal.SIGKILL)
    pytest.fail("the child hangs")
  assert os.waitstatus_to_exitcode(status) == 0
  assert next(server.generate(TEXTS)).text  # the parent still serves


@pytest.mark.parametrize("given", [None, {"a": 1}, b"text", 3])
def test_prompts_of_a_wrong_type_are_refused(server, given):
  with pytest.raises(base.InputError, match=f"a {type(given).__name__} as prompts"):
    list(server.generate(given))


BAD = [
  ("word " * 90, "expected 1 to 48"),
  ("", "Prompt.text"),
  ("\ud800", "surrogates"),
]


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("bad, message", BAD)
def test_refused_prompt_does_not_drop_earlier_answers(
  server, plain, bad, message, ordered
):
  found = []
  with pytest.raises(base.InputError, match=f"prompt 3: .*{message}"):
    for answer in server.generate([*TEXTS[:3], bad, *TEXTS[3:]], ordered=ordered):
      found.append((answer.index, answer.text))
  assert sorted(found) == list(enumerate(plain[:3])) and server.engine.in_flight == 0


def test_iterator_that_raises_does_not_drop_earlier_answers(server, plain):
  def failing():
    yield from TEXTS[:3]
    raise OSError("the source is gone")

  found = []
  with pytest.raises(OSError, match="the source is gone") as caught:
    for answer in server.generate(failing()):
      found.append(answer.text)
  assert sorted(found) == sorted(plain[:3])
  assert caught.value.__notes__ == [
    "generate: the iterator of prompts raised this at 3."
  ]


@pytest.mark.parametrize("ordered", [True, False])
def test_refused_prompts_are_answers_on_request(server, plain, ordered):
  given = [BAD[1][0], *TEXTS[:2], BAD[0][0], TEXTS[2], BAD[2][0]]
  found = list(server.generate(given, ordered=ordered, return_failed=True))
  if ordered:
    assert [answer.index for answer in found] == list(range(6))
  found.sort(key=lambda answer: answer.index)
  assert [answer.text for answer in found] == ["", *plain[:2], "", plain[2], ""]
  for index, (_, message) in ((0, BAD[1]), (3, BAD[0]), (5, BAD[2])):
    assert found[index].stop_reason == base.StopReason.REFUSED
    assert f"prompt {index}: " in found[index].error and message in found[index].error
    assert found[index].stop_reason.message and not len(found[index].tokens)
  assert not found[1].error


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_log_probs_are_those_of_the_target_before_settings(server, pair, temperature):
  asked = Prompt(TEXTS[0], temperature=temperature, top_k=5, seed=3, log_probs=True)
  with_them, without = server.generate([asked, TEXTS[1]], ordered=True)
  assert without.log_probs is None
  source = np.full((1, 48), pair.target.pad_id, np.int32)
  prompt = pair.vocabulary.encode_prompt(TEXTS[0])
  source[0, : len(prompt)] = prompt
  tokens = with_them.tokens
  logits = pair.target.score(
    pair.target_params, source, pair.target.mask(source), tokens[None]
  )
  rows = np.asarray(jax.nn.log_softmax(logits, axis=-1))[0]
  expected = rows[np.arange(len(tokens)), tokens]
  np.testing.assert_allclose(with_them.log_probs, expected, atol=1e-4)
  assert with_them.log_probs.shape == tokens.shape and (expected < 0).all()


def test_draft_learnt_in_another_thread_is_swapped_in_while_serving(pair, plain):
  with Server(pair, DECODING, QUICK) as serving:
    answered, swapped = serving.run(token_requests(serving)), []
    for done in itertools.islice(itertools.cycle(answered), 40):
      serving.learner.runner.wait()
      if serving.learn(done, 0.0, background=True):
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
def test_broken_target_raises_or_is_returned_on_request(pair, speculates):
  nan = dataclasses.replace(pair, target_params=broken(pair.target_params))
  with Server(nan if speculates else nan.plain(), DECODING) as server:
    message = r"prompt [01] has no answer: .* not finite; check its weights"
    with pytest.raises(base.NotFiniteError, match=message):
      list(server.generate(TEXTS))
    assert server.statistics.requests <= DECODING.rows  # no more prompts were taken
    with pytest.raises(base.NotFiniteError, match=message):
      list(server.stream(TEXTS[0]))
    for answer in server.generate(TEXTS[:2], return_failed=True):
      assert answer.stop_reason == base.StopReason.NOT_FINITE
      assert answer.text == "" and not len(answer.tokens)


def test_answers_next_to_a_broken_one_are_delivered(server, plain, monkeypatch):
  """The second prompt has no finite logits; the order of the others is kept."""
  right = server.engine.step

  def step():
    return [
      dataclasses.replace(done, stop_reason=base.StopReason.NOT_FINITE)
      if done.request.tag[0] == 1
      else done
      for done in right()
    ]

  monkeypatch.setattr(server.engine, "step", step)
  found = []
  with pytest.raises(base.NotFiniteError, match="prompt 1 has no answer"):
    for answer in server.generate(TEXTS[:3], ordered=True):
      found.append(answer)
  assert [answer.index for answer in found] in ([0], [0, 2])
  assert all(answer.text == plain[answer.index] for answer in found)


def test_plain_server_has_no_draft_to_learn_or_to_save(pair, tmp_path):
  with Server(pair.plain(), DECODING) as serving:
    with pytest.raises(base.InputError, match="needs a pair with a draft"):
      list(serving.generate(["one"], learn=True))
    with pytest.raises(base.InputError, match="plain decoding has no draft"):
      serving.save(tmp_path / "draft.safetensors")
  assert not list(tmp_path.iterdir())


def test_broken_draft_is_named_changes_no_text_and_is_not_saved(pair, plain, tmp_path):
  nan = dataclasses.replace(pair, draft_params=broken(pair.draft_params))
  with Server(nan, DECODING, QUICK) as server:
    assert [a.text for a in server.generate(TEXTS, ordered=True)] == plain
    with pytest.raises(base.InputError, match="'draft' gives scores that are not"):
      list(server.generate(TEXTS, learn=True))
    with pytest.raises(base.InputError, match=r"the draft is not saved: .* not finite"):
      server.save(tmp_path / "draft.safetensors")
  assert not (tmp_path / "draft.safetensors").exists()


def test_statistics_agree_with_the_answers(pair):
  with Server(pair, DECODING) as server:
    answers = list(server.generate(TEXTS))
    found = server.statistics
    assert found.requests == len(TEXTS)
    assert found.tokens == sum(len(answer.tokens) for answer in answers)
    calls = sum(answer.target_calls for answer in answers)
    assert found.tokens_per_target_call == found.tokens / calls
    assert found.tokens_per_second > 0
