"""`osd evaluate` measures drafts on held-out prompts; `osd certify` checks exactness.

Both decode a fixed set of prompts plainly and speculatively, and neither trains.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import rich.console

from osd_jax import base, certificate, corpus, metrics, pairs, runs, session, sharding
from osd_jax.costs.table import predicted_speed_up
from osd_jax.data.batches import BatchConfig, EncodedExample, read_corpus
from osd_jax.data.vocabulary import Vocabulary
from osd_jax.engine import agreement, generation_config, measurement
from osd_jax.engine.requests import (
  DecodingConfig,
  Finished,
  OwnSampling,
  Request,
  SamplingConfig,
)
from osd_jax.engine.server import Server
from osd_jax.loop import rows as rows_lib
from osd_jax.report import page, progress

_CHECKED = 16  # prompts decoded greedily for the certificate when requests are sampled
_SWAP_ROUNDS = 3  # rounds between two swaps of the draft in `certify`
_NOISE = 0.1  # of a perturbed copy, in standard deviations of each array


@dataclasses.dataclass(frozen=True)
class EvaluateConfig(session.RunConfig):
  """One evaluation of one or several drafts; `session.RunConfig` has further settings.

  Attributes:
    prompts: held-out prompts; references are used where a task has them.
    count: number of prompts.
    pair: target, draft and vocabulary.
    drafts: weights files of further drafts, or "attached" or "cache", each compared
      with the draft of `pair`.
      With the drafts from before and after a run, the differences show what the run
      gained or forgot.
    decoding: shapes of decoding and K; `decoding.rows` prompts are in flight.
    speed_requests: prompts to time, with plain decoding and each draft in turn, once
      with one row and once with `decoding.rows` rows. 0 skips the timing.
    run_directory: folder for the results.
  """

  prompts: BatchConfig
  count: base.Count = 256
  pair: pairs.PairConfig = pairs.PairConfig()
  drafts: tuple[str, ...] = ()
  decoding: DecodingConfig = DecodingConfig(rows=8)
  speed_requests: base.CountOrZero = 32
  run_directory: base.Folder = "runs/evaluate"

  def checks(self):
    self.decoding.check_sources(self.prompts, "EvaluateConfig.prompts")
    return {
      "decoding": (
        self.decoding.record_top_k >= 1,
        "record_top_k >= 1: overlap is measured against the records",
      )
    }


@dataclasses.dataclass(frozen=True)
class CertifyConfig(session.RunConfig):
  """One certificate: every K, over several numbers of rows and kinds of draft.

  Sampling needs DecodingConfig.acceptance_rule = "coupling". `session.RunConfig` has
  further settings.

  The draft is swapped with a perturbed copy every few rounds, so that it changes in
  the middle of requests.

  Attributes:
    prompts: prompts to decode; references are not used.
    count: number of prompts for each K.
    pair: target, draft and vocabulary, or a loaded pair.
    decoding: shapes of decoding. `decoding.rows` applies to plain decoding; the
      speculative runs take K and rows from the fields below.
    num_draft_tokens: every K to certify.
    rows: numbers of rows in flight; the prompts are split evenly among them.
    drafts: keys of `DRAFTS`; each combination of K and rows takes the next one.
    run_directory: folder for certificate.json.
  """

  prompts: BatchConfig
  count: base.Count = 64
  pair: pairs.PairConfig | pairs.Pair = pairs.PairConfig()
  decoding: DecodingConfig = DecodingConfig(rows=8)
  num_draft_tokens: Annotated[tuple[int, ...], base.NonEmpty("at least one K")] = (3, 7)
  rows: Annotated[tuple[base.Count, ...], base.NonEmpty("integers >= 1")] = (1, 5)
  drafts: Annotated[tuple[str, ...], base.NonEmpty("at least one name")] = (
    "pair",
    "perturbed",
  )
  run_directory: base.Folder = "runs/certify"

  def checks(self):
    return {
      "count": (
        self.count >= len(self.rows),
        f"at least {len(self.rows)}, one for each entry of rows",
      ),
      "drafts": (set(self.drafts) <= set(DRAFTS), f"names out of {sorted(DRAFTS)}"),
      "sampling": (
        isinstance(self.sampling, OwnSampling)  # checked when it is resolved
        or certificate.applies(self.sampling, self.decoding),
        "temperature 0, or DecodingConfig.acceptance_rule = 'coupling': under the"
        " other rules sampled outputs differ from plain decoding's",
      ),
    }


def run(config: EvaluateConfig, operative_config: str = "") -> runs.RunResult:
  """Measures every draft; an interrupted evaluation starts over.

  `operative_config` is gin text that is stored in the run directory.
  """
  sampling = generation_config.resolved(config.sampling, config.pair)
  config = dataclasses.replace(config, sampling=sampling)
  body = functools.partial(_evaluate, config)
  return session.run(config, operative_config, config.sampling.seed, body)


def certify(config: CertifyConfig, operative_config: str = "") -> runs.RunResult:
  """Checks that speculative outputs equal plain decoding's; see `RunResult.exact`.

  `operative_config` is gin text that is stored in the run directory.
  """
  sampling = generation_config.resolved(config.sampling, config.pair)
  config = dataclasses.replace(config, sampling=sampling)
  body = functools.partial(_certify, config, sampling)
  return session.run(config, operative_config, config.sampling.seed, body)


# --- osd evaluate -------------------------------------------------------------------


def _evaluate(
  config: EvaluateConfig, directory: runs.RunDirectory, console: rich.console.Console
) -> tuple[certificate.Certificate, str]:
  """Logs every table of the evaluation; returns the verdict over all drafts."""
  bench = Bench(config)
  with runs.MetricsLog(directory.metrics_path) as log:
    log.truncate(0)  # rows of an interrupted evaluation
    page.note_data(bench.prompts, log, console)
    with progress.status(console, "decoding with the target"):
      answers = bench.answers()
    log.write_all(rows_lib.Quality, bench.quality(answers))
    with progress.status(console, "decoding with each draft"):
      by_draft, checks = bench.drafts(answers)
    log.write_all(rows_lib.Draft, by_draft)
    log.write_all(rows_lib.Change, differences(by_draft))
    for label, check in zip(bench.labels, checks, strict=True):
      log.write(rows_lib.Certified(draft=label, **check.row()))
    if config.speed_requests:
      with progress.status(console, "timing"):
        log.write_all(rows_lib.Speed, bench.speeds())
  return sum(checks, certificate.Certificate()), ""


class Bench:
  """The target, its drafts and the prompts of one evaluation."""

  def __init__(self, config: EvaluateConfig):
    """Loads the pairs and reads the prompts."""
    self.config = config
    self._sampling = generation_config.resolved(config.sampling, config.pair)
    paths = (config.pair.named("draft"), *config.drafts)
    self.labels = draft_labels(paths)
    self.pairs: list[pairs.Pair] = []
    for path in paths:
      named = dataclasses.replace(config.pair, draft=path)
      pair = pairs.load_pair(named, sharding.make(config.partition))
      # All pairs share the first copy of the target, so that it is in memory once.
      first = self.pairs[0] if self.pairs else pair
      self.pairs.append(dataclasses.replace(pair, target_params=first.target_params))
    self.vocabulary = self.pairs[0].vocabulary
    self.prompts = read_corpus(config.prompts, self.vocabulary, config.count)
    self.requests = corpus.requests(self.prompts, self._sampling)

  def answers(self) -> list[Finished]:
    """The target's own answers, with records."""
    return self._plain(self.config.decoding).run(self.requests)

  def quality(self, answers: Sequence[Finished]) -> Iterator[dict[str, Any]]:
    """Yields one row per task: how good the target's answers are."""
    right = self._token_accuracies()
    for task_id, places in self._tasks():
      part = [(self.prompts[place], answers[place]) for place in places]
      shares = [share for place in places if (share := right[place]) is not None]
      yield {
        "task": self._label(task_id),
        "prompts": len(places),
        **quality(part, self.vocabulary),
        "token_accuracy": float(np.mean(shares)) if shares else None,
      }

  def drafts(
    self, answers: Sequence[Finished]
  ) -> tuple[list[dict[str, Any]], list[certificate.Certificate]]:
    """One row per draft and task, and one certificate per draft.

    Every draft is scored on the target's answers, not on its own, so that all drafts
    are compared on the same positions.
    """
    rows, checks = [], []
    for label, pair in zip(self.labels, self.pairs, strict=True):
      server = Server(pair, self.config.decoding, partition=self.config.partition)
      served = server.run(self.requests)
      draft = server.pair.draft
      agreed = agreement.mean_agreement(draft, server.draft_params, answers)
      for task_id, places in self._tasks():
        means = dict(agreed[task_id])
        means.pop("requests")
        counted = acceptance([served[place] for place in places])
        rows.append({"task": self._label(task_id), "draft": label, **means, **counted})
      checks.append(self._check(answers, served, server))
    return rows, checks

  def speeds(self) -> Iterator[dict[str, Any]]:
    """Yields the measured times of every draft, for one row in flight and several."""
    for count in dict.fromkeys((1, self.config.decoding.rows)):
      config = self.config.decoding.with_rows(count)
      unrecorded = dataclasses.replace(config, record_top_k=0)
      # Plain decoding has no use for records, so it does not pay for them.
      servers = [self._plain(unrecorded)]
      servers += [
        Server(pair, config, partition=self.config.partition) for pair in self.pairs
      ]
      timed_requests = self.requests[: self.config.speed_requests]
      # With several rows a block is long enough to keep them filled most of the time.
      block = 4 * count if count > 1 else 1
      timed = time_requests(servers, timed_requests, block)
      plain_ms = timed[0][0]
      for label, pair, (ms, tokens_per_call) in zip(
        self.labels, self.pairs, timed[1:], strict=True
      ):
        yield {
          "rows": count,
          "draft": label,
          "plain_ms_per_token": plain_ms,
          "ms_per_token": ms,
          "speed_up": plain_ms / ms,
          **self._predicted(config, pair, tokens_per_call),
        }

  def _predicted(
    self, config: DecodingConfig, pair: pairs.Pair, tau: float
  ) -> dict[str, float | None]:
    # The costs are measured on real prompts, in the largest bucket.
    shape = (config.rows, config.source_lengths[-1])
    source = np.full(shape, pair.target.pad_id, np.int32)
    for row in range(config.rows):
      tokens = self.prompts[row % len(self.prompts)].tokens
      source[row, : len(tokens)] = tokens
    single = measurement.measure_steps(config, pair.models, source)
    c, v, drafted = (
      single["cost_ratio"],
      single["verify_ratio"],
      config.num_draft_tokens,
    )
    fixed = config.adaptive is None  # both formulas assume one K
    return {
      "predicted": predicted_speed_up(tau, drafted, c, v) if fixed else None,
      "predicted_paper": predicted_speed_up(tau, drafted, c) if fixed else None,
      "tokens_per_target_call": tau,
      **single,
    }

  def _check(
    self, answers: Sequence[Finished], served: Sequence[Finished], server: Server
  ) -> certificate.Certificate:
    """Certificate of a draft's outputs; decodes some greedily if they were sampled."""
    if not certificate.applies(self._sampling, self.config.decoding):
      greedy = corpus.requests(self.prompts[:_CHECKED], SamplingConfig())
      answers = self._plain(self.config.decoding).run(greedy)
      served = server.run(greedy)
    certifier = certificate.Certifier(self.pairs[0])
    return certifier.judge(zip(answers, served, strict=True))

  def _token_accuracies(self) -> list[float | None]:
    """Share of reference tokens that are the target's first choice, per prompt."""
    # The first of the top-k tokens is enough: the reference is either it or not.
    config = dataclasses.replace(self.config.decoding, record_top_k=1)
    shares: list[float | None] = []
    for batch in corpus.reference_rows(self.pairs[0], self.prompts, config):
      mask = np.asarray(batch.mask)
      right = (np.asarray(batch.records.ids[..., 0]) == np.asarray(batch.target)) & mask
      shares += [
        float(hits.sum() / kept.sum()) if kept.any() else None
        for hits, kept in zip(right, mask, strict=True)
      ]
    return shares[: len(self.prompts)]

  def _tasks(self) -> list[tuple[int, list[int]]]:
    """(task id, indices of its prompts), sorted by task id."""
    places: dict[int, list[int]] = {}
    for place, prompt in enumerate(self.prompts):
      places.setdefault(prompt.task_id, []).append(place)
    return sorted(places.items())

  def _label(self, task_id: int) -> str:
    return self.config.prompts.tasks[task_id].label

  def _plain(self, decoding: DecodingConfig) -> Server:
    return corpus.plain_server(self.pairs[0], decoding, self.config.partition)


