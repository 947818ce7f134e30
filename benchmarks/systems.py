"""What serves the stream of `bench_whole_run`: no draft, a frozen one, one that learns.

Each has a server of its own; the target's parameters, as loaded and as served, are
there once for all of them.
"""

import dataclasses
import pathlib
import tempfile
from collections.abc import Mapping, Sequence

import numpy as np

from osd_jax import base, online, pairs, runs, sharding
from osd_jax.data import streams
from osd_jax.engine import engine
from osd_jax.engine.server import Server


class Frozen:
  """Plain decoding, or a draft that stays as it is. Records nothing."""

  def __init__(
    self,
    pair: pairs.Pair,
    config: online.OnlineConfig,
    requests: Sequence[engine.Request],
  ):
    """Compiles what serving needs.

    Args:
      pair: without a draft for plain decoding.
      config: decoding and mesh.
      requests: the stream's.
    """
    unrecorded = dataclasses.replace(config.decoding, record_top_k=0)
    self._server = Server(pair, unrecorded, partition=config.partition)
    self._requests = requests
    self._answers: list[engine.Finished] = []
    self._server.warm_up()

  def serve(self, start: int, stop: int) -> None:
    """Answers these requests of the stream."""
    self._answers += self._server.run(self._requests[start:stop])

  def close(self) -> dict[str, float]:
    """Ends the run; figures of all of it."""
    self._server.close()
    return served(
      [
        {
          "output_tokens": len(done.tokens),
          "target_calls": done.target_calls,
          "drafted": done.drafted,
          "accepted": done.accepted,
        }
        for done in self._answers
      ]
    )


class Learning:
  """An online run: it meters, updates, logs and writes checkpoints."""

  def __init__(
    self, pair: pairs.Pair, config: online.OnlineConfig, folder: pathlib.Path
  ):
    """Loads and compiles, fills the buffer.

    Args:
      pair: as loaded.
      config: the run; measures of the floor draft and comparisons are left out.
      folder: of the run.
    """
    self._directory = runs.RunDirectory.start(folder)
    self._loop = online.OnlineLoop(bare(config, pair, folder), self._directory)

  def serve(self, start: int, stop: int) -> None:
    """Answers requests until so many are finished, and waits for what still runs."""
    del start  # the run knows where it is
    while self._loop.finished < stop and self._loop.step() is not None:
      pass
    self._loop.wait()

  def close(self) -> dict[str, float]:
    """Ends the run; figures of all of it."""
    self._loop.close(self._loop.seconds)
    rows = list(runs.read(self._directory.metrics_path))
    requests = [row for row in rows if row["kind"] == "request"]
    updates = [row for row in rows if row["kind"] == "update"]
    return {
      **served(requests),
      "mean overlap": float(np.mean([row["overlap"] for row in requests])),
      "updates": len(updates),
      "update seconds": sum(row["update_ms"] for row in updates) / 1e3,
      "decode seconds": sum(row["decode_ms"] for row in requests) / 1e3,
      "metering seconds": sum(
        row["metering_ms"] + row["metering_beside_ms"] for row in requests
      )
      / 1e3,
    }


def bare(
  config: online.OnlineConfig, pair: pairs.Pair, folder: pathlib.Path
) -> online.OnlineConfig:
  """The run without what compares it with others."""
  return dataclasses.replace(
    config,
    pair=pair,
    floor_metering=False,
    compare_every=0,
    run_directory=str(folder),
  )


def served(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
  """Tokens, and how the draft did if there is one; `rows` are those of requests."""
  names = ("output_tokens", "target_calls", "drafted", "accepted")
  tokens, calls, drafted, accepted = (sum(row[name] for row in rows) for name in names)
  figures = {"tokens": tokens, "tokens per target call": tokens / calls}
  return figures | ({"draft acceptance": accepted / drafted} if drafted else {})


def rehearse(pair: pairs.Pair, config: online.OnlineConfig) -> None:
  """Compiles what a learning run meets only on its way, in a short run of its own."""
  several = 3 * config.learning.schedule.update_interval + 8
  with tempfile.TemporaryDirectory() as folder:
    short = dataclasses.replace(config, checkpoint_every=8, warm_start=None)
    system = Learning(pair, short, pathlib.Path(folder))
    system.serve(0, several)
    system.close()


def requests_of(config: online.OnlineConfig, pair: pairs.Pair) -> list[engine.Request]:
  """The requests of the stream that a run serves."""
  stream = streams.QueryStream(config.stream, pair.vocabulary)
  return [
    engine.Request(stream[place].tokens, config.sampling.of_request(place))
    for place in range(len(stream))
  ]


def load(configs: Mapping[str, online.OnlineConfig]) -> dict[str, pairs.Pair]:
  """Loads the pair of each kind of draft; all have the first one's target in memory."""
  loaded = {
    kind: pairs.load_pair(config.pair, sharding.make(config.partition))
    for kind, config in configs.items()
  }
  first = next(iter(loaded.values()))
  served = first.target.prepare(first.target_params)
  prepared = {
    model: _with_served(model, first.target_params, served)
    for model in {pair.target for pair in loaded.values()}
  }
  return {
    kind: dataclasses.replace(
      pair, target=prepared[pair.target], target_params=first.target_params
    )
    for kind, pair in loaded.items()
  }


def _with_served(
  model: base.Model, params: base.Params, served: base.Params
) -> base.Model:
  """The model, whose served copy of these parameters is there already.

  Others are prepared as ever, traced ones among them: within a compiled call the copy
  would be a constant.
  """

  def prepare(given: base.Params) -> base.Params:
    return served if given is params else model.prepare(given)

  return dataclasses.replace(model, prepare=prepare)
