"""Systems of `bench_whole_run`: plain decoding, a frozen draft, a draft that learns.

Each system has its own server. All share one copy of the target's parameters, both as
loaded and as served.
"""

import dataclasses
import pathlib
import tempfile
from collections.abc import Mapping, Sequence

import numpy as np

from osd_jax import base, online, pairs, runs, sharding
from osd_jax.data import streams
from osd_jax.engine.requests import Finished, Request
from osd_jax.engine.server import Server


class Frozen:
  """Plain decoding, or speculative decoding with a frozen draft; keeps no records."""

  def __init__(
    self,
    pair: pairs.Pair,
    config: online.OnlineConfig,
    requests: Sequence[Request],
  ):
    """Creates the server and compiles its calls.

    Args:
      pair: target and draft; without a draft for plain decoding.
      config: supplies the decoding config and the mesh.
      requests: all requests of the stream.
    """
    unrecorded = dataclasses.replace(config.decoding, record_top_k=0)
    self._server = Server(pair, unrecorded, partition=config.partition)
    self._requests = requests
    self._answers: list[Finished] = []
    self._server.warm_up()

  def serve(self, start: int, stop: int) -> None:
    """Answers requests start..stop - 1 of the stream."""
    self._answers += self._server.run(self._requests[start:stop])

  @property
  def answers(self) -> Sequence[Finished]:
    """The answers so far, in the order of the requests."""
    return self._answers

  def per_request(self) -> list[tuple[int, int]]:
    """Returns tokens and target calls of every answered request."""
    return [(len(answer.tokens), answer.target_calls) for answer in self._answers]

  def close(self) -> dict[str, float]:
    """Ends the run and returns its figures."""
    self._server.close()
    return served(
      [
        {
          "output_tokens": len(answer.tokens),
          "target_calls": answer.target_calls,
          "drafted": answer.drafted,
          "accepted": answer.accepted,
        }
        for answer in self._answers
      ]
    )


class Learning:
  """An online run with metering, updates, logs and checkpoints."""

  def __init__(
    self, pair: pairs.Pair, config: online.OnlineConfig, folder: pathlib.Path
  ):
    """Creates the loop, which compiles its calls and fills the buffer.

    Args:
      pair: loaded target and draft.
      config: config of the run; floor metering and comparisons are switched off.
      folder: run directory.
    """
    self._directory = runs.RunDirectory.start(folder)
    self._loop = online.begin(bare(config, pair, folder), self._directory)

  def serve(self, start: int, stop: int) -> None:
    """Serves until `stop` requests have finished, then waits for running work."""
    del start  # the loop keeps its own position
    while self._loop.finished < stop and self._loop.step() is not None:
      pass
    self._loop.wait()

  def per_request(self) -> list[tuple[int, int]]:
    """Returns tokens and target calls of every answered request; call it after `close`.

    They are in the order of the requests.
    """
    rows = (
      r for r in runs.read(self._directory.metrics_path) if r["kind"] == "request"
    )
    return [
      (row["output_tokens"], row["target_calls"])
      for row in sorted(rows, key=lambda row: row["index"])
    ]

  def close(self) -> dict[str, float]:
    """Ends the run and returns its figures."""
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
  """Returns the config without floor metering and comparisons."""
  return dataclasses.replace(
    config,
    pair=pair,
    floor_metering=False,
    compare_every=0,
    run_directory=str(folder),
  )


def served(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
  """Returns totals over request rows, and draft acceptance if there is a draft."""
  names = ("output_tokens", "target_calls", "drafted", "accepted")
  tokens, calls, drafted, accepted = (sum(row[name] for row in rows) for name in names)
  figures = {"tokens": tokens, "tokens per target call": tokens / calls}
  return figures | ({"draft acceptance": accepted / drafted} if drafted else {})


def rehearse(pair: pairs.Pair, config: online.OnlineConfig) -> None:
  """Compiles what a learning run compiles only after its start, in a short run."""
  several = 3 * config.learning.schedule.update_interval + 8
  with tempfile.TemporaryDirectory() as folder:
    short = dataclasses.replace(config, checkpoint_every=8, warm_start=None)
    system = Learning(pair, short, pathlib.Path(folder))
    system.serve(0, several)
    system.close()


def requests_of(config: online.OnlineConfig, pair: pairs.Pair) -> list[Request]:
  """Returns all requests of a run's stream."""
  stream = streams.QueryStream(config.stream, pair.vocabulary)
  return [
    Request(stream[place].tokens, config.sampling.of_request(place))
    for place in range(len(stream))
  ]


def load(configs: Mapping[str, online.OnlineConfig]) -> dict[str, pairs.Pair]:
  """Loads the pair of each kind of draft; all pairs share the first one's target."""
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
  """Returns a model that already has a served copy of some parameters.

  Other parameters are prepared as usual. This includes traced ones, because inside a
  compiled call the ready copy would become a constant.
  """

  def prepare(given: base.Params) -> base.Params:
    return served if given is params else model.prepare(given)

  return dataclasses.replace(model, prepare=prepare)
