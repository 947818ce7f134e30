"""The rows of metrics.jsonl: one dataclass for each kind of row.

`runs.MetricsLog.write` appends a row and `read` returns the rows of a file. Every field
has a `Doc`; docs/reference/metrics.md is generated from them. A field whose default is
None is left out of the file while it is None.
"""

import dataclasses
import functools
import importlib.util
import math
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np

from osd_jax import base, runs
from osd_jax import certificate as certificate_lib
from osd_jax.costs import table


@dataclasses.dataclass(frozen=True)
class Doc:
  """What a field holds, and when it is logged ("" for always)."""

  unit: str
  text: str
  when: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """One row; `kind` names its class in the file.

  `heading` is that of its table in a report without requests, "" if it has none.
  """

  kind: ClassVar[str]
  heading: ClassVar[str] = ""


AnyRow = typing.TypeVar("AnyRow", bound=Row)

KINDS: dict[str, type[Row]] = {}  # kind -> its class
_TOOLS = "osd_tools.rows"  # the module with the kinds of the tools


@typing.dataclass_transform(kw_only_default=True, frozen_default=True)
def row(kind: str) -> Callable[[type[Any]], type[Any]]:
  """Makes a frozen dataclass and registers it as the class of a kind of rows."""

  def register(cls: type[Any]) -> type[Any]:
    cls.kind = kind
    KINDS[kind] = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    return KINDS[kind]

  return register


# Units that many fields have.
_SHARE, _COUNT, _MS, _TOKENS = "0..1", "count", "ms", "tokens"
_REQUESTS = Doc("requests", "finished requests when it was logged")
_TEXT = Doc("text", "one line for the user")
_LOSS = "nats (total variation: 0..1)"


# --- A run that serves ----------------------------------------------------------------


@row("start")
class Start(Row):
  """Once per session, before its first request."""

  loading_ms: Annotated[float, Doc(_MS, "loading the models and the stream")]
  compiling_ms: Annotated[float, Doc(_MS, "compiling all calls")]
  measuring_ms: Annotated[float, Doc(_MS, "measuring costs")]


@row("costs")
class Costs(table.Costs, Row):
  """Once, before the first request. Each value is the mean of the faster half."""


