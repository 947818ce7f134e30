"""Certifies a pair: prompts decoded plainly and speculatively, in many arrangements."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import rich.console

from osd_jax import base, corpus, pairs, partitioning, writers
from osd_jax.data import batches as data_batches
from osd_jax.measuring import certificate, metrics, progress, summaries
from osd_jax.serving import slots

_SWAP_ROUNDS = 3  # rounds between two swaps
_NOISE = 0.1  # of a perturbed copy, in standard deviations of each array


@dataclasses.dataclass(frozen=True)
class CertifyConfig:
  """One certificate: every K, with numbers of rows and drafts taking turns.

  Attributes:
    prompts: what is decoded; references are not needed.
    count: prompts for each K.
    pair: target, draft and vocabulary.
    decoding: shapes; its rows decode plainly, K and rows are those below.
    sampling: the i-th prompt draws with seed + i. Sampled requests need
      DecodingConfig.acceptance_rule = "coupling".
    num_draft_tokens: every K to certify.
    rows: numbers of rows in flight; the prompts of a K are dealt out among them.
    drafts: keys of `DRAFTS`, taking turns.
    swap: swap the draft with a perturbed copy and back every few rounds, so that it
      changes in the middle of requests.
    run_directory: where certificate.json goes.
    overwrite: remove the run that the directory holds, and begin anew.
    partition: mesh.
  """

  prompts: data_batches.BatchConfig
  count: int = 64
  pair: pairs.PairConfig = pairs.PairConfig()
  decoding: slots.DecodingConfig = slots.DecodingConfig(rows=8)
  sampling: slots.SamplingConfig = slots.SamplingConfig()
  num_draft_tokens: tuple[int, ...] = (3, 7)
  rows: tuple[int, ...] = (1, 5)
  drafts: tuple[str, ...] = ("pair", "perturbed")
  swap: bool = True
  run_directory: str = "runs/certify"
  overwrite: bool = False
  partition: partitioning.PartitionConfig = partitioning.PartitionConfig()

  def __post_init__(self):
    base.check_fields(self, {"run_directory": (self.run_directory, "a folder")})
    checks = {
      "count": (self.count >= len(self.rows), "at least one for each of rows"),
      "num_draft_tokens": (self.num_draft_tokens, "at least one K"),
      "rows": (self.rows and min(self.rows) >= 1, "numbers >= 1"),
      "drafts": (
        self.drafts and set(self.drafts) <= set(DRAFTS),
        f"names out of {sorted(DRAFTS)}",
      ),
      "sampling": (
        certificate.applies(self.sampling, self.decoding),
        "temperature 0, or DecodingConfig.acceptance_rule = 'coupling': sampled"
        " outputs of the rejection rule equal plain decoding's in law only",
      ),
    }
    for name, (valid, expected) in checks.items():
      if not valid:
        raise base.InputError(
          f"CertifyConfig.{name}: received {getattr(self, name)!r}, expected"
          f" {expected}."
        )


Draft = tuple[base.Model, base.Params]


def _unrelated(pair: pairs.Pair) -> Draft:
  return pair.target, jax.jit(pair.target.init)(jax.random.key(9))


# Who drafts, by name.
DRAFTS: dict[str, Callable[[pairs.Pair], Draft]] = {
  "pair": lambda pair: (pair.draft, pair.draft_params),
  "target": lambda pair: (pair.target, pair.target_params),
  "perturbed": lambda pair: (pair.target, perturbed(pair.target_params, _NOISE)),
  "unrelated": _unrelated,
}


def perturbed(params: base.Params, scale: float, seed: int = 0) -> base.Params:
  """A copy with noise of `scale` standard deviations of each array."""
  leaves, tree = jax.tree.flatten(params)
  rng = np.random.default_rng(seed)
  return jax.tree.unflatten(
    tree,
    [
      leaf + scale * np.std(leaf) * rng.normal(size=leaf.shape).astype(leaf.dtype)
      for leaf in map(np.asarray, leaves)
    ],
  )


def run(config: CertifyConfig, operative_config: str = "") -> Path:
  """Decodes, judges, prints and writes the verdict.

  Args:
    config: the certificate.
    operative_config: text stored beside the results.

  Returns:
    The run directory.

  Raises:
    SystemExit: with code 1 if an output is wrong; everything is written before.
  """
  console = rich.console.Console(stderr=True)
  with writers.RunDirectory.start(
    config.run_directory,
    config,
    operative_config=operative_config,
    seed=config.sampling.seed,
    overwrite=config.overwrite,
  ) as directory:
    if directory.finished:
      return summaries.leave_alone(directory, console)
    total = _certified(config, directory, console)
    summaries.conclude(directory, console, total.sentence())
    console.print(f"run directory: {directory.path}", soft_wrap=True)
    certificate.conclude(total, directory)
    directory.finish()  # not where outputs were wrong: the same command says so again
    return directory.path


def _certified(
  config: CertifyConfig, directory: writers.RunDirectory, console: rich.console.Console
) -> certificate.Certificate:
  """Logs a row for every arrangement; returns the verdict over all of them."""
  grid = Grid(config)
  total = certificate.Certificate()
  with (
    writers.MetricsLog(directory.metrics_path) as log,
    progress.bar(console) as bar,
  ):
    log.truncate(0)
    count = len(config.num_draft_tokens) * config.count
    task = bar.add_task("plain", total=count, figures="")
    for row, found in grid.rows(lambda done: bar.advance(task)):
      total += found
      bar.update(task, description=f"K {row['K']}, rows {row['rows']}")
      log.write("certificate", row)
  return total


class Grid:
  """Arrangements of one pair's prompts."""

  def __init__(self, config: CertifyConfig):
    """Loads the pair and reads the prompts."""
    self.config = config
    self._partitioner = partitioning.make(config.partition)
    self.pair = pairs.load(config.pair, self._partitioner)
    self.prompts = corpus.prompts(config.prompts, self.pair.vocabulary, config.count)
    self._certifier = certificate.Certifier(self.pair)

  def rows(
    self, on_finished: Callable[[slots.Finished], None]
  ) -> Iterator[tuple[dict[str, Any], certificate.Certificate]]:
    """Yields (row of the table, certificate) for every K and number of rows."""
    plain = self._slots(self.config.decoding, None)
    expected = corpus.answer(plain, self.prompts, self.config.sampling)
    parts = np.array_split(np.arange(len(self.prompts)), len(self.config.rows))
    for turn, drafted in enumerate(self.config.num_draft_tokens):
      for group, count in enumerate(self.config.rows):
        places = parts[group]
        name = self.config.drafts[(turn + group) % len(self.config.drafts)]
        decoding = dataclasses.replace(
          self.config.decoding, num_draft_tokens=drafted, rows=count
        )
        answers = self.answers(decoding, name, places, on_finished)
        found = self._certifier.judge(
          zip((expected[place] for place in places), answers, strict=True),
          int(places[0]),
        )
        yield self._row(drafted, count, name, answers, found), found

  def answers(
    self,
    decoding: slots.DecodingConfig,
    name: str,
    places: np.ndarray,
    on_finished: Callable[[slots.Finished], None] = lambda done: None,
  ) -> list[slots.Finished]:
    """Speculative answers to some prompts, in their order."""
    model, params = DRAFTS[name](self.pair)
    decoder = self._slots(decoding, (model, params))
    versions = [params, perturbed(params, _NOISE, seed=1)]
    requests = [self._request(place) for place in places]
    for request in requests:
      decoder.submit(request)
    found: dict[int, slots.Finished] = {}
    while decoder.in_flight:
      for done in decoder.step():
        on_finished(done)
        found[id(done.request)] = done
      if self.config.swap:
        version = decoder.draft_version + 1
        decoder.swap(versions[version % 2], version)
    return [found[id(request)] for request in requests]

  def _request(self, place: int) -> slots.Request:
    sampling = self.config.sampling
    return slots.Request(
      self.prompts[place].tokens,
      dataclasses.replace(sampling, seed=sampling.seed + int(place)),
    )

  def _slots(self, decoding: slots.DecodingConfig, draft: Draft | None) -> slots.Slots:
    swaps = draft is not None and self.config.swap
    limit = _SWAP_ROUNDS if swaps else decoding.target_length
    return slots.Slots(
      dataclasses.replace(decoding, record_top_k=0, max_rounds=limit),
      self.pair.target,
      self.pair.target_params,
      *(draft or ()),
      partitioner=self._partitioner,
    )

  def _row(
    self,
    drafted: int,
    count: int,
    name: str,
    answers: Sequence[slots.Finished],
    found: certificate.Certificate,
  ) -> dict[str, Any]:
    accepted = sum(done.accepted for done in answers)
    offered = sum(done.drafted for done in answers)
    row = found.row()
    row.pop("check")
    return {
      "K": drafted,
      "rows": count,
      "draft": name,
      **row,
      "draft_acceptance_rate": metrics.draft_acceptance_rate(accepted, offered),
    }
