"""The certificate: what speculation wrote is what plain decoding writes, or why not.

float32: token equality. Two sums of the same numbers in another order may round
differently, so a first difference passes if both tokens, rescored in float64 with
their noise and the top-k/top-p cut-off, lie within 1e-5 relative of each other; such
near ties are counted, and more than one in 100,000 tokens fails. bfloat16 has no token
equality to offer: every emitted token is teacher-forced through the target and must be
its choice, or within a stated gap of it.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from osd_jax import base, pairs, runs
from osd_jax.decoding import accept, sampling
from osd_jax.engine import engine

# Promised, not tuned: a difference beyond them is a fault to find.
NEAR_TIE = 1e-5  # relative distance of two scores
NEAR_TIES_PER_TOKEN = 1e-5
SHOWN = 20  # failures written to certificate.json
BFLOAT16_GAP = 2.0**-5  # of the row's largest |logit|: eight steps of bfloat16


@dataclasses.dataclass(frozen=True)
class Difference:
  """The first token of an output that is not the expected one.

  Attributes:
    prompt: place of the prompt.
    position: index in the output.
    expected: token of plain decoding (bfloat16: the target's choice); None if plain
      decoding ended before.
    emitted: token of the speculative output; None if it ended before.
    expected_score: its rescored logit; divided by the temperature and with its noise
      where the request is sampled. None in rows read back where it was not finite.
    emitted_score: likewise; -inf where the cut-off leaves the token out.
    passes: whether it is a near tie.
  """

  prompt: int
  position: int
  expected: int | None
  emitted: int | None
  expected_score: float | None
  emitted_score: float | None
  passes: bool

  def __str__(self) -> str:
    shown = [
      "score not finite" if score is None else f"{score:.7g}"
      for score in (self.expected_score, self.emitted_score)
    ]
    return (
      f"prompt {self.prompt}, position {self.position}: expected token"
      f" {self.expected} ({shown[0]}), emitted {self.emitted} ({shown[1]})"
    )


@dataclasses.dataclass(frozen=True)
class Certificate:
  """A verdict over outputs; `a + b` is that over both.

  Attributes:
    check: "token equality" or "near-tie audit".
    outputs: outputs checked.
    equal: of those, token for token what was expected.
    tokens: tokens checked.
    near_ties: differences that pass.
    failures: those that do not, first of each output.
    broken: outputs that ended because the target's logits were not finite.
  """

  check: str = "token equality"
  outputs: int = 0
  equal: int = 0
  tokens: int = 0
  near_ties: int = 0
  failures: tuple[Difference, ...] = ()
  broken: int = 0

  @property
  def passed(self) -> bool:
    """No failure, and no more near ties than promised (one is always allowed)."""
    if self.failures or self.broken:
      return False
    allowed = max(1.0, NEAR_TIES_PER_TOKEN * self.tokens)
    return self.check == "near-tie audit" or self.near_ties <= allowed

  def __add__(self, other: "Certificate") -> "Certificate":
    return Certificate(
      self.check if self.outputs else other.check,
      self.outputs + other.outputs,
      self.equal + other.equal,
      self.tokens + other.tokens,
      self.near_ties + other.near_ties,
      self.failures + other.failures,
      self.broken + other.broken,
    )

  def row(self) -> dict[str, Any]:
    """For tables and certificate.json: failures counted."""
    return {
      **dataclasses.asdict(self),
      "failures": len(self.failures),
      "passed": self.passed,
    }

  def sentence(self) -> str:
    """The verdict in plain words, "" over nothing."""
    if not self.outputs:
      return ""
    if self.check == "token equality":
      text = (
        f"{self.equal} of {self.outputs} outputs ({self.tokens} tokens) equal plain"
        f" decoding token for token; {self.near_ties} near ties"
      )
    else:
      text = (
        f"{self.equal} of {self.outputs} outputs ({self.tokens} tokens) are the"
        f" target's choice throughout; {self.near_ties} tokens lie within the gap of"
        f" {BFLOAT16_GAP:g} of the largest logit"
      )
    if self.passed:
      return text + "."
    if self.broken:
      return (
        f"{text}. NOT EXACT: the target's logits were not finite in {self.broken} of"
        f" {self.outputs} outputs; check its weights."
      )
    why = "too many near ties"
    if self.failures:
      why = f"first failure: {self.failures[0]}"
    return f"{text}. NOT EXACT, please report this: {why}."


def of_rows(rows: Iterable[Mapping[str, Any]]) -> Certificate:
  """The verdict over all rows of metrics.jsonl that hold a "certificate"."""
  total = Certificate()
  for row in rows:
    if "certificate" in row:
      found = dict(row["certificate"])
      failures = tuple(Difference(**failure) for failure in found.pop("failures"))
      total += Certificate(**found, failures=failures)
  return total


def conclude(verdict: Certificate, directory: runs.RunDirectory) -> bool:
  """Writes certificate.json; notes the run as finished unless an output differs.

  A run with an output that is not the target's stays open: the same command says so
  again.

  Returns:
    Whether the verdict is passed, or over nothing.
  """
  if verdict.passed or not verdict.outputs:
    directory.finish()
  if not verdict.outputs:
    return True
  failures = [dataclasses.asdict(failure) for failure in verdict.failures[:SHOWN]]
  directory.write_json(
    "certificate.json",
    {
      "sentence": verdict.sentence(),
      **verdict.row(),
      "near_tie_tolerance": NEAR_TIE,
      "first_failures": failures,
    },
  )
  return verdict.passed


def applies(sampling: engine.SamplingConfig, decoding: engine.DecodingConfig) -> bool:
  """Whether outputs are to equal plain decoding's; else they agree in law only."""
  rule = accept.rule_of(decoding.acceptance_rule)
  return rule.exact and (sampling.temperature == 0 or rule.coupled)


def promise(decoding: engine.DecodingConfig) -> str:
  """What is to be said where a rule promises nothing; "" of an exact one."""
  if accept.rule_of(decoding.acceptance_rule).exact:
    return ""
  return (
    "NOT EXACT by choice: DecodingConfig.acceptance_rule is a rule that does not"
    " promise the target's outputs."
  )


class Certifier:
  """Judges outputs of a pair's target."""

  def __init__(self, pair: pairs.Pair):
    """Compiles nothing until there is something to rescore."""
    self._pair = pair
    served = jax.eval_shape(pair.target.prepare, pair.target_params)
    rounded = any(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(served))
    self.check = "near-tie audit" if rounded else "token equality"

  def judge(
    self, answered: Iterable[tuple[engine.Finished, engine.Finished]], first: int = 0
  ) -> Certificate:
    """The certificate of outputs.

    Args:
      answered: (plain, speculative) answers to the same requests, greedy or under the
        coupling rule; sampled answers of the rejection rule agree in law only.
      first: place of the first prompt, for the failures' sake.
    """
    total = Certificate(self.check)
    judge = self._by_equality if self.check == "token equality" else self._by_audit
    for place, (plain, fast) in enumerate(answered):
      reasons = (plain.stop_reason, fast.stop_reason)
      is_broken = base.StopReason.NOT_FINITE in reasons
      total += self.broken() if is_broken else judge(first + place, plain, fast)
    return total

  def broken(self) -> Certificate:
    """The certificate of an output that a broken target ended."""
    return Certificate(self.check, outputs=1, broken=1)

  def _by_equality(
    self, place: int, plain: engine.Finished, fast: engine.Finished
  ) -> Certificate:
    found = Certificate(self.check, outputs=1, tokens=len(fast.tokens))
    at = first_difference(plain.tokens, fast.tokens)
    if at is None:
      return dataclasses.replace(found, equal=1)
    expected, emitted = (
      int(done.tokens[at]) if at < len(done.tokens) else None for done in (plain, fast)
    )
    longer = plain if expected is not None else fast
    scores = self._rescored(longer, at)
    a, b = (-np.inf if t is None else float(scores[t]) for t in (expected, emitted))
    difference = Difference(place, at, expected, emitted, a, b, near(a, b))
    if difference.passes:
      return dataclasses.replace(found, near_ties=1)
    return dataclasses.replace(found, failures=(difference,))

  def _rescored(self, done: engine.Finished, at: int) -> np.ndarray:
    """Scores [V] of the tokens that may stand at a position, in float64."""
    with jax.enable_x64(True):
      params = jax.tree.map(
        lambda leaf: np.asarray(leaf, np.float64), self._pair.target_params
      )
      source = np.asarray(done.batch.source)
      mask = self._pair.target.mask(source)
      target = np.asarray(done.batch.target)
      logits = _score(self._pair.rescoring_target, params, source, mask, target)
      row = np.asarray(logits)[0, at]
    return scores(row, done.settings, at)

  def _by_audit(
    self, place: int, plain: engine.Finished, fast: engine.Finished
  ) -> Certificate:
    del plain
    batch = fast.batch
    source = np.asarray(batch.source)
    logits = np.asarray(
      _score(
        self._pair.target,
        self._pair.target_params,
        source,
        self._pair.target.mask(source),
        np.asarray(batch.target),
      )
    )[0]
    near_ties, failures = 0, []
    for at, token in enumerate(fast.tokens):
      row = scores(logits[at].astype(np.float64), fast.settings, at, BFLOAT16_GAP)
      choice = int(np.argmax(row))
      if token == choice:
        continue
      allowed = BFLOAT16_GAP * np.max(np.abs(logits[at])) / _divisor(fast.settings)
      expected, emitted = float(row[choice]), float(row[token])
      if expected - emitted <= allowed:
        near_ties += 1
      else:
        failures.append(
          Difference(place, at, choice, int(token), expected, emitted, False)
        )
    return Certificate(
      self.check,
      outputs=1,
      equal=int(not near_ties and not failures),
      tokens=len(fast.tokens),
      near_ties=near_ties,
      failures=tuple(failures[:1]),
    )


def first_difference(expected: np.ndarray, emitted: np.ndarray) -> int | None:
  """Where two outputs first differ, in length too; None if they are equal."""
  shared = min(len(expected), len(emitted))
  differs = np.flatnonzero(expected[:shared] != emitted[:shared])
  if len(differs):
    return int(differs[0])
  return None if len(expected) == len(emitted) else shared


def near(a: float, b: float) -> bool:
  """Whether two scores are finite and within `NEAR_TIE` relative of each other."""
  if not np.isfinite([a, b]).all():
    return False
  return bool(abs(a - b) <= NEAR_TIE * max(abs(a), abs(b)))


def scores(
  logits: np.ndarray,
  settings: base.SamplingSettings,
  position: int,
  tolerance: float = NEAR_TIE,
) -> np.ndarray:
  """What the draw at a position takes the arg max of, in float64.

  Args:
    logits: [V] float64, raw.
    settings: [1] settings of the request.
    position: index in the output.
    tolerance: relative; a token this close below the cut-off counts as inside.

  Returns:
    [V] float64: logits of a greedy request; else logits / temperature plus the noise of
    (seed, position), -inf outside top-k and top-p.
  """
  temperature = float(settings.temperature[0])
  if temperature == 0:
    return logits
  scaled = logits / temperature
  kept = _inside(scaled, int(settings.top_k[0]), float(settings.top_p[0]), tolerance)
  key = sampling.row_keys(
    jnp.asarray(settings.seed),
    jnp.full((1, 1), position, jnp.int32),
    sampling.Purpose.EMIT,
  )[0, 0]
  noise = np.asarray(jax.random.gumbel(key, logits.shape, jnp.float32), np.float64)
  return np.where(kept, scaled + noise, -np.inf)


def _inside(
  scaled: np.ndarray, top_k: int, top_p: float, tolerance: float
) -> np.ndarray:
  """Which tokens the cut-off keeps, those just below it too."""
  order = np.argsort(-scaled, kind="stable")
  count = top_k if 0 < top_k < len(scaled) else len(scaled)
  probs = np.exp(scaled[order][:count] - scaled[order[0]])
  probs /= probs.sum()
  before = np.cumsum(probs) - probs
  if top_p < 1:
    count = int(np.sum(before < top_p + tolerance))
  threshold = scaled[order[count - 1]]
  return scaled >= threshold - tolerance * abs(threshold)


def _divisor(settings: base.SamplingSettings) -> float:
  return float(settings.temperature[0]) or 1.0


_score = jax.jit(
  lambda model, params, source, mask, target: model.score(params, source, mask, target),
  static_argnums=0,
)