@row("request")
class Request(Row):
  """One per answer.

  *recorded*: the answer has the target's distributions, as always in osd online.
  *floor*: with `OnlineConfig.floor_metering`. *compared*: one of
  `OnlineConfig.compare_every` requests, chosen at random. *learning*: with
  `OnlineConfig.learn`. *gate*: while learning, with `LearningConfig.gate`. *judged*:
  while learning, from the first comparison on.
  """

  index: Annotated[int, Doc(_COUNT, "number of requests that finished before this one")]
  query: Annotated[
    int,
    Doc(
      "place",
      "its position in the stream, from 0; requests may finish in another order",
    ),
  ]
  source: Annotated[str, Doc("text", "label of its task")]
  overlap: Annotated[
    float | None,
    Doc(
      _SHARE,
      "`distribution_overlap` of the serving draft, before it trains on the request."
      " With `DraftServing.shortlist`, this and the next four fields count only the"
      " tokens of the shortlist",
      "recorded",
    ),
  ] = None
  overlap_upper: Annotated[
    float | None, Doc(_SHARE, "its `distribution_overlap_upper`", "recorded")
  ] = None
  acceptance_rate: Annotated[
    float | None, Doc(_SHARE, "its `acceptance_rate`", "recorded")
  ] = None
  floor_overlap: Annotated[
    float | None, Doc(_SHARE, "`distribution_overlap` of the frozen draft", "floor")
  ] = None
  floor_acceptance_rate: Annotated[
    float | None, Doc(_SHARE, "its `acceptance_rate`", "floor")
  ] = None
  draft_acceptance_rate: Annotated[
    float | None, Doc("0..1 or null", "`accepted` / `drafted`")
  ]
  tokens_per_target_call: Annotated[
    float | None, Doc(_TOKENS, "`output_tokens` / `target_calls`")
  ]
  accepted_per_position: Annotated[
    Sequence[int],
    Doc("K counts", "number of rounds that accepted the i-th drafted token"),
  ]
  target_calls: Annotated[
    int,
    Doc(_COUNT, "verifications, and plain steps when an adaptive K drafts nothing"),
  ]
  drafted: Annotated[
    int, Doc(_TOKENS, "drafted tokens that were verified and could be emitted")
  ]
  accepted: Annotated[int, Doc(_TOKENS, "drafted tokens that were accepted")]
  output_tokens: Annotated[
    int, Doc(_TOKENS, "emitted tokens, including end-of-sequence")
  ]
  stop_reason: Annotated[
    str,
    Doc(
      "name",
      "`EOS`, `LENGTH`, `STOP_STRING`, or `NOT_FINITE`: the target's logits were not"
      " finite",
    ),
  ]
  loops: Annotated[bool, Doc("true or false", "`loops` of the answer")]
  draft_version: Annotated[
    int,
    Doc(
      _COUNT,
      "version of the draft that served when the answer ended: the number of updates"
      " that changed it, 0 for the first draft",
    ),
  ]
  decode_ms: Annotated[
    float,
    Doc(
      _MS,
      "its prefill plus its share of the calls: a call's time / requests in flight",
    ),
  ]
  online_ms_per_token: Annotated[
    float | None, Doc("ms or null", "`decode_ms` / `output_tokens`")
  ]
  metering_ms: Annotated[
    float, Doc(_MS, "time of measuring the agreements, while serving waited")
  ] = 0.0
  metering_beside_ms: Annotated[
    float,
    Doc(_MS, "the same, while serving continued (`LearningConfig.free_updates`)"),
  ] = 0.0
  plain_ms_per_token: Annotated[
    float | None,
    Doc(
      _MS,
      "the same request with plain decoding, one request at a time: its time /"
      " `output_tokens`",
      "compared",
    ),
  ] = None
  floor_ms_per_token: Annotated[
    float | None,
    Doc(
      _MS, "the same request with the frozen draft, one request at a time", "compared"
    ),
  ] = None
  floor_draft_acceptance_rate: Annotated[
    float | None, Doc(_SHARE, "its accepted / drafted", "compared")
  ] = None
  floor_tokens_per_target_call: Annotated[
    float | None, Doc(_TOKENS, "its emitted tokens / target calls", "compared")
  ] = None
  update_wait_ms: Annotated[
    float | None,
    Doc(
      _MS,
      "time that serving would have lost to the running update while the comparison"
      " waited for it",
      "compared",
    ),
  ] = None
  compare_ms: Annotated[
    float | None,
    Doc(_MS, "serving the request twice more and checking the output", "compared"),
  ] = None
  certificate: Annotated[
    certificate_lib.Certificate | None,
    Doc(
      "object, see below",
      "the verdict on this output",
      "compared, if outputs must equal plain decoding's (an exact rule, and temperature"
      " 0 or coupling); also with `NOT_FINITE`",
    ),
  ] = None
  rival_overlap: Annotated[
    float | None,
    Doc(
      _SHARE,
      "`distribution_overlap` of the draft that the gate compares with the serving one;"
      " missing if it was not measured",
      "gate",
    ),
  ] = None
  gate_ms: Annotated[
    float | None,
    Doc(
      _MS,
      "measuring the gate's drafts, while serving waited; `metering_beside_ms` holds it"
      " while serving continued",
      "gate",
    ),
  ] = None
  paused: Annotated[
    bool | None,
    Doc("true or false", "whether the schedule has paused updates", "learning"),
  ] = None
  run_seconds: Annotated[
    float, Doc("s", "wall time since the first request, over all sessions of the run")
  ] = 0.0
  saved_seconds: Annotated[
    float | None,
    Doc(
      "s",
      "time saved so far against the frozen draft, over all requests and updates"
      " included; negative if learning has not paid",
      "judged",
    ),
  ] = None
  saved_plain_seconds: Annotated[
    float | None, Doc("s", "the same against plain decoding", "judged")
  ] = None
  ahead_since: Annotated[
    int | None,
    Doc("requests", "request since which both have stayed above 0", "judged"),
  ] = None


@row("update")
class Update(Row):
  """One per update of the draft."""

  finished: Annotated[
    int, Doc("requests", "finished requests when its draft was swapped in")
  ]
  launched: Annotated[int, Doc("requests", "finished requests when it was launched")]
  version: Annotated[
    int,
    Doc(_COUNT, "version of the draft after it; unchanged if all slices were skipped"),
  ]
  loss: Annotated[
    float,
    Doc(_LOSS, "mean over its slices of `LossConfig.divergence`, each before its step"),
  ]
  grad_norm: Annotated[
    float,
    Doc("number", "mean over its slices of the gradient's global norm, unclipped"),
  ]
  steps: Annotated[int, Doc(_COUNT, "slices")]
  skipped: Annotated[
    int,
    Doc(_COUNT, "slices skipped because loss, gradient or step was not finite"),
  ]
  update_ms: Annotated[
    float, Doc(_MS, "time it ran, in parallel to serving; on a mesh, between calls")
  ]
  wait_ms: Annotated[float, Doc(_MS, "time serving waited for it")]


