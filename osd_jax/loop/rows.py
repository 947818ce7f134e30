"""The rows of metrics.jsonl: one dataclass for each kind of row.

`runs.MetricsLog.write` appends a row and `read` returns the rows of a file. Docstrings
say of every field its unit, when it is logged unless it always is, and what it holds;
docs/reference/metrics.md is generated from them. A field whose default is None is left
out of the file while it is None.
"""

import dataclasses
import importlib.util
import math
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from osd_jax import base, runs
from osd_jax import certificate as certificate_lib
from osd_jax.costs import table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """One row; `kind` names its class in the file.

  `heading` is that of its table in a report without requests, "" if it has none.
  """

  kind: ClassVar[str]
  heading: ClassVar[str]


AnyRow = typing.TypeVar("AnyRow", bound=Row)

KINDS: dict[str, type[Row]] = {}  # kind -> its class
_TOOLS = "osd_tools.rows"  # the module with the kinds of the tools


@typing.dataclass_transform(kw_only_default=True, frozen_default=True)
def row(kind: str, heading: str = "") -> Callable[[type[Any]], type[Any]]:
  """Makes a frozen dataclass and registers it as the class of a kind of rows."""

  def register(cls: type[Any]) -> type[Any]:
    cls.kind, cls.heading = kind, heading
    KINDS[kind] = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    return KINDS[kind]

  return register


# --- A run that serves ----------------------------------------------------------------


@row("start")
class Start(Row):
  """Once per session, before its first request.

  Attributes:
    loading_ms: ms | loading the models and the stream
    compiling_ms: ms | compiling all calls
    measuring_ms: ms | measuring costs
  """

  loading_ms: float
  compiling_ms: float
  measuring_ms: float


@row("costs")
class Costs(table.Costs, Row):
  """Once, before the first request. Each value is the mean of the faster half."""


