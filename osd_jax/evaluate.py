"""`osd evaluate` measures drafts on held-out prompts; `osd certify` checks exactness.

Both decode a fixed set of prompts plainly and speculatively, and neither trains.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
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
from osd_jax.loop.meter import acceptance
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
  return session.run(config, operative_config, config.sampling.seed, _evaluate)


def certify(config: CertifyConfig, operative_config: str = "") -> runs.RunResult:
  """Checks that speculative outputs equal plain decoding's; see `RunResult.exact`.

  `operative_config` is gin text that is stored in the run directory.
  """
  return session.run(config, operative_config, config.sampling.seed, _certify)


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
      answers = bench.plain().run(bench.requests)
    log.write_all(bench.quality(answers))
    with progress.status(console, "decoding with each draft"):
      by_draft, checks = bench.drafts(answers)
    log.write_all(by_draft)
    log.write_all(differences(by_draft))
    for label, check in checks.items():
      log.write(rows_lib.Certified(draft=label, **check.row()))
    if config.speed_requests:
      with progress.status(console, "timing"):
        log.write_all(bench.speeds())
  return sum(checks.values(), certificate.Certificate()), ""


def _serves_all(found: dict[str, pairs.Pair]) -> pairs.Pair:
  """Returns a pair whose target keeps the states that all drafts read."""
  configs = {name: pair.draft_config for name, pair in found.items()}
  reads = {name: getattr(config, "reads", "") for name, config in configs.items()}
  kinds = set(reads.values()) - {""}
  if len(kinds) > 1 and kinds != {"prompt", "tokens"}:
    names = ", ".join(f"{name}: {kind or 'none'}" for name, kind in reads.items())
    raise base.InputError(
      "EvaluateConfig.drafts: expected drafts that read the same states of the target,"
      f" received {names}; evaluate them one after another."
    )
  best = max(kinds, key=str, default="")  # the states of tokens include the prompt's
  return next(found[name] for name, kind in reads.items() if kind == best)


class Bench:
  """The target, its drafts and the prompts of one evaluation.

  Attributes:
    config: settings.
    pairs: name of each draft -> its pair; all share one copy of the target.
    prompts: the held-out prompts.
    requests: one request for each.
  """

  def __init__(self, config: EvaluateConfig):
    """Loads the pairs and reads the prompts."""
    self.config = config
    self._sampling = generation_config.resolved(config.sampling, config.pair)
    paths = (config.pair.named("draft"), *config.drafts)
    self.pairs: dict[str, pairs.Pair] = {}
    for label, path in zip(draft_labels(paths), paths, strict=True):
      pair_config = dataclasses.replace(config.pair, draft=path)
      pair = pairs.load_pair(pair_config, sharding.make(config.partition))
      first = next(iter(self.pairs.values()), pair)
      self.pairs[label] = dataclasses.replace(pair, target_params=first.target_params)
    self._pair = _serves_all(self.pairs)
    self.prompts = read_corpus(config.prompts, self._pair.vocabulary, config.count)
    self.requests = corpus.requests(self.prompts, self._sampling)

  def plain(self) -> Server:
    """Returns a server of the target alone, whose answers have records."""
    return corpus.plain_server(self._pair, self.config.decoding, self.config.partition)

  def quality(self, answers: Sequence[Finished]) -> Iterator[rows_lib.Quality]:
    """Yields how good the target's answers are, task by task."""
    accuracies = self.token_accuracies()
    for _, label, places in self._tasks():
      part = [(self.prompts[place], answers[place]) for place in places]
      shares = [share for place in places if (share := accuracies[place]) is not None]
      yield rows_lib.Quality(
        task=label,
        prompts=len(places),
        **quality(part, self._pair.vocabulary),
        token_accuracy=float(np.mean(shares)) if shares else None,
      )

  def drafts(
    self, answers: Sequence[Finished]
  ) -> tuple[list[rows_lib.Draft], dict[str, certificate.Certificate]]:
    """Returns the agreement of each draft on each task, and each draft's certificate.

    Every draft is scored on the target's answers, not on its own, so that all drafts
    are compared on the same positions.
    """
    rows, checks = [], {}
    for name, pair in self.pairs.items():
      server = Server(pair, self.config.decoding, partition=self.config.partition)
      served = server.run(self.requests)
      agreed = agreement.mean_agreement(server.pair.draft, server.draft_params, answers)
      for task_id, label, places in self._tasks():
        means = {**agreed[task_id], **acceptance([served[place] for place in places])}
        del means["requests"]
        rows.append(rows_lib.Draft(task=label, draft=name, **means))
      checks[name] = self._check(answers, served, server)
    return rows, checks

  def speeds(self) -> Iterator[rows_lib.Speed]:
    """Yields the measured times of every draft, for one row in flight and several."""
    partition = self.config.partition
    for count in dict.fromkeys((1, self.config.decoding.rows)):
      config = self.config.decoding.with_rows(count)
      plain = corpus.plain_server(self._pair, config, partition, records=False)
      drafting = [
        Server(pair, config, partition=partition) for pair in self.pairs.values()
      ]
      # With several rows a block is long enough to keep them filled most of the time.
      (plain_ms, _), *timed = time_requests(
        [plain, *drafting],
        self.requests[: self.config.speed_requests],
        block=4 * count if count > 1 else 1,
      )
      for (label, pair), (ms, tokens_per_call) in zip(
        self.pairs.items(), timed, strict=True
      ):
        yield rows_lib.Speed(
          rows=count,
          draft=label,
          plain_ms_per_token=plain_ms,
          ms_per_token=ms,
          speed_up=plain_ms / ms,
          **self._predicted(config, pair, tokens_per_call),
        )

  def _predicted(self, config: DecodingConfig, pair: pairs.Pair, tau: float) -> Any:
    """Returns the fields of a speed row that follow from single calls."""
    # The costs are measured on real prompts, in the largest bucket.
    shape = (config.rows, config.source_lengths[-1])
    source = np.full(shape, pair.target.pad_id, np.int32)
    for row in range(config.rows):
      tokens = self.prompts[row % len(self.prompts)].tokens
      source[row, : len(tokens)] = tokens
    steps = measurement.measure_steps(config, pair.models, source)
    k, c, v = config.num_draft_tokens, steps["cost_ratio"], steps["verify_ratio"]
    fixed = config.adaptive is None  # both formulas assume one K
    return {
      "predicted": predicted_speed_up(tau, k, c, v) if fixed else None,
      "predicted_paper": predicted_speed_up(tau, k, c) if fixed else None,
      "tokens_per_target_call": tau,
      **steps,
    }

  def _check(
    self, answers: Sequence[Finished], served: Sequence[Finished], server: Server
  ) -> certificate.Certificate:
    """Certificate of a draft's outputs; decodes some greedily if they were sampled."""
    if not certificate.applies(self._sampling, self.config.decoding):
      greedy = corpus.requests(self.prompts[:_CHECKED], SamplingConfig())
      answers, served = self.plain().run(greedy), server.run(greedy)
    certifier = certificate.Certifier(self._pair)
    return certifier.judge(zip(answers, served, strict=True))

  def token_accuracies(self) -> list[float | None]:
    """Share of reference tokens that are the target's first choice, per prompt."""
    # The first of the top-k tokens is enough: the reference is either it or not.
    config = dataclasses.replace(self.config.decoding, record_top_k=1)
    shares: list[float | None] = []
    for batch in corpus.reference_rows(self._pair, self.prompts, config):
      mask = np.asarray(batch.mask)
      right = (np.asarray(batch.records.ids[..., 0]) == np.asarray(batch.target)) & mask
      shares += [
        float(hits.sum() / is_token.sum()) if is_token.any() else None
        for hits, is_token in zip(right, mask, strict=True)
      ]
    return shares[: len(self.prompts)]

  def _tasks(self) -> list[tuple[int, str, list[int]]]:
    """(task id, label, indices of its prompts), sorted by task id."""
    places: dict[int, list[int]] = {}
    for place, prompt in enumerate(self.prompts):
      places.setdefault(prompt.task_id, []).append(place)
    tasks = self.config.prompts.tasks
    return [(number, tasks[number].label, places[number]) for number in sorted(places)]


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
      tokens[index] += sum(len(answer.tokens) for answer in answers)
      calls[index] += sum(answer.target_calls for answer in answers)
  return list(zip(seconds * 1e3 / tokens, tokens / calls, strict=True))


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
  texts = [vocabulary.decode(answer.tokens).strip() for _, answer in part]
  exact = [
    text == vocabulary.decode(prompt.reference).strip()
    for text, (prompt, _) in zip(texts, part, strict=True)
    # A reference without end-of-sequence was truncated, so no answer can match it.
    if len(prompt.reference) > 1 and prompt.reference[-1] in vocabulary.eos_ids
  ]
  ended = [answer.stop_reason == base.StopReason.EOS for _, answer in part]
  return {
    "references": len(exact),
    "exact_match": float(np.mean(exact)) if exact else None,
    "ended": float(np.mean(ended)),
    "looping": float(np.mean([metrics.loops(answer.tokens) for _, answer in part])),
    "distinct": len(set(texts)) / len(texts),
    "output_tokens": float(np.mean([len(answer.tokens) for _, answer in part])),
  }


