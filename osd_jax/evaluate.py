"""Measures a target and its drafts on held-out prompts; nothing learns."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import rich.console

from osd_jax import base, metrics, pairs, runs, sharding
from osd_jax import corpus as texts
from osd_jax.data import batches as batches_lib
from osd_jax.data import prompts as prompts_lib
from osd_jax.data.vocabulary import Vocabulary
from osd_jax.engine import agreement, engine
from osd_jax.engine.server import Server
from osd_jax.measuring import certificate, timing
from osd_jax.report import progress, summaries

CHECKED = 16  # prompts decoded greedily for the check where requests are sampled


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
  """One evaluation.

  Attributes:
    prompts: held-out prompts, with references where there are any.
    count: how many of them.
    pair: target, draft and vocabulary.
    drafts: weights files of further drafts, compared with that of the pair; with the
      drafts from before and after a run, the difference is what it gained or forgot.
    decoding: shapes of decoding, K among them; its rows answer the prompts.
    sampling: the i-th prompt draws with seed + i.
    speed_requests: prompts that are timed: plain and with each draft by turns, one
      row at a time and `batch_rows` at a time. 0 times nothing.
    batch_rows: rows of the second timing.
    run_directory: where everything goes.
    overwrite: remove the run that the directory holds, and begin anew.
    partition: mesh.
  """

  prompts: batches_lib.BatchConfig
  count: int = 256
  pair: pairs.PairConfig = pairs.PairConfig()
  drafts: tuple[str, ...] = ()
  decoding: engine.DecodingConfig = engine.DecodingConfig(rows=8)
  sampling: engine.SamplingConfig = engine.SamplingConfig()
  speed_requests: int = 32
  batch_rows: int = 4
  run_directory: str = "runs/evaluate"
  overwrite: bool = False
  partition: sharding.PartitionConfig = sharding.PartitionConfig()

  def __post_init__(self):
    base.check_fields(self, {"run_directory": (self.run_directory.strip(), "a folder")})
    base.check_counts(self, "count", "batch_rows")
    base.check_counts(self, "speed_requests", least=0)
    base.check_fields(
      self,
      {
        "decoding": (
          self.decoding.record_top_k >= 1,
          "record_top_k >= 1: overlap is measured against the records",
        ),
      },
    )
    self.decoding.check_sources(self.prompts, "EvaluateConfig.prompts")


def run(config: EvaluateConfig, operative_config: str = "") -> runs.RunResult:
  """Measures everything, from the beginning if it was interrupted.

  Args:
    config: the run.
    operative_config: text stored beside the results.

  Returns:
    The run directory, and whether every output checked is the target's.
  """
  console = rich.console.Console(stderr=True)
  with runs.RunDirectory.start(
    config.run_directory,
    config,
    operative_config=operative_config,
    seed=config.sampling.seed,
    overwrite=config.overwrite,
  ) as directory:
    if directory.finished:
      return summaries.leave_alone(directory, console)
    verdict = _measure(config, directory, console)
    return summaries.result(verdict, directory, console)


def _measure(
  config: EvaluateConfig, directory: runs.RunDirectory, console: rich.console.Console
) -> certificate.Certificate:
  """Logs every table of the evaluation; returns the verdict over all drafts."""
  bench = Bench(config)
  with runs.MetricsLog(directory.metrics_path) as log:
    log.truncate(0)
    summaries.note_data(bench.prompts, log, console)
    with progress.status(console, "the target answers"):
      answers = bench.answers()
    log.write_rows("quality", bench.quality(answers))
    with progress.status(console, "the drafts answer"):
      by_draft, checks = bench.drafts(answers)
    log.write_rows("draft", by_draft)
    log.write_rows("change", differences(by_draft))
    certified = [
      {"draft": label, **check.row()}
      for label, check in zip(bench.labels, checks, strict=True)
    ]
    log.write_rows("certificate", certified)
    if config.speed_requests:
      with progress.status(console, "timing"):
        log.write_rows("speed", bench.speeds())
  return sum(checks, certificate.Certificate())


class Bench:
  """A target, its drafts and the prompts."""

  def __init__(self, config: EvaluateConfig):
    """Loads all of them.

    Raises:
      ValueError: a draft does not belong to the target.
    """
    self.config = config
    paths = (config.pair.draft, *config.drafts)
    self.labels = draft_labels(paths)
    self.pairs: list[pairs.Pair] = []
    for path in paths:
      named = dataclasses.replace(config.pair, draft=path)
      pair = pairs.load_pair(named, sharding.make(config.partition))
      first = self.pairs[0] if self.pairs else pair  # one copy of the target
      self.pairs.append(dataclasses.replace(pair, target_params=first.target_params))
    self.vocabulary = self.pairs[0].vocabulary
    self.prompts = prompts_lib.prompts(config.prompts, self.vocabulary, config.count)
    self.requests = texts.requests(self.prompts, config.sampling)

  def answers(self) -> list[engine.Finished]:
    """The target's own answers, with records."""
    return self._plain(self.config.decoding).run(self.requests)

  def quality(self, answers: Sequence[engine.Finished]) -> list[dict[str, Any]]:
    """What the target's answers are worth, a row a task."""
    right = self._token_accuracies()
    rows = []
    for task_id, places in self._tasks():
      part = [(self.prompts[place], answers[place]) for place in places]
      shares = [share for place in places if (share := right[place]) is not None]
      rows.append(
        {
          "task": self._label(task_id),
          "prompts": len(places),
          **quality(part, self.vocabulary),
          "token_accuracy": float(np.mean(shares)) if shares else None,
        }
      )
    return rows

  def drafts(
    self, answers: Sequence[engine.Finished]
  ) -> tuple[list[dict[str, Any]], list[certificate.Certificate]]:
    """Agreement of every draft a task, and the certificate of its outputs."""
    rows, checks = [], []
    for label, pair in zip(self.labels, self.pairs, strict=True):
      server = self._speculative(self.config.decoding, pair)
      served = server.run(self.requests)
      agreed = agreement.mean_agreement(pair.draft, pair.draft_params, answers)
      for task_id, places in self._tasks():
        means = dict(agreed[task_id])
        means.pop("requests")
        counted = acceptance([served[place] for place in places])
        rows.append({"task": self._label(task_id), "draft": label, **means, **counted})
      checks.append(self._check(answers, served, server))
    return rows, checks

  def speeds(self) -> list[dict[str, Any]]:
    """Wall time plain and with every draft, one row at a time and several."""
    rows = []
    for count in dict.fromkeys((1, self.config.batch_rows)):
      config = dataclasses.replace(self.config.decoding, rows=count)
      unrecorded = dataclasses.replace(config, record_top_k=0)
      servers = [self._plain(unrecorded)]
      servers += [self._speculative(config, pair) for pair in self.pairs]
      timed_requests = self.requests[: self.config.speed_requests]
      # A block is long enough to keep the rows filled for most of its time.
      timed = timing.timings(servers, timed_requests, 4 * count if count > 1 else 1)
      plain_ms = timed[0].ms_per_token
      for label, pair, found in zip(self.labels, self.pairs, timed[1:], strict=True):
        rows.append(
          {
            "rows": count,
            "draft": label,
            "plain_ms_per_token": plain_ms,
            "ms_per_token": found.ms_per_token,
            "speed_up": plain_ms / found.ms_per_token,
            **self._predicted(config, pair, found.tokens_per_target_call),
          }
        )
    return rows

  def _predicted(
    self, config: engine.DecodingConfig, pair: pairs.Pair, tau: float
  ) -> dict[str, float | None]:
    shape = (config.rows, config.source_lengths[-1])
    source = np.full(shape, pair.target.pad_id, np.int32)
    for row in range(config.rows):
      tokens = self.prompts[row % len(self.prompts)].tokens
      source[row, : len(tokens)] = tokens
    found = timing.measure(
      config,
      pair.target,
      pair.target_params,
      pair.draft,
      pair.draft_params,
      source,
    )
    c, v, drafted = found.cost_ratio, found.verify_ratio, config.num_draft_tokens
    predicted = metrics.predicted_speed_up
    fixed = config.adaptive is None  # both formulas are of one K
    return {
      "predicted": predicted(tau, drafted, c, v) if fixed else None,
      "predicted_paper": predicted(tau, drafted, c) if fixed else None,
      "tokens_per_target_call": tau,
      "cost_ratio": c,
      "verify_ratio": v,
      **dataclasses.asdict(found),
    }

  def _check(
    self,
    answers: Sequence[engine.Finished],
    served: Sequence[engine.Finished],
    server: Server,
  ) -> certificate.Certificate:
    """The certificate of a draft's outputs, or of some greedy ones beside them."""
    if not certificate.applies(self.config.sampling, self.config.decoding):
      greedy = texts.requests(self.prompts[:CHECKED], engine.SamplingConfig())
      answers = self._plain(self.config.decoding).run(greedy)
      served = server.run(greedy)
    certifier = certificate.Certifier(self.pairs[0])
    return certifier.judge(zip(answers, served, strict=True))

  def _token_accuracies(self) -> list[float | None]:
    """Share of reference tokens that are the target's first choice, a prompt."""
    config = dataclasses.replace(self.config.decoding, record_top_k=1)
    shares: list[float | None] = []
    for batch in texts.reference_rows(self.pairs[0], self.prompts, config):
      mask = np.asarray(batch.mask)
      right = (np.asarray(batch.records.ids[..., 0]) == np.asarray(batch.target)) & mask
      shares += [
        float(hits.sum() / kept.sum()) if kept.any() else None
        for hits, kept in zip(right, mask, strict=True)
      ]
    return shares[: len(self.prompts)]

  def _tasks(self) -> list[tuple[int, list[int]]]:
    """Places of the prompts of every task."""
    places: dict[int, list[int]] = {}
    for place, prompt in enumerate(self.prompts):
      places.setdefault(prompt.task_id, []).append(place)
    return sorted(places.items())

  def _label(self, task_id: int) -> str:
    return self.config.prompts.tasks[task_id].label

  def _plain(self, decoding: engine.DecodingConfig) -> Server:
    return texts.plain_server(self.pairs[0], decoding, self.config.partition)

  def _speculative(self, decoding: engine.DecodingConfig, pair: pairs.Pair) -> Server:
    return Server(pair, decoding, partition=self.config.partition)


