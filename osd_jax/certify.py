"""Certifies a pair: prompts decoded plainly and speculatively, in many arrangements."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import rich.console

from osd_jax import base, corpus, metrics, pairs, runs, sharding
from osd_jax.data import batches as batches_lib
from osd_jax.data import prompts as prompts_lib
from osd_jax.engine import engine
from osd_jax.engine.server import Server
from osd_jax.measuring import certificate
from osd_jax.report import progress, summaries

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

  prompts: batches_lib.BatchConfig
  count: int = 64
  pair: pairs.PairConfig = pairs.PairConfig()
  decoding: engine.DecodingConfig = engine.DecodingConfig(rows=8)
  sampling: engine.SamplingConfig = engine.SamplingConfig()
  num_draft_tokens: tuple[int, ...] = (3, 7)
  rows: tuple[int, ...] = (1, 5)
  drafts: tuple[str, ...] = ("pair", "perturbed")
  swap: bool = True
  run_directory: str = "runs/certify"
  overwrite: bool = False
  partition: sharding.PartitionConfig = sharding.PartitionConfig()

  def __post_init__(self):
    base.check_fields(self, {"run_directory": (self.run_directory.strip(), "a folder")})
    base.check_counts(self, "count", least=len(self.rows))
    base.check_fields(
      self,
      {
        "num_draft_tokens": (self.num_draft_tokens, "at least one K"),
        "rows": (self.rows and all(map(base.is_count, self.rows)), "integers >= 1"),
        "drafts": (
          self.drafts and set(self.drafts) <= set(DRAFTS),
          f"names out of {sorted(DRAFTS)}",
        ),
        "sampling": (
          certificate.applies(self.sampling, self.decoding),
          "temperature 0, or DecodingConfig.acceptance_rule = 'coupling': other sampled"
          " outputs equal plain decoding's in law only, if their rule is exact",
        ),
      },
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


def run(config: CertifyConfig, operative_config: str = "") -> runs.RunResult:
  """Decodes, judges, prints and writes the verdict.

  Args:
    config: the certificate.
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
    total = _certified(config, directory, console)
    return summaries.result(total, directory, console)


def _certified(
  config: CertifyConfig, directory: runs.RunDirectory, console: rich.console.Console
) -> certificate.Certificate:
  """Logs a row for every arrangement; returns the verdict over all of them."""
  grid = Grid(config)
  total = certificate.Certificate()
  with (
    runs.MetricsLog(directory.metrics_path) as log,
    progress.bar(console) as bar,
  ):
    log.truncate(0)
    summaries.note_data(grid.prompts, log, console)
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
    self.pair = pairs.load_pair(config.pair, sharding.make(config.partition))
    self.prompts = prompts_lib.prompts(
      config.prompts, self.pair.vocabulary, config.count
    )
    self.requests = corpus.requests(self.prompts, config.sampling)
    self._certifier = certificate.Certifier(self.pair)

  def rows(
    self, on_finished: Callable[[engine.Finished], None]
  ) -> Iterator[tuple[dict[str, Any], certificate.Certificate]]:
    """Yields (row of the table, certificate) for every K and number of rows."""
    decoding = dataclasses.replace(self.config.decoding, record_top_k=0)
    plain = corpus.plain_server(self.pair, decoding, self.config.partition)
    expected = plain.run(self.requests)
    parts = np.array_split(np.arange(len(self.requests)), len(self.config.rows))
    for turn, drafted in enumerate(self.config.num_draft_tokens):
      for group, count in enumerate(self.config.rows):
        places = parts[group]
        name = self.config.drafts[(turn + group) % len(self.config.drafts)]
        answers = self.answers(
          dataclasses.replace(decoding, num_draft_tokens=drafted, rows=count),
          name,
          places,
          on_finished,
        )
        judged = self._certifier.judge(
          zip((expected[place] for place in places), answers, strict=True),
          int(places[0]),
        )
        yield self._row(drafted, count, name, answers, judged), judged

  def answers(
    self,
    decoding: engine.DecodingConfig,
    name: str,
    places: np.ndarray,
    on_finished: Callable[[engine.Finished], None] = lambda done: None,
  ) -> list[engine.Finished]:
    """Speculative answers to some prompts, in their order."""
    model, params = DRAFTS[name](self.pair)
    limit = _SWAP_ROUNDS if self.config.swap else decoding.target_length
    server = Server(
      self.pair.with_draft(model, params),
      dataclasses.replace(decoding, max_rounds=limit),
      partition=self.config.partition,
    )
    versions = [params, perturbed(params, _NOISE, seed=1)]
    requests = [self.requests[place] for place in places]
    answers: dict[int, engine.Finished] = {}
    for finished in server.turns(requests):
      for done in finished:
        on_finished(done)
        answers[id(done.request)] = done
      if self.config.swap:
        version = server.engine.draft_version + 1
        server.engine.swap(versions[version % 2], version)
    return [answers[id(request)] for request in requests]

  def _row(
    self,
    drafted: int,
    count: int,
    name: str,
    answers: Sequence[engine.Finished],
    judged: certificate.Certificate,
  ) -> dict[str, Any]:
    accepted = sum(done.accepted for done in answers)
    offered = sum(done.drafted for done in answers)
    row = judged.row()
    row.pop("check")
    return {
      "K": drafted,
      "rows": count,
      "draft": name,
      **row,
      "draft_acceptance_rate": metrics.draft_acceptance_rate(accepted, offered),
    }