def time_requests(
  servers: Sequence[Server], requests: Sequence[Request], block: int
) -> list[tuple[float, float]]:
  """Serves the same requests with each idle server, in blocks of `block` and in turn.

  Returns milliseconds per emitted token, and tokens per target call, of each server.
  """
  for server in servers:
    bucket = server.engine.config.bucket
    # One request per bucket compiles every call before the clock starts.
    one_a_bucket = {bucket(len(request.tokens)): request for request in requests}
    server.run(list(one_a_bucket.values()))
    server.clear_cache()  # the timed requests must be new to it
  seconds = np.zeros(len(servers))
  tokens, calls = seconds.copy(), seconds.copy()
  for turn, start in enumerate(range(0, len(requests), block)):
    for offset in range(len(servers)):
      # Another server begins each block: a machine that slows down favours none.
      index = (turn + offset) % len(servers)
      started = time.perf_counter()
      answers = servers[index].run(requests[start : start + block])
      seconds[index] += time.perf_counter() - started
      tokens[index] += sum(len(done.tokens) for done in answers)
      calls[index] += sum(done.target_calls for done in answers)
  return list(zip(seconds * 1e3 / tokens, tokens / calls, strict=True))


def acceptance(served: Sequence[Finished]) -> dict[str, float | None]:
  """Acceptance rates of several requests, from the sums of their counters."""
  counts = [(d.accepted, d.drafted, len(d.tokens), d.target_calls) for d in served]
  accepted, drafted, tokens, calls = map(sum, zip(*counts, strict=True))
  return {
    "draft_acceptance_rate": metrics.draft_acceptance_rate(accepted, drafted),
    "tokens_per_target_call": metrics.tokens_per_target_call(tokens, calls),
  }


