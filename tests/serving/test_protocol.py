"""Requests become prompts or refusals with one clear line each."""

import dataclasses
import json

import hypothesis
import pytest
from hypothesis import strategies as st

from osd_jax.data import chat
from osd_jax.engine.requests import SamplingConfig
from osd_serve import protocol
from osd_serve.protocol import Refusal

MESSAGES = [{"role": "user", "content": "Hello"}]


def settings(fields, is_chat=False):
  return read(fields, is_chat).settings(SamplingConfig(temperature=1.0))


def read(fields, is_chat=False):
  body = {"messages": MESSAGES} if is_chat else {"prompt": "Hello"}
  return protocol.read_ask({**body, **fields}, is_chat, "osd", 8)


def test_settings_become_those_of_the_prompt():
  prompt = settings(
    {
      "temperature": 0.5,
      "top_p": 0.9,
      "top_k": -1,
      "min_p": 0.1,
      "repetition_penalty": 1.2,
      "seed": 2**32 + 7,
      "stop": "x",
      "max_tokens": 9,
      "learn": False,
      "speculative": False,
    }
  )
  assert (prompt.temperature, prompt.top_p, prompt.top_k) == (0.5, 0.9, 0)
  assert (prompt.min_p, prompt.repetition_penalty, prompt.seed) == (0.1, 1.2, 7)
  assert (prompt.stop, prompt.max_new_tokens) == (("x",), 9)
  assert (prompt.learn, prompt.speculative) == (False, False)
  assert settings({}).temperature == settings({"temperature": None}).temperature == 1.0
  assert settings({}).seed != settings({}).seed
  assert settings({"max_completion_tokens": 3}, True).max_new_tokens == 3


@pytest.mark.parametrize("stop", ["\n", "\n\n", " ", ["\t", "Question:"]])
def test_white_space_is_a_stop_string(stop):
  assert settings({"stop": stop}).stop == tuple(
    stop if isinstance(stop, list) else [stop]
  )


@pytest.mark.parametrize(
  "prompt, inputs",
  [
    ("a", ("a",)),
    (["a", "b"], ("a", "b")),
    ([5, 6], ((5, 6),)),
    ([[5], [6, 7]], ((5,), (6, 7))),
    (["a", [5]], ("a", (5,))),
  ],
)
def test_prompts_are_texts_or_token_ids(prompt, inputs):
  assert read({"prompt": prompt}).inputs == inputs


def test_messages_become_a_conversation():
  parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
  assert read({"messages": [{"role": "user", "content": parts}]}, True).inputs == (
    "Hello",
  )
  several = [{"role": "developer", "content": "Be brief."}, *MESSAGES]
  (conversation,) = read({"messages": several}, True).inputs
  assert isinstance(conversation, chat.Conversation)
  assert [one["role"] for one in conversation.messages] == ["system", "user"]
  named = {"role": "user", "name": "Ada", "content": "Hello"}
  (conversation,) = read({"messages": [named]}, True).inputs
  assert conversation.messages == (named,), "templates may write the speaker's name"


# Parameters, the start of the message, and the name in the error.
BAD = [
  ({"temperature": "warm"}, 'temperature: received "warm", expected a number'),
  ({"temperature": True}, "temperature: received true, expected a number"),
  ({"temperature": -1}, "temperature: received -1, expected a number in 0..100"),
  ({"top_p": 0}, "top_p: received 0, expected a number above 0, at most 1"),
  ({"max_tokens": 0}, "max_tokens: received 0, expected an integer >= 1"),
  ({"max_tokens": 2.0}, "max_tokens: received 2.0, expected an integer >= 1"),
  ({"n": 1000}, "n: received 1000, expected an integer in 1..128"),
  ({"n": 100, "prompt": ["a", "b"]}, "n: received n = 100 for 2 prompts"),
  ({"stop": [""]}, 'stop: received [""], expected a non-empty text'),
  ({"stop": "a" * 1001}, "stop: received"),
  ({"stream": "yes"}, 'stream: received "yes", expected true or false'),
  ({"stream_options": {"include_usage": True}}, "stream_options: needs stream"),
  (
    {"stream": True, "stream_options": {"speed": 1}},
    "stream_options.speed: no such option",
  ),
  ({"prompt": " "}, 'prompt: received " ", expected a text, token ids, or a list of'),
  ({"prompt": []}, "prompt: received [], expected a text, token ids, or a list"),
  ({"prompt": [[]]}, "prompt: received [[]], expected a text, token ids"),
  ({"prompt": [1, "a"]}, 'prompt: received [1, "a"], expected a text, token ids'),
  ({"prompt": None}, "prompt: missing"),
  ({"logprobs": 9}, "logprobs: received 9, expected at most 8"),
  ({"logprobs": 1, "stream": True}, "logprobs: not supported together with stream"),
  ({"echo": True, "prompt": [5]}, "echo: expected a prompt of text"),
  ({"cache_salt": ""}, 'cache_salt: received "", expected a non-empty text'),
  ({"tenant": "a"}, "tenant: no such parameter; cache_salt keeps the n-gram cache"),
  ({"presence_penalty": 0.5}, "presence_penalty: not supported; leave it out, or"),
  ({"tools": [{}]}, "tools: not supported"),
  ({"best_of": 3}, "best_of: not supported"),
  ({"temprature": 1}, "temprature: no such parameter; did you mean temperature?"),
  ({"messages": MESSAGES}, "messages: no such parameter"),
]
BAD_CHATS = [
  ({"messages": []}, "messages: received [], expected a list of messages"),
  ({"messages": ["a"]}, 'messages[0]: received "a", expected an object'),
  ({"messages": [{"role": "tool"}]}, 'messages[0].role: received "tool"'),
  ({"messages": [{"role": "user"}]}, "messages[0].content: missing, expected a text"),
  (
    {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    'messages[0].content: received [{"type": "image_url"}], expected a text, or a list',
  ),
  (
    {"messages": [*MESSAGES, {"role": "assistant", "content": "a"}]},
    "messages: the last message is the assistant's",
  ),
  ({"messages": None}, "messages: missing"),
  ({"top_logprobs": 2}, "top_logprobs: needs logprobs = true"),
  ({"response_format": {"type": "json_object"}}, "response_format: not supported"),
  ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens: give max_completion"),
]


@pytest.mark.parametrize(
  "is_chat, fields, message",
  [(False, *bad) for bad in BAD] + [(True, *bad) for bad in BAD_CHATS],
)
def test_bad_request_is_refused_with_one_line(is_chat, fields, message):
  with pytest.raises(Refusal) as error:
    read(fields, is_chat)
  refusal = error.value
  assert refusal.message.startswith(message)
  assert refusal.status == 400 and "\n" not in refusal.message
  body = json.loads(json.dumps(refusal.body()))["error"]
  assert body["type"] == "invalid_request_error"
  assert body["param"] == message.split(":")[0].split("[")[0].split(".")[0]


VALUES = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
  lambda inner: (
    st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=5), inner, max_size=2)
  ),
  max_leaves=4,
)
NAMES = (*protocol.Completion.model_fields, *protocol.Chat.model_fields, "unknown")


