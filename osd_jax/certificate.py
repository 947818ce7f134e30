"""The certificate: checks that speculative outputs are what plain decoding writes.

In float32 the outputs must be equal token for token. Two sums of the same numbers in a
different order may round differently, so the first difference of an output passes if it
is a near tie: both tokens are scored again in float64, with the noise and the top-k and
top-p cut-off of the request, and their scores differ by at most 1e-5 relative. Near
ties are counted; more than one in 100,000 tokens fails.

In bfloat16 token equality cannot be promised. Instead, the target scores every emitted
token by teacher forcing, and each token must be the target's choice or lie within a
stated gap of it.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from osd_jax import base, runs
from osd_jax.decoding import accept, sampling

# Only for annotations: whoever reads a verdict from a log needs no models.
if TYPE_CHECKING:
  from osd_jax import pairs
  from osd_jax.engine.requests import DecodingConfig, Finished, SamplingConfig

# These limits are part of the promise. A difference beyond them is a bug to find; do
# not raise a limit to make a certificate pass.
NEAR_TIE = 1e-5  # relative distance of two scores
NEAR_TIES_PER_TOKEN = 1e-5
BFLOAT16_GAP = 2.0**-5  # share of the row's largest |logit|: eight bfloat16 steps
_SHOWN = 20  # failures written to certificate.json


@dataclasses.dataclass(frozen=True)
class Difference:
  """The first token of an output that differs from the expected token."""

  prompt: int  # index of the prompt
  position: int  # index in the output
  # Token of plain decoding (bfloat16: the target's choice); None if plain decoding had
  # ended.
  expected: int | None
  emitted: int | None  # token of the speculative output; None if it had ended
  # Float64 logit of the expected token. For a sampled request it is divided by the
  # temperature and includes the noise. None if the score was not finite and was read
  # back from a log.
  expected_score: float | None
  # The same for the emitted token; -inf outside top-k or top-p.
  emitted_score: float | None
  passes: bool  # whether the difference is a near tie

  def __str__(self) -> str:
    parts = [
      "score not finite" if score is None else f"{score:.7g}"
      for score in (self.expected_score, self.emitted_score)
    ]
    return (
      f"prompt {self.prompt}, position {self.position}: expected token"
      f" {self.expected} ({parts[0]}), emitted {self.emitted} ({parts[1]})"
    )


@dataclasses.dataclass(frozen=True)
class Certificate:
  """The verdict over some outputs; `a + b` is the verdict over both sets."""

  check: str = "token equality"  # "token equality" or "near-tie audit"
  outputs: int = 0  # number of outputs checked
  equal: int = 0  # outputs that are token for token as expected
  tokens: int = 0  # number of tokens checked
  near_ties: int = 0  # differences that pass
  # Differences that do not pass, at most one per output.
  failures: tuple[Difference, ...] = ()
  broken: int = 0  # outputs that ended because the target's logits were not finite

  @property
  def passed(self) -> bool:
    """Whether no output failed and near ties are as rare as promised."""
    if self.failures or self.broken:
      return False
    allowed = max(1.0, NEAR_TIES_PER_TOKEN * self.tokens)  # few tokens may have one
    return self.check == "near-tie audit" or self.near_ties <= allowed

  def __add__(self, other: "Certificate") -> "Certificate":
    sums = {name: value + vars(other)[name] for name, value in vars(self).items()}
    return Certificate(**{**sums, "check": (self if self.outputs else other).check})

  def row(self) -> dict[str, Any]:
    """Fields for a table; `failures` is a count."""
    return {
      **dataclasses.asdict(self),
      "failures": len(self.failures),
      "passed": self.passed,
    }

  def sentence(self) -> str:
    """The verdict in one sentence, or "" if no output was checked."""
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
  """Adds up the certificates in the rows of metrics.jsonl."""
  total = Certificate()
  for row in rows:
    if "certificate" in row:
      total += base.from_json(row["certificate"], Certificate)
  return total


def finish(verdict: Certificate, directory: runs.RunDirectory) -> bool:
  """Writes certificate.json, and marks the run as finished unless the verdict failed.

  A failed run stays unfinished, so that repeating its command reports the failure again
  instead of saying that there is nothing to do. Returns whether the verdict passed or
  nothing was checked.
  """
  if verdict.passed or not verdict.outputs:
    directory.finish()
  if not verdict.outputs:
    return True
  failures = [dataclasses.asdict(failure) for failure in verdict.failures[:_SHOWN]]
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


def applies(sampling: "SamplingConfig", decoding: "DecodingConfig") -> bool:
  """Whether outputs must equal plain decoding's, instead of only having its law."""
  rule = accept.resolve(decoding.acceptance_rule)
  return rule.exact and (sampling.temperature == 0 or rule.coupled)