def quality(
  part: Sequence[tuple[EncodedExample, Finished]], vocabulary: Vocabulary
) -> dict[str, Any]:
  """Compares the answers of one task with references and describes their form.

  Returns:
    `references`: the number of complete references (present and not truncated).
    `exact_match`: share of those that the answer matches exactly, without outer spaces.
    `ended`, `looping`: shares of answers that end with end-of-sequence, and that repeat
    themselves. `distinct`: distinct texts / answers. `output_tokens`: mean length.
  """
  texts = [vocabulary.decode(done.tokens).strip() for _, done in part]
  exact = [
    text == vocabulary.decode(prompt.reference).strip()
    for text, (prompt, _) in zip(texts, part, strict=True)
    # A reference without end-of-sequence was truncated, so no answer can match it.
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
  """Each further draft minus the first draft, per task; negative means forgotten."""
  # Rows come draft by draft, so the first row of a task belongs to the first draft.
  first: dict[str, Mapping[str, Any]] = {}
  changes = []
  for row in rows:
    before = first.setdefault(row["task"], row)
    if row is not before:
      names = [name for name in row if name not in ("task", "draft")]
      changed = {
        name: None if None in (row[name], before[name]) else row[name] - before[name]
        for name in names
      }
      changes.append({"task": row["task"], "draft": row["draft"], **changed})
  return changes


def draft_labels(paths: Sequence[str]) -> list[str]:
  """File names without suffix, or the whole paths if two files have the same name."""
  stems = [Path(path.partition(":")[2] or path).stem for path in paths]
  return [
    stem if stems.count(stem) == 1 else path
    for stem, path in zip(stems, paths, strict=True)
  ]


# --- osd certify --------------------------------------------------------------------

Draft = tuple[base.Model, base.Params]


# Drafts to certify with. Exactness must not depend on the quality of the draft, so the
# list runs from the target itself to a model with random parameters.
DRAFTS: dict[str, Callable[[pairs.Pair], Draft]] = {
  "pair": lambda pair: (pair.draft, pair.draft_params),
  "target": lambda pair: (pair.target, pair.target_params),
  "perturbed": lambda pair: (pair.target, perturbed(pair.target_params, _NOISE)),
  "unrelated": lambda pair: (
    pair.target,
    jax.jit(pair.target.init)(jax.random.key(9)),
  ),
}


def perturbed(params: base.Params, scale: float, seed: int = 0) -> base.Params:
  """A copy with normal noise of `scale` standard deviations of each array."""
  leaves, tree = jax.tree.flatten(params)
  rng = np.random.default_rng(seed)
  return jax.tree.unflatten(
    tree,
    [
      leaf + scale * np.std(leaf) * rng.normal(size=leaf.shape).astype(leaf.dtype)
      for leaf in map(np.asarray, leaves)
    ],
  )


def _certify(
  config: CertifyConfig,
  sampling: SamplingConfig,
  directory: runs.RunDirectory,
  console: rich.console.Console,
) -> tuple[certificate.Certificate, str]:
  """Logs one row per combination of K and rows; returns the verdict over all."""
  pair = pairs.load_pair(config.pair, sharding.make(config.partition))
  prompts = read_corpus(config.prompts, pair.vocabulary, config.count)
  requests = corpus.requests(prompts, sampling)
  certifier = certificate.Certifier(pair)
  # Nothing learns from these answers, so decoding records nothing.
  plain = dataclasses.replace(config.decoding, record_top_k=0)
  total = certificate.Certificate()
  with runs.MetricsLog(directory.metrics_path) as log, progress.bar(console) as bar:
    log.truncate(0)
    page.note_data(prompts, log, console)
    count = len(config.num_draft_tokens) * len(requests)
    task = bar.add_task("plain", total=count, figures="")
    expected = corpus.plain_server(pair, plain, config.partition).run(requests)
    for decoding, name, places in _combinations(config, plain, len(requests)):
      answers = speculative_answers(
        pair.with_draft(*DRAFTS[name](pair)),
        decoding,
        [requests[place] for place in places],
        config.partition,
        lambda done: bar.advance(task),
      )
      both = zip((expected[place] for place in places), answers, strict=True)
      judged = certifier.judge(both, int(places[0]))
      total += judged
      row = {"K": decoding.num_draft_tokens, "rows": decoding.rows, "draft": name}
      bar.update(task, description=f"K {row['K']}, rows {row['rows']}")
      row |= judged.row() | acceptance(answers)
      # The same in every row, or meaningless while the draft is swapped.
      for unlogged in ("check", "tokens_per_target_call"):
        row.pop(unlogged)
      log.write(rows_lib.Certified(**row))
  return total, ""


def _combinations(
  config: CertifyConfig, decoding: DecodingConfig, count: int
) -> Iterator[tuple[DecodingConfig, str, np.ndarray]]:
  """Yields (decoding, name of the draft, indices of the prompts) for K and rows."""
  parts = np.array_split(np.arange(count), len(config.rows))
  for turn, drafted in enumerate(config.num_draft_tokens):
    for group, rows in enumerate(config.rows):
      # Shifting by K pairs every number of rows with different drafts.
      name = config.drafts[(turn + group) % len(config.drafts)]
      yield (
        dataclasses.replace(decoding.with_rows(rows), num_draft_tokens=drafted),
        name,
        parts[group],
      )


def speculative_answers(
  pair: pairs.Pair,
  decoding: DecodingConfig,
  requests: Sequence[Request],
  partition: sharding.PartitionConfig,
  on_finished: Callable[[Finished], object] = lambda done: None,
) -> list[Finished]:
  """Answers in the order of the requests; the draft is swapped every few rounds."""
  server = Server(
    pair, dataclasses.replace(decoding, max_rounds=_SWAP_ROUNDS), partition=partition
  )
  # Each call runs few rounds, so that requests see several versions of the draft.
  versions = [pair.draft_params] * 2
  if not pairs.adapts_untrained(pair):  # a cache changes by itself
    versions[1] = perturbed(pair.draft_params, _NOISE, seed=1)
  answers: dict[int, Finished] = {}  # by identity, because answers come out of order
  for finished in server.serve(requests):
    for done in finished:
      on_finished(done)
      answers[id(done.request)] = done
    version = server.engine.draft_version + 1
    # The swap is between two calls, while most requests are in flight.
    server.engine.swap(versions[version % 2], version)
  return [answers[id(request)] for request in requests]