def differences(rows: Sequence[rows_lib.Draft]) -> Iterator[rows_lib.Change]:
  """Yields each further draft minus the first, per task; negative means forgotten."""
  # Rows come draft by draft, so the first row of a task belongs to the first draft.
  first: dict[str, rows_lib.Draft] = {}
  for row in rows:
    before, fields = vars(first.setdefault(row.task, row)), vars(row)
    if first[row.task] is not row:
      numbers = fields.keys() - {"task", "draft"}
      changed = {
        name: fields[name] - before[name]
        if None not in (fields[name], before[name])
        else None
        for name in numbers
      }
      yield rows_lib.Change(task=row.task, draft=row.draft, **changed)


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
  config: CertifyConfig, directory: runs.RunDirectory, console: rich.console.Console
) -> tuple[certificate.Certificate, str]:
  """Logs one row per combination of K and rows; returns the verdict over all."""
  pair = pairs.load_pair(config.pair, sharding.make(config.partition))
  prompts = read_corpus(config.prompts, pair.vocabulary, config.count)
  sampling = generation_config.resolved(config.sampling, config.pair)
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
      k, rows = decoding.num_draft_tokens, decoding.rows
      bar.update(task, description=f"K {k}, rows {rows}")
      fields = judged.row()
      del fields["check"]  # the same in every row
      # Tokens per call are not logged: those of several drafts, which are swapped.
      fields["draft_acceptance_rate"] = acceptance(answers)["draft_acceptance_rate"]
      log.write(rows_lib.Certified(K=k, rows=rows, draft=name, **fields))
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
  on_finished: Callable[[Finished], object] = lambda answer: None,
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
    for answer in finished:
      on_finished(answer)
      answers[id(answer.request)] = answer
    version = server.engine.draft_version + 1
    # The swap is between two calls, while most requests are in flight.
    server.engine.swap(versions[version % 2], version)
  return [answers[id(request)] for request in requests]
