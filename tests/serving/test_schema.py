"""`/openapi.json` describes the limits, the paths, and what requests return."""

import dataclasses

import hypothesis
import pytest
from serving import running
from serving.running import TEXTS

from osd_serve import app, protocol, schema


@pytest.fixture(scope="module")
def server(pair):
  decoding = dataclasses.replace(running.DECODING, cache_tokens=1024)
  with running.running(pair, token="sesame", decoding=decoding) as one:
    yield one


def test_limits_are_those_of_the_server(server):
  described = server.client.get("/openapi.json").json()["components"]["schemas"]
  limits = {"max_tokens": 24, "top_logprobs": protocol.MAX_TOP}
  for name, limit in limits.items():
    assert described["Chat"]["properties"][name]["anyOf"][0]["maximum"] == limit
  for name in ("Chat", "Completion", "Tokenize", "Detokenize"):
    assert described[name]["properties"]["model"]["anyOf"][0]["const"] == "osd"


def test_paths_are_the_routes(server):
  paths = server.client.get("/openapi.json").json()["paths"]
  described = {(path, verb.upper()) for path, verbs in paths.items() for verb in verbs}
  routes = app.make(server.service).routes
  assert described == {
    (route.path.replace(":path", ""), verb)
    for route in routes
    for verb in route.methods - {"HEAD"}
  }


def test_token_is_described_where_one_is_needed():
  assert "security" in schema.make("osd", 24, 64, token=True)
  assert "security" not in schema.make("osd", 24, 64, token=False)


def send_generated(server, described, path, verb, count=20):
  """Sends requests that the description allows; returns the statuses they got."""
  schemathesis = pytest.importorskip("schemathesis")
  from schemathesis.specs.openapi import checks as conformance

  statuses, kinds = [], set()
  described = schemathesis.openapi.from_dict(described)
  checks = [
    schemathesis.checks.not_a_server_error,
    conformance.status_code_conformance,
    conformance.content_type_conformance,
    conformance.response_schema_conformance,
  ]

  @hypothesis.settings(
    max_examples=count,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
  )
  @hypothesis.given(case=described[path][verb].as_strategy())
  def send(case):
    headers = {"Authorization": "Bearer sesame"}
    answer = case.call_and_validate(
      base_url=server.url, headers=headers, checks=checks, timeout=60
    )
    statuses.append(answer.status_code)
    kinds.add(answer.headers.get("content-type", [""])[0].partition(";")[0])

  send()
  return statuses, kinds


@pytest.mark.slow
def test_documented_requests_get_documented_answers(server):
  described = server.client.get("/openapi.json").json()
  for path, verbs in described["paths"].items():
    for verb in verbs:
      count = 60 if "completions" in path else 8
      statuses, _ = send_generated(server, described, path, verb, count)
      if (path, verb) != ("/admin/draft", "put"):  # no generated file is a draft
        # Otherwise only refusals would have been tested.
        assert any(status < 300 for status in statuses), (path, statuses)
  chats = [[{"role": "user", "content": text}] for text in TEXTS]
  for path, name, prompts in (
    ("completions", "Completion", TEXTS),
    ("chat/completions", "Chat", chats),
  ):
    # Few of the requests above ask for a stream and are not refused.
    whole = described["components"]["schemas"][name]
    (prompt,) = whole["required"]
    properties = {"stream": {"const": True}, prompt: {"enum": prompts}}
    properties["temperature"] = whole["properties"]["temperature"]
    whole |= {"properties": properties, "required": ["stream", prompt]}
    statuses, kinds = send_generated(server, described, f"/v1/{path}", "post", 20)
    assert "text/event-stream" in kinds, statuses
  assert server.text(TEXTS[0])


@pytest.mark.slow
@pytest.mark.parametrize(
  ("change", "failure"),
  [
    ({"object": {"const": "another"}}, "violates schema"),
    ({"created": {"type": "string"}}, "violates schema"),
    (None, "Undocumented status code"),
  ],
)
def test_answer_that_is_not_as_described_is_noticed(server, change, failure):
  """The negative control."""
  described = server.client.get("/openapi.json").json()
  operation = described["paths"]["/v1/completions"]["post"]
  if change is None:
    del operation["responses"]["200"]
  else:
    described["components"]["schemas"]["CompletionAnswer"]["properties"] |= change
  with pytest.raises(BaseExceptionGroup) as error:
    send_generated(server, described, "/v1/completions", "post", 40)
  assert any(failure in str(one) for one in error.value.exceptions)