def promise(decoding: "DecodingConfig") -> str:
  """A warning if the acceptance rule is not exact, else ""."""
  if accept.resolve(decoding.acceptance_rule).exact:
    return ""
  return (
    "NOT EXACT by choice: DecodingConfig.acceptance_rule is a rule that does not"
    " promise the target's outputs."
  )


class Certifier:
  """Judges outputs of a pair's target.

  Attributes:
    check: "token equality", or "near-tie audit" if the target computes in bfloat16.
  """

  def __init__(self, pair: "pairs.Pair"):
    """Compiles nothing; the target is compiled for the first output to score."""
    self._pair = pair
    # The dtype that the target computes in, which may differ from that of its weights.
    rounded = pair.target.dtype == "bfloat16"
    if not pair.target.dtype:
      served = jax.eval_shape(pair.target.prepare, pair.target_params)
      rounded = any(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(served))
    self.check = "near-tie audit" if rounded else "token equality"

  def judge(
    self, answered: Iterable[tuple["Finished", "Finished"]], first: int = 0
  ) -> Certificate:
    """Returns the certificate of (plain, speculative) answers to the same requests.

    They are greedy or use the coupling rule; under the other rules sampled answers
    agree in law only and cannot be compared. `first` is the index of the first prompt,
    used in failures.
    """
    total = Certificate(self.check)
    judge = self._by_equality if self.check == "token equality" else self._by_audit
    for place, (plain, fast) in enumerate(answered):
      reasons = (plain.stop_reason, fast.stop_reason)
      # Two outputs of a broken target may be equal, and still say nothing.
      is_broken = base.StopReason.NOT_FINITE in reasons
      total += self.broken() if is_broken else judge(first + place, plain, fast)
    return total

  def broken(self) -> Certificate:
    """The certificate of an output that ended at logits that are not finite."""
    return Certificate(self.check, outputs=1, broken=1)

  def _by_equality(
    self, place: int, plain: "Finished", fast: "Finished"
  ) -> Certificate:
    verdict = Certificate(self.check, outputs=1, tokens=len(fast.tokens))
    at = first_difference(plain.tokens, fast.tokens)
    if at is None:
      return dataclasses.replace(verdict, equal=1)
    expected, emitted = (
      int(done.tokens[at]) if at < len(done.tokens) else None for done in (plain, fast)
    )
    # Both outputs are equal before `at`, so either gives the scores at that position.
    scores = self._scores_in_float64(plain if expected is not None else fast, at)
    a, b = (-np.inf if t is None else float(scores[t]) for t in (expected, emitted))
    difference = Difference(place, at, expected, emitted, a, b, near(a, b))
    if difference.passes:
      return dataclasses.replace(verdict, near_ties=1)
    return dataclasses.replace(verdict, failures=(difference,))

  def _scores_in_float64(self, done: "Finished", at: int) -> np.ndarray:
    with jax.enable_x64(True):
      # Exact: every float32 and bfloat16 value is a float64 value, so only the sums are
      # computed more precisely.
      params = jax.tree.map(
        lambda leaf: np.asarray(leaf, np.float64), self._pair.target_params
      )
      logits = self._logits(self._pair.rescoring_target, params, done)
    return scores(logits[at], done.settings, at)

  def _logits(
    self, target: base.Model, params: base.Params, done: "Finished"
  ) -> np.ndarray:
    """Teacher-forced logits [T, V] of an answer."""
    source = np.asarray(done.batch.source)
    mask = self._pair.target.mask(source)
    logits = _score(target, params, source, mask, np.asarray(done.batch.target))
    text = [int(self._pair.target.starts(jnp.asarray(source))[0])]
    prompt = self._pair.target.prompt_text(jnp.asarray(source))
    if prompt is not None:
      text += [int(token) for token in np.asarray(prompt)[0] if token >= 0]
    return penalized(np.asarray(logits)[0], done.settings, text, done.tokens)

  def _by_audit(self, place: int, plain: "Finished", fast: "Finished") -> Certificate:
    del plain  # the target itself is the reference
    logits = self._logits(self._pair.target, self._pair.target_params, fast)
    near_ties, failures = 0, []
    for at, token in enumerate(fast.tokens):
      row = scores(logits[at].astype(np.float64), fast.settings, at, BFLOAT16_GAP)
      choice = int(np.argmax(row))
      if token == choice:
        continue
      divisor = float(fast.settings.temperature[0]) or 1.0  # scores are divided by it
      allowed = BFLOAT16_GAP * np.max(np.abs(logits[at])) / divisor
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
      failures=tuple(failures[:1]),  # later ones follow from the first
    )