@row("request")
class Request(Row):
  """One per answer.

  *recorded*: the answer has the target's distributions, as always in osd online.
  *floor*: with `OnlineConfig.floor_metering`. *compared*: one of
  `OnlineConfig.compare_every` requests, chosen at random. *learning*: with
  `OnlineConfig.learn`. *judged*: while learning, from the first comparison on.

  Attributes:
    index: count | number of requests that finished before this one
    query: place | its position in the stream, from 0; requests may finish in another
      order
    source: text | label of its task
    overlap: 0..1 | recorded | `distribution_overlap` of the serving draft, before it
      trains on the request. With `DraftServing.shortlist`, this and the next four
      fields count only the tokens of the shortlist
    overlap_upper: 0..1 | recorded | its `distribution_overlap_upper`
    acceptance_rate: 0..1 | recorded | its `acceptance_rate`
    floor_overlap: 0..1 | floor | `distribution_overlap` of the frozen draft
    floor_acceptance_rate: 0..1 | floor | its `acceptance_rate`
    draft_acceptance_rate: 0..1 or null | `accepted` / `drafted`
    tokens_per_target_call: tokens | `output_tokens` / `target_calls`
    accepted_per_position: K counts | number of rounds that accepted the i-th drafted
      token
    target_calls: count | verifications, and plain steps when an adaptive K drafts
      nothing
    drafted: tokens | drafted tokens that were verified and could be emitted
    accepted: tokens | drafted tokens that were accepted
    output_tokens: tokens | emitted tokens, including end-of-sequence
    stop_reason: name | `EOS`, `LENGTH`, `STOP_STRING`, or `NOT_FINITE`: the target's
      logits were not finite
    loops: true or false | `loops` of the answer
    draft_version: count | version of the draft that served when the answer ended: the
      number of updates that changed it, 0 for the first draft
    decode_ms: ms | its prefill plus its share of the calls: a call's time / requests in
      flight
    online_ms_per_token: ms or null | `decode_ms` / `output_tokens`
    metering_ms: ms | time of measuring the agreements, while serving waited
    metering_beside_ms: ms | the same, while serving continued
      (`LearningConfig.free_updates`)
    plain_ms_per_token: ms | compared | the same request with plain decoding, one
      request at a time: its time / `output_tokens`
    floor_ms_per_token: ms | compared | the same request with the frozen draft, one
      request at a time
    floor_draft_acceptance_rate: 0..1 | compared | its accepted / drafted
    floor_tokens_per_target_call: tokens | compared | its emitted tokens / target calls
    update_wait_ms: ms | compared | time that serving would have lost to the running
      update while the comparison waited for it
    compare_ms: ms | compared | serving the request twice more and checking the output
    certificate: object, see below | compared, if outputs must equal plain decoding's
      (an exact rule, and temperature 0 or coupling); also with `NOT_FINITE` | the
      verdict on this output
    rival_overlap: 0..1 | learning | `distribution_overlap` of the draft that the gate
      compares with the serving one; missing if it was not measured
    gate_ms: ms | learning | measuring the gate's drafts, while serving waited;
      `metering_beside_ms` holds it while serving continued
    paused: true or false | learning | whether the schedule has paused updates
    run_seconds: s | wall time since the first request, over all sessions of the run
    saved_seconds: s | judged | time saved so far against the frozen draft, over all
      requests and updates included; negative if learning has not paid
    saved_plain_seconds: s | judged | the same against plain decoding
    ahead_since: requests | judged | request since which both have stayed above 0
  """

  index: int
  query: int
  source: str
  overlap: float | None = None
  overlap_upper: float | None = None
  acceptance_rate: float | None = None
  floor_overlap: float | None = None
  floor_acceptance_rate: float | None = None
  draft_acceptance_rate: float | None
  tokens_per_target_call: float | None
  accepted_per_position: Sequence[int]
  target_calls: int
  drafted: int
  accepted: int
  output_tokens: int
  stop_reason: str
  loops: bool
  draft_version: int
  decode_ms: float
  online_ms_per_token: float | None
  metering_ms: float = 0.0
  metering_beside_ms: float = 0.0
  plain_ms_per_token: float | None = None
  floor_ms_per_token: float | None = None
  floor_draft_acceptance_rate: float | None = None
  floor_tokens_per_target_call: float | None = None
  update_wait_ms: float | None = None
  compare_ms: float | None = None
  certificate: certificate_lib.Certificate | None = None
  rival_overlap: float | None = None
  gate_ms: float | None = None
  paused: bool | None = None
  run_seconds: float = 0.0
  saved_seconds: float | None = None
  saved_plain_seconds: float | None = None
  ahead_since: int | None = None


@row("update")
class Update(Row):
  """One per update of the draft.

  Attributes:
    finished: requests | finished requests when its draft was swapped in
    launched: requests | finished requests when it was launched
    version: count | version of the draft after it; unchanged if all slices were skipped
    loss: nats (total variation: 0..1) | mean over its slices of
      `LossConfig.divergence`, each before its step
    grad_norm: number | mean over its slices of the gradient's global norm, unclipped
    steps: count | slices
    skipped: count | slices skipped because loss, gradient or step was not finite
    update_ms: ms | time it ran, in parallel to serving; on a mesh, between calls
    wait_ms: ms | time serving waited for it
  """

  finished: int
  launched: int
  version: int
  loss: float
  grad_norm: float
  steps: int
  skipped: int
  update_ms: float
  wait_ms: float


@row("gate")
class Gate(Row):
  """One per decision of [the gate](../how_it_works/learning.md).

  Attributes:
    finished: requests | finished requests when it was logged
    name: name | `promoted`: trained drafts serve from now on; `confirmed`: a newer
      draft is the one to return to; `taken_back`: it serves again; `floor_returned`:
      the first draft serves again; `refused`: a new draft was far worse on an answer
    version: count | version of the draft that was shown to be better
    answers: count | answers that show it
    gain: overlap | its mean lead on them
    text: text | one line for the user
  """

  finished: int
  name: str
  version: int
  answers: int
  gain: float
  text: str


@row("alarm")
class Alarm(Row):
  """One at the start and one at the end of each alarm.

  Attributes:
    finished: requests | finished requests when it was logged
    alarm: name | `acceptance_pinned_at_0`, `acceptance_pinned_at_1`,
      `update_not_finite`, `output_loops`
    active: true or false | true at its start, false at its end
    text: text | one line for the user
  """

  finished: int
  alarm: str
  active: bool
  text: str


