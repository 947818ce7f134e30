"""Compares rejection and coupling on the same sampled requests of the shipped pair.

Rejection accepts a drafted token with probability 1 - TV, coupling with probability at
least (1 - TV) / (1 + TV). In exchange, coupling gives the same outputs as plain
decoding with the same seed; the experiment counts these outputs too.

  python experiments/acceptance_rules/run.py [--count 200] [--draft FILE]
"""

import argparse
import dataclasses
import json

import numpy as np
import rich.console
import rich.table

from osd_jax import corpus, evaluate, pairs, sharding
from osd_jax.data.batches import EncodedExample, read_corpus
from osd_jax.decoding import accept
from osd_jax.engine import agreement, engine
from osd_jax.engine.server import Server
from osd_jax.main import settings

TEMPERATURES = (0.3, 0.7, 1.0)


def measure(
  pair: pairs.Pair,
  asked: list[EncodedExample],
  decoding: engine.DecodingConfig,
  partition: sharding.PartitionConfig,
  temperature: float,
) -> dict[str, float]:
  """Measures acceptance, its theoretical values and the share equal to plain."""
  requests = corpus.requests(asked, engine.SamplingConfig(temperature=temperature))
  plain = corpus.plain_server(pair, decoding, partition).run(requests)
  overlap = mean_overlap(pair, plain)
  row = {
    "temperature": temperature,
    "rejection_law": overlap,
    "coupling_bound": overlap / (2 - overlap),
  }
  for rule in accept.RULES:
    config = dataclasses.replace(decoding, acceptance_rule=rule)
    found = Server(pair, config, partition=partition).run(requests)
    row[rule] = sum(d.accepted for d in found) / sum(d.drafted for d in found)
    row[f"{rule}_tokens_per_call"] = sum(len(d.tokens) for d in found) / sum(
      d.target_calls for d in found
    )
    both = zip(plain, found, strict=True)
    equal = [np.array_equal(a.tokens, b.tokens) for a, b in both]
    row[f"{rule}_equal_to_plain"] = float(np.mean(equal))
  return row


def mean_overlap(pair: pairs.Pair, answers: list[engine.Finished]) -> float:
  """Returns the mean of 1 - TV, after temperature, over all emitted positions."""
  found = [
    agreement.agreement(pair.draft, pair.draft_params, done.batch, done.settings)
    for done in answers
  ]
  tokens = np.array([len(done.tokens) for done in answers])
  rates = np.array([float(row.acceptance_rate[0]) for row in found])
  return float((tokens * rates).sum() / tokens.sum())


def main() -> None:
  """Serves both rules at every temperature and prints the table."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--count", type=int, default=200)
  parser.add_argument("--draft", help="weights file (default: shipped draft)")
  given = parser.parse_args()
  config, _ = settings.load(
    evaluate.CertifyConfig,
    ["experiments/certify_shipped.gin"],
    [f"BatchConfig.limit_rows={-(-given.count // 4)}"],
  )
  named = config.pair
  if given.draft:
    named = dataclasses.replace(named, draft=given.draft)
  pair = pairs.load_pair(named, sharding.make(config.partition))
  asked = read_corpus(config.prompts, pair.vocabulary, given.count)
  # Records contain all tokens, so that the overlap is exact.
  decoding = dataclasses.replace(config.decoding, record_top_k=pair.target.vocab_size)
  console = rich.console.Console()
  rows = [
    measure(pair, asked, decoding, config.partition, value) for value in TEMPERATURES
  ]
  table = rich.table.Table("T", "rejection", "law", "coupling", "bound", "equal")
  for row in rows:
    console.print(json.dumps(row), soft_wrap=True)
    table.add_row(
      *(
        f"{row[name]:.3f}"
        for name in (
          "temperature",
          "rejection",
          "rejection_law",
          "coupling",
          "coupling_bound",
          "coupling_equal_to_plain",
        )
      )
    )
  console.print(table)


if __name__ == "__main__":
  main()