def first_difference(expected: np.ndarray, emitted: np.ndarray) -> int | None:
  """First position where two outputs differ, also in length; None if they are equal."""
  shared = min(len(expected), len(emitted))
  differs = np.flatnonzero(expected[:shared] != emitted[:shared])
  if len(differs):
    return int(differs[0])
  return None if len(expected) == len(emitted) else shared


def near(a: float, b: float) -> bool:
  """Whether two scores are finite and within `NEAR_TIE` relative of each other."""
  # A token that the request cannot emit is never a tie.
  if not np.isfinite([a, b]).all():
    return False
  return bool(abs(a - b) <= NEAR_TIE * max(abs(a), abs(b)))


def penalized(
  logits: np.ndarray,
  settings: base.SamplingSettings,
  text: Sequence[int],
  emitted: np.ndarray,
) -> np.ndarray:
  """Logits [T, V] of an answer after its repetition penalty; see `sampling.penalized`.

  `text` are the tokens before the answer that count.
  """
  penalty = float(settings.repetition_penalty[0])
  if penalty == 1:
    return logits
  logits, tokens = logits.copy(), set(text)
  for row, token in zip(logits, emitted):
    places = sorted(tokens)
    logits_of_text = row[places]
    row[places] = np.where(
      logits_of_text > 0, logits_of_text / penalty, logits_of_text * penalty
    )
    tokens.add(int(token))
  return logits


def scores(
  logits: np.ndarray,
  settings: base.SamplingSettings,
  position: int,
  tolerance: float = NEAR_TIE,
) -> np.ndarray:
  """The values whose arg max decoding emits at a position of the output, in float64.

  `logits` [V] float64 are the target's row. A token that is as close as `tolerance`
  (relative) below the cut-off counts as inside.

  Returns:
    [V] float64. For a greedy request the logits; otherwise logits / temperature plus
    the Gumbel noise of (seed, position), and -inf for tokens that a filter excludes.
  """
  temperature = float(settings.temperature[0])
  if temperature == 0:
    return logits
  scaled = logits / temperature
  is_inside = _inside(scaled, settings, tolerance)
  key = sampling.row_keys(
    jnp.asarray(settings.seed),
    jnp.full((1, 1), position, jnp.int32),
    sampling.Purpose.EMIT,
  )[0, 0]
  # Decoding draws float32 noise; float64 noise would be a different draw.
  noise = np.asarray(jax.random.gumbel(key, logits.shape, jnp.float32), np.float64)
  return np.where(is_inside, scaled + noise, -np.inf)


def _inside(
  scaled: np.ndarray, settings: base.SamplingSettings, tolerance: float
) -> np.ndarray:
  """[V] bool; tokens that the filters keep, and those just below the cut-off."""
  top_k, top_p, min_p = (
    float(values[0]) for values in (settings.top_k, settings.top_p, settings.min_p)
  )
  # top-k first, then top-p on the renormalised rest, in the order that decoding uses.
  order = np.argsort(-scaled, kind="stable")
  count = int(top_k) if 0 < top_k < len(scaled) else len(scaled)
  probs = np.exp(scaled[order][:count] - scaled[order[0]])
  probs /= probs.sum()
  before = np.cumsum(probs) - probs
  if top_p < 1:
    count = int(np.sum(before < top_p + tolerance))
  count = min(count, int(np.sum(probs >= probs[0] * (min_p - tolerance))))
  threshold = scaled[order[count - 1]]
  return scaled >= threshold - tolerance * abs(threshold)


_score = jax.jit(
  lambda model, params, source, mask, target: model.score(params, source, mask, target),
  static_argnums=0,
)