def acceptance(served: Sequence[engine.Finished]) -> dict[str, float | None]:
  """The counters of requests added up, as rates."""
  accepted, drafted, tokens, calls = (
    sum(counts)
    for counts in zip(
      *((d.accepted, d.drafted, len(d.tokens), d.target_calls) for d in served),
      strict=True,
    )
  )
  return {
    "draft_acceptance_rate": metrics.draft_acceptance_rate(accepted, drafted),
    "tokens_per_target_call": metrics.tokens_per_target_call(tokens, calls),
  }


def quality(
  part: Sequence[tuple[prompts_lib.Prompt, engine.Finished]], vocabulary: Vocabulary
) -> dict[str, Any]:
  """What answers are worth beside the references.

  Args:
    part: prompts with their answers.
    vocabulary: reads the ids; exact match compares texts.

  Returns:
    `references` that are whole (none is missing or cut) and the share of them that
    was answered to the letter; shares of answers that end in end-of-sequence, that
    loop, and of different texts among all answers; mean length in tokens.
  """
  texts = [vocabulary.decode(done.tokens).strip() for _, done in part]
  exact = [
    text == vocabulary.decode(prompt.reference).strip()
    for text, (prompt, _) in zip(texts, part, strict=True)
    if len(prompt.reference) > 1 and prompt.reference[-1] in vocabulary.eos_ids
  ]
  ended = [done.stop_reason == base.StopReason.EOS for _, done in part]
  return {
    "references": len(exact),
    "exact_match": float(np.mean(exact)) if exact else None,
    "ended": float(np.mean(ended)),
    "looping": float(np.mean([metrics.loops(done.tokens) for _, done in part])),
    "distinct": len(set(texts)) / len(texts),
    "output_tokens": float(np.mean([len(done.tokens) for _, done in part])),
  }


def differences(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """Every further draft less the first one, a task; negative is forgotten."""
  first: dict[str, Mapping[str, Any]] = {}
  changes = []
  for row in rows:
    before = first.setdefault(row["task"], row)
    if row is not before:
      changes.append(
        {
          "task": row["task"],
          "draft": row["draft"],
          **{
            name: None if None in (value, before[name]) else value - before[name]
            for name, value in row.items()
            if name not in ("task", "draft")
          },
        }
      )
  return changes


def draft_labels(paths: Sequence[str]) -> list[str]:
  """File names without their ending, or whole paths where two are alike."""
  stems = [Path(path.partition(":")[2] or path).stem for path in paths]
  return [
    stem if stems.count(stem) == 1 else path
    for stem, path in zip(stems, paths, strict=True)
  ]