@row("gate")
class Gate(Row):
  """One per decision of [the gate](../how_it_works/learning.md)."""

  finished: Annotated[int, _REQUESTS]
  name: Annotated[
    str,
    Doc(
      "name",
      "`promoted`: trained drafts serve from now on; `confirmed`: a newer draft is the"
      " one to return to; `taken_back`: it serves again; `floor_returned`: the first"
      " draft serves again",
    ),
  ]
  version: Annotated[
    int, Doc(_COUNT, "version of the draft that was shown to be better")
  ]
  answers: Annotated[int, Doc(_COUNT, "answers that show it")]
  gain: Annotated[float, Doc("overlap", "its mean lead on them")]
  text: Annotated[str, _TEXT]


@row("alarm")
class Alarm(Row):
  """One at the start and one at the end of each alarm."""

  finished: Annotated[int, _REQUESTS]
  alarm: Annotated[
    str,
    Doc(
      "name",
      "`acceptance_pinned_at_0`, `acceptance_pinned_at_1`, `update_not_finite`,"
      " `output_loops`",
    ),
  ]
  active: Annotated[bool, Doc("true or false", "true at its start, false at its end")]
  text: Annotated[str, _TEXT]


@row("event")
class Event(Row):
  """Something that happens rarely."""

  finished: Annotated[int, _REQUESTS]
  name: Annotated[
    str,
    Doc(
      "name",
      "`sibling`: the draft was trained for another target of the same sizes; `mesh`:"
      " some arrays of the target could not be split over the devices; `replica`: one"
      " was lost, and its requests moved to others; `unsaved`: a draft was not saved,"
      " because its parameters or scores are not finite",
    ),
  ]
  text: Annotated[str, _TEXT]


@row("summary")
class Summary(Row):
  """Once, at the end."""

  wall_seconds: Annotated[
    float, Doc("s", "from the first request to the end, over all sessions")
  ]


# --- Commands that read examples, train and evaluate ----------------------------------


@row("note")
class Note(Row):
  """A sentence for the report: why a program was refused, what osd advise suggests."""

  text: Annotated[str, _TEXT]


@row("data")
class Data(Row):
  """The examples that a command read; osd pretrain has `train` and `evaluation`."""

  tasks: Annotated[
    Mapping[str, Any], Doc("object, see below", "name of a task -> its counts")
  ]


@row("step")
class Step(Row):
  """One per some optimizer steps of osd offline and osd pretrain."""

  step: Annotated[int, Doc(_COUNT, "optimizer steps so far")]
  loss: Annotated[
    float,
    Doc(
      _LOSS,
      "mean since the previous row, each before its step; offline"
      " `LossConfig.divergence`, pretrain cross entropy per token",
    ),
  ]
  skipped: Annotated[
    int, Doc(_COUNT, "steps skipped so far because they were not finite")
  ]


@row("evaluation")
class Evaluation(Row):
  """One per evaluation of osd offline and osd pretrain on held-out prompts."""

  step: Annotated[int, Doc(_COUNT, "optimizer steps so far")]
  tasks: Annotated[
    Mapping[str, Mapping[str, Any]],
    Doc("object, see below", "label of a task -> its scores"),
  ]


@row("quality")
class Quality(Row):
  """One per task of osd evaluate: the answers of the target."""

  heading = "Target"

  task: Annotated[str, Doc("text", "label")]
  prompts: Annotated[int, Doc(_COUNT, "number of prompts answered by the target")]
  references: Annotated[int, Doc(_COUNT, "references that are neither missing nor cut")]
  exact_match: Annotated[
    float | None, Doc("0..1 or null", "share of these that the answer equals exactly")
  ]
  ended: Annotated[float, Doc(_SHARE, "answers that end in end-of-sequence")]
  looping: Annotated[float, Doc(_SHARE, "answers that loop")]
  distinct: Annotated[float, Doc(_SHARE, "different texts / answers")]
  output_tokens: Annotated[float, Doc(_TOKENS, "mean length")]
  token_accuracy: Annotated[
    float | None,
    Doc(
      "0..1 or null",
      "share of reference tokens that are the target's first choice, mean over prompts",
    ),
  ]


