"""Answers over HTTP are those of `Server.generate`, streamed or not."""

import dataclasses
import json
import re
import threading
import types

import openai
import pytest
import tiny_pair
from serving import running
from serving.running import TEXTS

from osd_jax.data import chat
from osd_jax.data.vocabulary import Vocabulary
from osd_jax.engine.server import Server
from osd_serve.service import Service


@pytest.fixture(scope="module")
def server(pair):
  with running.running(pair, max_waiting=32) as one:
    yield one


@pytest.fixture(scope="module")
def client(server):
  with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as one:
    yield one


def events(server, path, **fields):
  """The parsed events of a stream; the last one must be [DONE]."""
  with server.client.stream("POST", path, json={"stream": True, **fields}) as answer:
    assert answer.status_code == 200
    lines = [line for line in answer.iter_lines() if line]
  assert all(line.startswith("data: ") for line in lines)
  assert lines[-1] == "data: [DONE]"
  return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_concurrent_answers_equal_the_targets_while_the_draft_learns(server, plain):
  texts = {}

  def ask(index):
    texts[index] = server.text(TEXTS[index % len(TEXTS)])

  threads = [threading.Thread(target=ask, args=(i,)) for i in range(18)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert [texts[i] for i in range(18)] == plain * 3
  assert len(set(plain)) > 1
  for _ in range(100):  # a finished update is taken at the next answer
    assert [server.text(text) for text in TEXTS] == plain
    if server.service.server.engine.draft_version > 1:
      return
  raise AssertionError("no update was served")


def test_streamed_pieces_are_the_whole_answer(server, plain):
  options = {"include_usage": True}
  chunks = events(
    server, "/v1/completions", prompt=TEXTS[1], temperature=0, stream_options=options
  )
  *pieces, end, usage = chunks
  assert "".join(chunk["choices"][0]["text"] for chunk in pieces) == plain[1]
  assert len(pieces) > 1
  assert end["choices"][0]["finish_reason"] == "length"
  assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 24
  assert usage["metrics"]["speculative_decoding"]["num_spec_tokens"] == 3
  assert len({chunk["id"] for chunk in chunks}) == 1


def test_chat_of_one_message_is_the_prompt(server, plain):
  messages = [{"role": "user", "content": TEXTS[2]}]
  whole = server.post("/v1/chat/completions", messages=messages, temperature=0).json()
  message = whole["choices"][0]["message"]
  assert (message["role"], message["content"]) == ("assistant", plain[2])
  first, *chunks, last = events(
    server, "/v1/chat/completions", messages=messages, temperature=0
  )
  assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
  texts = [chunk["choices"][0]["delta"]["content"] for chunk in chunks]
  assert "".join(texts) == plain[2]
  assert last["choices"][0]["delta"] == {} and "metrics" in last


def test_openai_client_reads_answers_streams_and_errors(client, plain):
  assert [model.id for model in client.models.list()] == ["osd"]
  settings = {"model": "osd", "temperature": 0}
  whole = client.completions.create(prompt=TEXTS[:2], **settings)
  assert [choice.text for choice in whole.choices] == plain[:2]
  messages = [{"role": "user", "content": TEXTS[0]}]
  chat = client.chat.completions.create(
    messages=messages, extra_body={"learn": False, "speculative": False}, **settings
  )
  assert chat.choices[0].message.content == plain[0]
  assert chat.usage.total_tokens == chat.usage.prompt_tokens + 24
  stream = client.chat.completions.create(messages=messages, stream=True, **settings)
  pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
  assert "".join(pieces) == plain[0]
  with pytest.raises(openai.BadRequestError, match="logit_bias: not supported"):
    client.completions.create(prompt="a", logit_bias={"5": 1}, **settings)
  with pytest.raises(openai.NotFoundError, match='"gpt", expected "osd"'):
    client.completions.create(prompt="a", model="gpt")


def test_speculation_is_reported_per_answer(server):
  counts = server.complete(TEXTS[0])["metrics"]["speculative_decoding"]
  steps, histogram = counts["num_spec_steps"], counts["acceptance_histogram"]
  assert sum(histogram) == steps > 0 and len(histogram) == 4
  accepted = sum(count * accepted for accepted, count in enumerate(histogram))
  assert accepted == counts["num_accepted_draft_tokens"]
  assert counts["mean_acceptance_length"] == 1 + accepted / steps
  plain = server.complete(TEXTS[0], speculative=False)["metrics"]
  assert plain["speculative_decoding"]["num_draft_tokens"] == 0
  several = server.complete(TEXTS[0], n=2)["metrics"]
  assert several == {"speculative_decoding": None}


def test_samples_repeat_with_their_seed_and_differ_within_a_request(server):
  # Without drafts, which change while the draft learns, and samples of "rejection" with
  # them.
  ask = {"prompt": TEXTS[0], "n": 3, "temperature": 1.0, "speculative": False}

  def texts(**fields):
    body = server.post("/v1/completions", **ask, **fields).json()
    return [choice["text"] for choice in body["choices"]]

  assert texts(seed=5) == texts(seed=5)
  assert len(set(texts(seed=5))) == 3
  assert texts(seed=-1) != texts(seed=5)
  assert texts() != texts()


def test_stop_max_tokens_and_echo(server, plain):
  assert len(plain[0]) > 8
  stop = plain[0][4:7]
  cut = server.complete(TEXTS[0], stop=[stop, "never"])["choices"][0]
  assert cut["text"] == plain[0][: plain[0].index(stop)]
  assert cut["finish_reason"] == "stop"
  short = server.complete(TEXTS[0], max_tokens=5)
  assert short["usage"]["completion_tokens"] == 5
  assert short["choices"][0]["finish_reason"] == "length"
  assert plain[0].startswith(short["choices"][0]["text"])
  assert server.text(TEXTS[0], echo=True) == TEXTS[0] + plain[0]


def test_token_ids_are_prompts_and_round_trip(server, plain):
  body = server.post("/tokenize", prompt=TEXTS[3]).json()
  assert body["count"] == len(body["tokens"]) and body["max_model_len"] == 72
  assert server.text(body["tokens"]) == plain[3]
  back = server.post("/detokenize", tokens=body["tokens"]).json()
  assert back == {"prompt": TEXTS[3]}


def test_log_probs_are_those_of_the_target(server, pair, plain):
  with Server(pair.plain(), running.DECODING) as alone:
    (right,) = alone.generate(TEXTS[0], log_probs=True)
  scores = server.complete(TEXTS[0], logprobs=2)["choices"][0]["logprobs"]
  assert scores["token_logprobs"] == pytest.approx(right.log_probs.tolist(), abs=1e-3)
  # A part of a character is written as its bytes; here it is no character at all.
  named = r"bytes:(\\x[0-9a-f]{2})+"
  texts = [re.sub(named, "\ufffd", token) for token in scores["tokens"]]
  assert "".join(texts) == plain[0]
  assert all(len(top) <= 2 for top in scores["top_logprobs"])
  messages = [{"role": "user", "content": TEXTS[0]}]
  chat = server.post(
    "/v1/chat/completions",
    messages=messages,
    temperature=0,
    logprobs=True,
    top_logprobs=3,
  ).json()
  content = chat["choices"][0]["logprobs"]["content"]
  assert [one["logprob"] for one in content] == scores["token_logprobs"]
  for one in content:  # greedy: the first alternative is the token itself
    best = one["top_logprobs"][0]
    assert best["logprob"] == pytest.approx(one["logprob"], abs=1e-3)
    assert len(one["top_logprobs"]) == 3


def test_only_chats_have_the_template(tmp_path):
  """A completion continues the plain text even if the model has a chat template."""
  path = tmp_path / "tokenizer.model"
  path.write_bytes(tiny_pair.llama_tokenizer())
  template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
  vocabulary = Vocabulary.load(path, template=template)
  service = types.SimpleNamespace(
    server=types.SimpleNamespace(pair=types.SimpleNamespace(vocabulary=vocabulary)),
    _untemplated=dataclasses.replace(vocabulary, template=None),
  )

  def decoded(text, is_chat):
    return vocabulary.decode(Service.encode(service, text, is_chat))

  assert decoded("Hi", True).strip() == "user: Hi"
  assert decoded("Hi", False).strip() == "Hi"
  messages = [{"role": "system", "content": "A"}, {"role": "user", "content": "B"}]
  assert decoded(chat.Conversation(messages), True).strip() == "system: A\nuser: B"
  assert Service.encode(service, (5, 6), False).tolist() == [5, 6]