@hypothesis.settings(max_examples=300, deadline=None, derandomize=True)
@hypothesis.given(
  st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4), st.booleans()
)
def test_any_body_is_read_or_refused(fields, is_chat):
  try:
    body = json.dumps(fields).encode()
    ask = read(protocol.read_object(body), is_chat)
  except Refusal as refusal:
    assert refusal.status in (400, 404) and "\n" not in refusal.message
    json.dumps(refusal.body())
  else:
    assert ask.inputs and ask.n >= 1


def test_values_without_effect_are_accepted():
  neutral = {name: values[0] for name, values in protocol.NEUTRAL.items()}
  labels = dict.fromkeys(protocol.IGNORED, "someone")
  assert read({**neutral, **labels}).n == 1
  assert read(dict.fromkeys(protocol.NEUTRAL, None)).n == 1


TOOLS = [{"type": "function", "function": {"name": "search"}}]


@pytest.mark.parametrize(
  "fields",
  [
    {"max_tokens": 8, "max_completion_tokens": 8},
    {"top_logprobs": 0},
    {"logprobs": False, "top_logprobs": 0},
    {"stream_options": {"include_usage": False}},
    {"stream_options": {}},
    {"stream": True, "stream_options": {"continuous_usage_stats": False}},
    {"chat_template_kwargs": {}, "stop_token_ids": [], "skip_special_tokens": True},
    {"include_stop_str_in_output": False, "add_generation_prompt": True},
    {"tools": TOOLS, "tool_choice": "none"},
    {"functions": TOOLS, "function_call": "none"},
  ],
)
def test_values_of_common_clients_without_effect_are_accepted(fields):
  plain, ask = read({"seed": 1}, True), read({"seed": 1, **fields}, True)
  assert (ask.top, ask.include_usage) == (None, False)
  limit = {"max_new_tokens": fields.get("max_tokens")}
  defaults = SamplingConfig()
  assert ask.settings(defaults) == dataclasses.replace(
    plain.settings(defaults), **limit
  )
  if "logprobs" in fields:
    assert read({"logprobs": False}).top is None


@pytest.mark.parametrize(
  "fields",
  [
    {"tools": TOOLS},
    {"tools": TOOLS, "tool_choice": "auto"},
    {"functions": TOOLS, "tool_choice": "none"},
    {"stream": True, "stream_options": {"continuous_usage_stats": True}},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"stop_token_ids": [5]},
    {"skip_special_tokens": False},
    {"logprobs": 1},
  ],
)
def test_values_with_an_effect_are_refused(fields):
  with pytest.raises(Refusal) as error:
    read(fields, True)
  assert error.value.param == next(
    name for name in reversed(fields) if name != "tool_choice"
  )


def test_other_models_are_not_found():
  with pytest.raises(Refusal) as error:
    read({"model": "gpt"})
  assert error.value.status == 404


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"a"', b"\xff", b"[" * 10**5])
def test_body_that_is_no_object_is_refused(body):
  with pytest.raises(Refusal) as error:
    protocol.read_object(body)
  assert error.value.status == 400 and "\n" not in error.value.message