@row("draft")
class Draft(Row):
  """One per task and draft of osd evaluate."""

  heading = "Drafts"

  task: Annotated[str, Doc("text", "label")]
  draft: Annotated[str, Doc("text", "file name without extension")]
  distribution_overlap: Annotated[
    float | None, Doc(_SHARE, "`mean_agreement` on the target's own answers")
  ]
  distribution_overlap_upper: Annotated[float | None, Doc(_SHARE, "likewise")]
  acceptance_rate: Annotated[float | None, Doc(_SHARE, "likewise")]
  draft_acceptance_rate: Annotated[
    float | None,
    Doc("0..1 or null", "accepted / drafted, over all prompts of the task"),
  ]
  tokens_per_target_call: Annotated[
    float | None, Doc(_TOKENS, "emitted / target calls, likewise")
  ]


@row("change")
class Change(Draft):
  """The figures of a later draft minus those of the first; fields as in `draft`."""

  heading = "Against the first draft"


@row("speed")
class Speed(Row):
  """One per draft and number of rows in flight of osd evaluate."""

  heading = "Speed"

  rows: Annotated[int, Doc(_COUNT, "rows in flight")]
  draft: Annotated[str, Doc("text", "its name")]
  plain_ms_per_token: Annotated[
    float,
    Doc(_MS, "wall time / emitted tokens of plain decoding, same requests"),
  ]
  ms_per_token: Annotated[float, Doc(_MS, "with the draft")]
  speed_up: Annotated[float, Doc("ratio", "`plain_ms_per_token` / `ms_per_token`")]
  predicted: Annotated[
    float | None,
    Doc("ratio, null with an adaptive K", "`predicted_speed_up` from the costs below"),
  ]
  predicted_paper: Annotated[float | None, Doc("likewise", "with v = 1")]
  tokens_per_target_call: Annotated[
    float | None, Doc(_TOKENS, "over the timed requests")
  ]
  cost_ratio: Annotated[
    float | None, Doc("ratio", "c = `draft_step_ms` / `plain_step_ms`")
  ]
  verify_ratio: Annotated[
    float | None, Doc("ratio", "v = `verify_ms` / `plain_step_ms`")
  ]
  draft_step_ms: Annotated[
    float | None, Doc(_MS, "one step of the draft, all requests in flight")
  ]
  plain_step_ms: Annotated[float | None, Doc(_MS, "one plain step of the target")]
  verify_ms: Annotated[float | None, Doc(_MS, "the target on K + 1 tokens")]


@row("replayed")
class Replayed(Row):
  """One per answer of the log that osd advise replays."""

  answer: Annotated[int, Doc(_COUNT, "its place in the log, from 0")]
  shares: Annotated[
    Mapping[str, float],
    Doc(
      _SHARE,
      "`cache`, `draft`, `draft that learns` -> share of the answer's tokens that it"
      " drafts rightly",
    ),
  ]


@row("certificate")
class Certified(Row):
  """The certificate of one draft (osd evaluate) or drafter (osd certify)."""

  heading = "Certificate"

  K: Annotated[int | None, Doc(_TOKENS, "drafted tokens", "certify")] = None
  rows: Annotated[int | None, Doc(_COUNT, "rows in flight", "certify")] = None
  draft: Annotated[
    str, Doc("text", "evaluate: file name; certify: the drafter, a key of `DRAFTS`")
  ]
  check: Annotated[str | None, Doc("text", "as in `request`", "evaluate")] = None
  outputs: Annotated[int, Doc(_COUNT, "number of checked outputs")]
  equal: Annotated[int, Doc(_COUNT, "outputs equal to the expected one")]
  tokens: Annotated[int, Doc(_TOKENS, "number of checked tokens")]
  near_ties: Annotated[int, Doc(_COUNT, "differences that pass")]
  failures: Annotated[int, Doc(_COUNT, "outputs with a difference that does not pass")]
  broken: Annotated[
    int,
    Doc(_COUNT, "outputs that ended because the target's logits were not finite"),
  ]
  passed: Annotated[
    bool,
    Doc(
      "true or false",
      "no failure, nothing broken, and at most max(1, 1e-5 * tokens) near ties",
    ),
  ]
  draft_acceptance_rate: Annotated[
    float | None, Doc("0..1 or null", "accepted / drafted", "certify")
  ] = None


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
    values["certificate"] = certificate_lib.from_json(values["certificate"])
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


@functools.cache
def documentation(kind: type[Row]) -> dict[str, Doc]:
  """Returns the name and documentation of each field of a class of rows."""
  hints = typing.get_type_hints(kind, include_extras=True)
  docs = {
    name: getattr(hint, "__metadata__", (None,))[0] for name, hint in hints.items()
  }
  return {name: doc for name, doc in docs.items() if isinstance(doc, Doc)}
