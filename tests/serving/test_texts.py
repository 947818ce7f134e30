"""Texts of answers: the space before the first word, and bytes of single tokens."""

import types

import numpy as np
import pytest
import tiny_pair

from osd_jax.engine.requests import Prompt, TextSoFar
from osd_serve import protocol, scheduler


@pytest.fixture(scope="module", params=["shipped", "llama", "bytes"])
def vocabulary(request, tmp_path_factory):
  return tiny_pair.vocabulary(request.param, tmp_path_factory.mktemp("vocabulary"))


@pytest.mark.parametrize(
  "prompt, rest", [("the red", " house of"), ("the blue", " tree"), ("a", "\nb")]
)
def test_completion_follows_its_prompt(vocabulary, prompt, rest):
  whole = vocabulary.encode(prompt + rest)
  count = len(vocabulary.encode(prompt)) if vocabulary.is_causal else 0
  answer, pieces = np.asarray(whole[count:], np.int32), []
  text = TextSoFar(vocabulary.decode_continuation)
  for end in range(1, len(answer) + 1):
    text.watch(answer[:end])
    pieces.append(text.next_piece())
  found, last = text.finish(answer)
  assert "".join([*pieces, last]) == found
  before = vocabulary.decode(whole[:count])
  assert before + found == vocabulary.decode(whole)
  if vocabulary.is_causal:  # a T5 reads the prompt and does not continue it
    assert (before, found) == (prompt, rest)


def asked(is_chat, top):
  if is_chat:
    fields = {"messages": [{"role": "user", "content": "a"}]}
    fields |= {"logprobs": True, "top_logprobs": top}
  else:
    fields = {"prompt": "a", "logprobs": top}
  return protocol.read_ask(fields, is_chat, "osd", top)


@pytest.mark.parametrize(
  "text", ["plain text", "naïve", "ok 🙂 the", "🙂", "日本\n\n x"]
)
@pytest.mark.parametrize("is_chat", [True, False])
def test_log_probs_have_the_bytes_of_the_text(vocabulary, text, is_chat):
  ids = [*vocabulary.encode(text), vocabulary.eos_ids[0]]
  tokens, n = np.asarray(ids, np.int32), len(ids)
  ranked = np.stack([tokens, (tokens + 1) % 200], 1)[None]
  records = types.SimpleNamespace(ids=ranked, log_probs=np.full((1, n, 2), -1.0))
  done = types.SimpleNamespace(
    tokens=tokens, batch=types.SimpleNamespace(records=records)
  )
  scores = protocol.log_probs(asked(is_chat, 2), done, np.full(n, -1.0), vocabulary)
  if is_chat:
    content = scores["content"]
    assert bytes(byte for one in content for byte in one["bytes"]).decode() == (
      vocabulary.decode(tokens)
    )
    for one in content:  # the best alternative is the token itself
      best = one["top_logprobs"][0]
      assert (best["token"], best["bytes"]) == (one["token"], one["bytes"])
      assert "\ufffd" not in one["token"]
    return
  expected = vocabulary.decode_continuation(tokens)
  read = b"".join(map(from_name, scores["tokens"]))
  assert read.decode() == expected
  for token, top in zip(scores["tokens"], scores["top_logprobs"], strict=True):
    assert next(iter(top)) == token
  assert len(scores["text_offset"]) == n and scores["text_offset"][0] == 0
  assert scores["text_offset"][-1] == len(expected)


def from_name(token):
  """The bytes of a token as OpenAI's completions write it."""
  if not token.startswith("bytes:"):
    return token.encode()
  return bytes.fromhex(token.removeprefix("bytes:").replace("\\x", ""))


def test_queue_decodes_with_the_function_of_the_request(vocabulary):
  job = scheduler.Job(0, np.ones(1, int), Prompt("a"), lambda ids: "!", True, 0)
  job.request.watch(np.ones(2, int))
  assert job.text.next_piece() == "!"
