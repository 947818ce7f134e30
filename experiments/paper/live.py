"""Serves a set of the paper with a published target: checks the replays, and times.

Every system is a server with one row that answers the first requests of the stream of
seed 0, one after another, in turn with the others. With `--fixed`, every round drafts
the replays' number of tokens, and a line says what a replay of the same requests gives.
Without it, servers draft as many tokens as are worth their time, as by default, and
milliseconds a token are what counts; learning is in them.

  python experiments/paper/live.py --target FOLDER [--set spider] [--requests 1000]
      [--fixed] [--systems plain static "cache + ours"] [other options of run.py]
"""

# ruff: noqa: E402 (the folders were just added)
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Iterator

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import columns
import numpy as np
import run
import sets

from osd_jax.decoding import ngrams
from osd_jax.engine import server
from osd_jax.engine.requests import AdaptiveConfig, DecodingConfig, Request
from osd_tools import replay

SYSTEMS = ("plain", "cache", "static", "ours", "cache + static", "cache + ours")
LIVE = HERE / "live.jsonl"
WARM = 5  # answers of each system before the clock


def serving(systems: columns.Columns, name: str, is_fixed: bool) -> server.Server:
  """Returns a server of a column, compiled."""
  pair, draft = systems.study.pair, name.removeprefix("cache + ")
  decoding = DecodingConfig(
    num_draft_tokens=columns.DRAFTED,
    source_lengths=(sets.SOURCE_LENGTH,),
    target_length=sets.TARGET_LENGTH,
    cache_tokens=replay.CACHE_TOKENS if name.startswith("cache +") else 0,
  )
  learning = None
  if draft == "static":
    pair = dataclasses.replace(pair, draft_params=systems.result("static").params)
  elif draft == "ours":
    learning = systems.learning(columns.OURS)
  elif name == "cache":
    size = replay.CACHE_TOKENS
    pair = pair.with_draft(ngrams.build(pair.target, size), ngrams.empty(size))
  elif name == "plain":
    pair = pair.plain()
  if name != "plain" and not is_fixed:
    decoding = dataclasses.replace(decoding, adaptive=AdaptiveConfig((0, 3, 5)))
  one = server.Server(pair, decoding, learning)
  one.warm_up(learn=learning is not None)
  return one


def answered(one: server.Server, request: Request) -> tuple[int, int, float]:
  """Returns tokens, target calls and seconds of one request; learning is in them."""
  start = time.perf_counter()
  (done,) = one.run([request])
  if one.is_learning:
    one.learn([done])
    one.finish_learning()
  return len(done.tokens), done.target_calls, time.perf_counter() - start


def served(
  names: list[str], systems: columns.Columns, is_fixed: bool
) -> Iterator[tuple[str, np.ndarray]]:
  """Yields the [requests, 3] figures of every system, see `answered`."""
  servers = {name: serving(systems, name, is_fixed) for name in names}
  figures: dict[str, list[tuple[int, int, float]]] = {name: [] for name in names}
  for place, answer in enumerate(systems.answers):
    source = np.asarray(answer.source[0])
    tokens = source[source != systems.study.pair.target.pad_id]
    turn = place % len(names)
    for name in names[turn:] + names[:turn]:
      figures[name].append(answered(servers[name], Request(tokens)))
    if place % 50 == 49:
      print(f"{place + 1} of {len(systems.answers)} requests", flush=True)
  for name, one in servers.items():
    one.close()
    yield name, np.asarray(figures[name])


def main() -> None:
  options = run.parser()
  options.add_argument("--set", choices=sets.PAPER, default="spider")
  options.add_argument("--requests", type=int, default=1000)
  options.add_argument("--fixed", action="store_true")
  options.add_argument("--systems", nargs="*", choices=SYSTEMS, default=list(SYSTEMS))
  options.set_defaults(out=LIVE)
  args = options.parse_args()
  study = run.published(args, args.set)
  systems = columns.Columns(study, 0)
  systems.answers = systems.answers[: args.requests]
  for name, figures in served(args.systems, systems, args.fixed):
    tokens, calls, seconds = figures[WARM:].sum(0)
    line = study.settings | {
      "system": name,
      "requests": args.requests,
      "fixed": args.fixed,
      "tokens_per_call": round(figures[:, 0].sum() / figures[:, 1].sum(), 4),
      "ms_per_token": round(1e3 * seconds / tokens, 3),
    }
    if args.fixed and name != "plain":
      course = systems.result(name).course
      line["replayed"] = round(course.tokens_per_call(columns.DRAFTED), 4)
    with args.out.open("a") as file:
      file.write(f"{json.dumps(line)}\n")
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
  main()
