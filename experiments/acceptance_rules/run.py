"""Compares the acceptance rules on the same sampled requests of the shipped pair.

Rejection accepts a drafted token with probability 1 - TV, coupling with probability at
least (1 - TV) / (1 + TV). In exchange, coupling gives the same outputs as plain
decoding with the same seed; the experiment counts these outputs too. Block accepts at
least as many tokens as rejection; the experiment reports both rules' tokens per target
call, their ratio with its standard error, and milliseconds per token.

  python experiments/acceptance_rules/run.py [--count 200] [--draft FILE]
      [--num_draft_tokens 7] [--repeats 4] [--temperatures .7 1]
"""

import argparse
import dataclasses
import json
import time

import numpy as np
import rich.console
import rich.table

from osd_jax import corpus, evaluate, pairs, sharding
from osd_jax.data.batches import EncodedExample, read_corpus
from osd_jax.decoding import accept
from osd_jax.engine import agreement
from osd_jax.engine.requests import DecodingConfig, Finished, SamplingConfig
from osd_jax.engine.server import Server
from osd_jax.main import settings

TEMPERATURES = (0.3, 0.7, 1.0)


def measure(
  pair: pairs.Pair,
  asked: list[EncodedExample],
  decoding: DecodingConfig,
  partition: sharding.PartitionConfig,
  temperature: float,
) -> dict[str, float]:
  """Measures acceptance, its theoretical values and the share equal to plain."""
  requests = corpus.requests(asked, SamplingConfig(temperature=temperature))
  # Records contain all tokens, so that the overlap is exact.
  whole = dataclasses.replace(decoding, record_top_k=pair.target.vocab_size)
  plain = corpus.plain_server(pair, whole, partition).run(requests)
  overlap = mean_overlap(pair, plain)
  row = {
    "temperature": temperature,
    "rejection_law": overlap,
    "coupling_bound": overlap / (2 - overlap),
  }
  answers = {}
  for rule in accept.RULES:
    config = dataclasses.replace(decoding, acceptance_rule=rule)
    server = Server(pair, config, partition=partition)
    server.run(requests[:2])  # compiles
    start = time.perf_counter()
    answers[rule] = finished = server.run(requests)
    seconds = time.perf_counter() - start
    row[rule] = sum(d.accepted for d in finished) / sum(d.drafted for d in finished)
    row[f"{rule}_tokens_per_call"] = tokens_per_call(finished)
    row[f"{rule}_ms_per_token"] = 1e3 * seconds / sum(len(d.tokens) for d in finished)
    both = zip(plain, finished, strict=True)
    equal = [np.array_equal(a.tokens, b.tokens) for a, b in both]
    row[f"{rule}_equal_to_plain"] = float(np.mean(equal))
  ratio, error = gain(answers["block"], answers["rejection"])
  return {**row, "block_over_rejection": ratio, "standard_error": error}


def tokens_per_call(answers: list[Finished]) -> float:
  """Returns emitted tokens per target call."""
  calls = sum(answer.target_calls for answer in answers)
  return sum(len(answer.tokens) for answer in answers) / calls


def gain(answers: list[Finished], others: list[Finished]) -> tuple[float, float]:
  """Returns the ratio of tokens per call, and its standard error over requests."""

  def influence(found):
    tokens = np.array([len(answer.tokens) for answer in found])
    calls = np.array([answer.target_calls for answer in found])
    return tokens / tokens.sum() - calls / calls.sum()

  ratio = tokens_per_call(answers) / tokens_per_call(others)
  # The delta method, for the logarithm of the ratio.
  spread = np.sum((influence(answers) - influence(others)) ** 2) ** 0.5
  return ratio, float(ratio * spread)


def mean_overlap(pair: pairs.Pair, answers: list[Finished]) -> float:
  """Returns the mean of 1 - TV, after temperature, over all emitted positions."""
  rows = [
    agreement.agreement(pair.draft, pair.draft_params, answer.batch, answer.settings)
    for answer in answers
  ]
  tokens = np.array([len(answer.tokens) for answer in answers])
  rates = np.array([float(row.acceptance_rate[0]) for row in rows])
  return float((tokens * rates).sum() / tokens.sum())


def main() -> None:
  """Serves all rules at every temperature and prints the table."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--count", type=int, default=200)
  parser.add_argument("--repeats", type=int, default=1, help="requests per prompt")
  parser.add_argument("--num_draft_tokens", type=int, help="K")
  parser.add_argument("--temperatures", type=float, nargs="+", default=TEMPERATURES)
  parser.add_argument("--draft", help="weights file (default: shipped draft)")
  args = parser.parse_args()
  config, _ = settings.load(
    evaluate.CertifyConfig,
    ["experiments/certify_shipped.gin"],
    [f"BatchConfig.limit_rows={-(-args.count // 4)}"],
  )
  files = config.pair
  if args.draft:
    files = dataclasses.replace(files, draft=args.draft)
  pair = pairs.load_pair(files, sharding.make(config.partition))
  prompts = read_corpus(config.prompts, pair.vocabulary, args.count) * args.repeats
  decoding = config.decoding
  if args.num_draft_tokens is not None:
    decoding = dataclasses.replace(decoding, num_draft_tokens=args.num_draft_tokens)
  console = rich.console.Console()
  columns = {
    "T": "temperature",
    "rejection": "rejection",
    "law": "rejection_law",
    "block": "block",
    "coupling": "coupling",
    "bound": "coupling_bound",
    "equal": "coupling_equal_to_plain",
    "tokens a call": "rejection_tokens_per_call",
    "block over rejection": "block_over_rejection",
    "+-": "standard_error",
  }
  table = rich.table.Table(*columns)
  for temperature in args.temperatures:
    row = measure(pair, prompts, decoding, config.partition, temperature)
    console.print(json.dumps(row), soft_wrap=True)
    table.add_row(*(f"{row[name]:.3f}" for name in columns.values()))
  console.print(table)


if __name__ == "__main__":
  main()