@row("event")
class Event(Row):
  """Something that happens rarely.

  Attributes:
    finished: requests | finished requests when it was logged
    name: name | `padded`: the target is the shipped one at the cost of a larger model;
      `sibling`: the draft was trained for another target of the same sizes;
      `mesh`: some arrays of the target could not be split over the devices; `replica`:
      one was lost, and its requests moved to others; `shared`: requests are decoded
      together, and compared ones again alone; `unsaved`: a draft was not saved, because
      its parameters or scores are not finite
    text: text | one line for the user
  """

  finished: int
  name: str
  text: str


@row("summary")
class Summary(Row):
  """Once, at the end.

  Attributes:
    wall_seconds: s | from the first request to the end, over all sessions
  """

  wall_seconds: float


# --- Commands that read examples, train and evaluate ----------------------------------


@row("note")
class Note(Row):
  """A sentence for the report: why a program was refused, what osd advise suggests.

  Attributes:
    text: text | one line for the user
  """

  text: str


@row("data")
class Data(Row):
  """The examples that a command read; osd pretrain has `train` and `evaluation`.

  Attributes:
    tasks: object, see below | name of a task -> its counts
  """

  tasks: Mapping[str, Any]


@row("step")
class Step(Row):
  """One per some optimizer steps of osd offline and osd pretrain.

  Attributes:
    step: count | optimizer steps so far
    loss: nats (total variation: 0..1) | mean since the previous row, each before its
      step; offline `LossConfig.divergence`, pretrain cross entropy per token
    skipped: count | steps skipped so far because they were not finite
  """

  step: int
  loss: float
  skipped: int


@row("evaluation")
class Evaluation(Row):
  """One per evaluation of osd offline and osd pretrain on held-out prompts.

  Attributes:
    step: count | optimizer steps so far
    tasks: object, see below | label of a task -> its scores
  """

  step: int
  tasks: Mapping[str, Mapping[str, Any]]


@row("quality", "Target")
class Quality(Row):
  """One per task of osd evaluate: the answers of the target.

  Attributes:
    task: text | label
    prompts: count | number of prompts answered by the target
    references: count | references that are neither missing nor cut
    exact_match: 0..1 or null | share of these that the answer equals exactly
    ended: 0..1 | answers that end in end-of-sequence
    looping: 0..1 | answers that loop
    distinct: 0..1 | different texts / answers
    output_tokens: tokens | mean length
    token_accuracy: 0..1 or null | share of reference tokens that are the target's first
      choice, mean over prompts
  """

  task: str
  prompts: int
  references: int
  exact_match: float | None
  ended: float
  looping: float
  distinct: float
  output_tokens: float
  token_accuracy: float | None


@row("draft", "Drafts")
class Draft(Row):
  """One per task and draft of osd evaluate.

  Attributes:
    task: text | label
    draft: text | file name without extension
    distribution_overlap: 0..1 | `mean_agreement` on the target's own answers
    distribution_overlap_upper: 0..1 | likewise
    acceptance_rate: 0..1 | likewise
    draft_acceptance_rate: 0..1 or null | accepted / drafted, over all prompts of the
      task
    tokens_per_target_call: tokens | emitted / target calls, likewise
  """

  task: str
  draft: str
  distribution_overlap: float | None
  distribution_overlap_upper: float | None
  acceptance_rate: float | None
  draft_acceptance_rate: float | None
  tokens_per_target_call: float | None


@row("change", "Against the first draft")
class Change(Draft):
  """The figures of a later draft minus those of the first; fields as in `draft`."""


@row("speed", "Speed")
class Speed(Row):
  """One per draft and number of rows in flight of osd evaluate.

  Attributes:
    rows: count | rows in flight
    draft: text | its name
    plain_ms_per_token: ms | wall time / emitted tokens of plain decoding, same requests
    ms_per_token: ms | with the draft
    speed_up: ratio | `plain_ms_per_token` / `ms_per_token`
    predicted: ratio, null with an adaptive K | `predicted_speed_up` from the costs
      below
    predicted_paper: likewise | with v = 1
    tokens_per_target_call: tokens | over the timed requests
    cost_ratio: ratio | c = `draft_step_ms` / `plain_step_ms`
    verify_ratio: ratio | v = `verify_ms` / `plain_step_ms`
    draft_step_ms: ms | one step of the draft, all requests in flight
    plain_step_ms: ms | one plain step of the target
    verify_ms: ms | the target on K + 1 tokens
  """

  rows: int
  draft: str
  plain_ms_per_token: float
  ms_per_token: float
  speed_up: float
  predicted: float | None
  predicted_paper: float | None
  tokens_per_target_call: float | None
  cost_ratio: float | None
  verify_ratio: float | None
  draft_step_ms: float | None
  plain_step_ms: float | None
  verify_ms: float | None


@row("replayed")
class Replayed(Row):
  """One per answer of the log that osd advise replays.

  Attributes:
    answer: count | its place in the log, from 0
    shares: 0..1 | `cache`, `draft`, `draft that learns` -> share of the answer's tokens
      that it drafts rightly
  """

  answer: int
  shares: Mapping[str, float]


@row("certificate", "Certificate")
class Certified(Row):
  """The certificate of one draft (osd evaluate) or drafter (osd certify).

  Attributes:
    K: tokens | certify | drafted tokens
    rows: count | certify | rows in flight
    draft: text | evaluate: file name; certify: the drafter, a key of `DRAFTS`
    check: text | evaluate | as in `request`
    outputs: count | number of checked outputs
    equal: count | outputs equal to the expected one
    tokens: tokens | number of checked tokens
    near_ties: count | differences that pass
    failures: count | outputs with a difference that does not pass
    broken: count | outputs that ended because the target's logits were not finite
    passed: true or false | no failure, nothing broken, and at most max(1, 1e-5 *
      tokens) near ties
    draft_acceptance_rate: 0..1 or null | certify | accepted / drafted
  """

  K: int | None = None
  rows: int | None = None
  draft: str
  check: str | None = None
  outputs: int
  equal: int
  tokens: int
  near_ties: int
  failures: int
  broken: int
  passed: bool
  draft_acceptance_rate: float | None = None


# --- Reading --------------------------------------------------------------------------


def read(path: str | Path) -> list[Row]:
  """Returns the rows of a metrics.jsonl; a kind without a class is skipped.

  Raises:
    InputError: as `runs.read`, or a row lacks a field.
  """
  return list(filter(None, map(parse, runs.read(path))))


def parse(entry: Mapping[str, Any]) -> Row | None:
  """Returns the row of a JSON object; None if its kind has no class.

  Numbers that were not finite are NaN.
  """
  kind = entry.get("kind", "")
  if kind not in KINDS and importlib.util.find_spec(_TOOLS.partition(".")[0]):
    importlib.import_module(_TOOLS)
  cls = KINDS.get(kind)
  if cls is None:
    return None
  values = {**entry, **dict.fromkeys(entry.get("nonfinite", ()), math.nan)}
  names = {field.name for field in dataclasses.fields(cls)}
  values = {name: value for name, value in values.items() if name in names}
  if cls is Request and values.get("certificate"):
    certificate = base.from_json(values["certificate"], certificate_lib.Certificate)
    values["certificate"] = certificate
  try:
    return cls(**values)
  except TypeError as error:
    raise base.InputError(
      f"metrics.jsonl: received a row of kind {cls.kind!r} with the fields"
      f" {sorted(values)}; {error}. Another version of osd_jax wrote it."
    ) from error


def of(kind: type[AnyRow], rows: Iterable[Row]) -> list[AnyRow]:
  """Returns the rows of one class, in the order of the log."""
  return [entry for entry in rows if type(entry) is kind]


def requests(rows: Iterable[Row]) -> list[Request]:
  """Returns the requests in the order of the stream, not that of their ends."""
  return sorted(of(Request, rows), key=lambda request: request.query)


def column(rows: Sequence[Any], name: str) -> np.ndarray:
  """One field as [n] float64; NaN where a row has no value."""
  values = (getattr(row, name) for row in rows)
  return np.array([math.nan if v is None else float(v) for v in values], np.float64)
