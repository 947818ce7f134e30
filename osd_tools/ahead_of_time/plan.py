"""Shapes and shardings of the arguments of a run's programs."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from osd_jax import base, native, online, pairs
from osd_jax import sharding as partitioning
from osd_jax.decoding.rounds import DecodeSpec
from osd_jax.distillation import buffer as buffer_lib
from osd_jax.distillation import update
from osd_jax.engine import steps
from osd_jax.models import attached, eagle, families, served, tensors
from osd_jax.models.families import ModelConfig
from osd_jax.models.shapes import EXACT_SERVING, AttachedConfig, EagleConfig
from osd_tools import chips, sizes


class Plan:
  """Shapes and shardings of everything that the programs of a run take.

  Attributes:
    run: the run that is compiled.
    topology: the machine to compile for.
    partitioner: mesh of the machine's chips.
    target: functions of the target.
    target_params: parameters of the target as they are loaded.
    draft: functions of the draft.
    draft_params: trained parameters of the draft.
    frozen: parameters that an attached draft shares with the target; None for others.
    served: copies of the parameters that steps read.
    draft_served: the draft's copy alone, if it is mixed with an n-gram cache.
    program: what is compiled into every call.
    state: rows in flight.
    learner: the learner's state.
    buffer: the replay buffer.
  """

  def __init__(
    self, run: online.OnlineConfig, topology: chips.Topology, layers: int = 0
  ):
    """Finds the shapes, without loading any weights.

    Args:
      run: a run whose pair is a `PairConfig`.
      topology: the machine to compile for.
      layers: number of layers that both models are cut to; 0 keeps all.

    Raises:
      InputError: the topology has no compiler or too few chips, or a model's shape is
        unknown.
    """
    self.run, self.topology = run, topology
    pair, decoding = run.pair, run.decoding
    assert isinstance(pair, pairs.PairConfig)
    # The devices are descriptions. Shapes get shardings on them, but no array exists.
    self.partitioner = partitioning.over(run.partition, topology.devices())
    target, draft = _shapes(pair, layers)
    is_attached = isinstance(draft, AttachedConfig | EagleConfig)
    states = draft.reads if isinstance(draft, AttachedConfig | EagleConfig) else ""
    serving = pair.draft_serving
    # The layouts of the C++ kernels do not apply to other machines.
    self.is_split = self.partitioner.mesh.size > 1
    with native.portable(self.is_split):
      has_file = not _needs_no_weights(pair, "target")
      short = pairs.bfloat16_of(pair) if has_file else frozenset()
      trained, layout = families.build(target), EXACT_SERVING.layout
      shardings = self.partitioner.params(trained)
      params = _loaded(trained, shardings, pair.dtype, short)
      # As `pairs.load_pair`: the target is kept once, as it is served.
      self.target = families.build(target, "target", states=states, kept=layout)
      prepare = functools.partial(served.prepare, target, EXACT_SERVING)
      self.target_params = _result(prepare, params)
      if isinstance(draft, AttachedConfig | EagleConfig):
        self.draft = attached.build(draft, target, "attached draft", serving, layout)
      else:
        self.draft = families.build(draft, "draft", serving)
      shardings = self.partitioner.params(self.draft)
      if self.partitioner.is_whole(self.draft):
        shardings = jax.tree.map(lambda _: self.partitioner.replicated, shardings)
      self.draft_params = _loaded(self.draft, shardings)
      self.frozen = None
      if is_attached:
        frozen_of = functools.partial(
          attached.frozen_of, target, serving=serving, kept=layout
        )
        if isinstance(draft, EagleConfig):
          ids = eagle.first_ids(draft, target.eos_ids)
          own = {} if ids is None else {"ids": ids}
          frozen_of = functools.partial(eagle.frozen_of, draft, target, own=own)
        self.frozen = _result(frozen_of, self.target_params)
      whole = self.draft.join(self.draft_params, self.frozen)
      # As `Engine`, for which one device is no mesh.
      split = self.partitioner if self.is_split else None
      spec = decoding.spec(self.target, self.draft, split)
      self.spec = dataclasses.replace(spec, partitioner=self.partitioner)
      self.draft_served = _result(self.draft.prepare, whole)
      self.served = steps.Served(
        _result(self.target.prepare, self.target_params), self._with_memory()
      )
      self.state = self._state(self.spec, self.served)
      self.learner, self.buffer = self._learning()

  def memory(self) -> dict[str, float]:
    """Returns gigabytes per chip by purpose, without temporaries."""
    sizes = {
      "target, as loaded": self.target_params,
      "target, copies for steps": _copies(
        self.target.prepare, self.target_params, self.is_split
      ),
      "draft, as loaded": (self.draft_params, self.frozen and self.frozen.get("head")),
      "draft, copies for steps": self.draft_served,
      "caches and rows": self.state,
    }
    if self.run.learn:
      sizes["optimiser and average"] = self.learner.replace(params=None)
      sizes["replay buffer"] = self.buffer
    return {name: bytes_of(tree) / 1e9 for name, tree in sizes.items()}

  def _with_memory(self) -> Any:
    """Returns the shapes of the drafter's parameters, with an n-gram cache if any."""
    drafter = self.spec.drafter
    assert drafter is not None
    memory = jax.tree.map(
      lambda leaf: self.everywhere(leaf.shape, leaf.dtype),
      jax.eval_shape(drafter.memory),
    )
    return drafter.with_memory(self.draft_served, memory)

  def _state(self, spec: DecodeSpec, served: steps.Served) -> Any:
    bucket = self.run.decoding.source_lengths[-1]
    state = jax.eval_shape(lambda s: steps.empty(spec, s, bucket), served)
    return jax.tree.map(_at, state, spec.shardings(state))

  def _learning(self) -> tuple[Any, Any]:
    """Returns the shapes of the learner's state and of the buffer."""
    decoding = self.run.decoding
    config, everywhere = self.run.learning, self.partitioner.replicated
    state = jax.eval_shape(
      lambda params: update.init_learner(config.update, params),
      jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.draft_params),
    )
    places = {
      jax.tree_util.keystr(path): leaf.sharding
      for path, leaf in jax.tree_util.tree_leaves_with_path(self.draft_params)
    }

    def place(path, leaf):  # moments and averages are sharded like their parameter
      name = jax.tree_util.keystr(path)
      places_found = [at for end, at in places.items() if name.endswith(end)]
      return _at(leaf, places_found[0] if places_found else everywhere)

    learner = jax.tree_util.tree_map_with_path(place, state)
    width = self.draft.state_width if config.buffer.keep_target_states else 0
    buffer = jax.eval_shape(
      lambda: buffer_lib.init(
        config.buffer,
        decoding.source_lengths[-1],
        decoding.target_length,
        decoding.record_top_k,
        self.target.vocab_size,
        width,
        self.draft.state_width if self.draft.reads_tokens else 0,
      )
    )
    return learner, jax.tree.map(lambda leaf: _at(leaf, everywhere), buffer)

  def everywhere(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape of an array that every chip holds completely."""
    return _at(jax.ShapeDtypeStruct(shape, dtype), self.partitioner.replicated)

  def batch(self, rows: int) -> base.DistillationBatch:
    """Returns the shapes of a batch of rows from the buffer."""
    return jax.tree.map(
      lambda leaf: self.everywhere((rows, *leaf.shape[1:]), leaf.dtype),
      self.buffer.data,
    )

  def scalar(self) -> jax.ShapeDtypeStruct:
    """Returns the shape of an integer."""
    return self.everywhere((), jnp.int32)


def _shapes(
  pair: pairs.PairConfig, layers: int
) -> tuple[ModelConfig, ModelConfig | AttachedConfig | EagleConfig]:
  """Returns the shapes of target and draft, by name or from their weights."""
  target, draft = _shape(pair, "target", layers), _shape(pair, "draft", layers)
  assert not isinstance(target, AttachedConfig | EagleConfig)
  if not layers:
    target = pairs.with_state_layer(pair, target)
  has_own_ids = not isinstance(draft, AttachedConfig | EagleConfig)
  if has_own_ids and target.vocab_size != draft.vocab_size:
    raise base.InputError(
      f"PairConfig: target {pair.target} has {target.vocab_size} token ids, draft"
      f" {pair.draft} has {draft.vocab_size}; expected the same number. Choose a draft"
      " of the target's vocabulary."
    )
  return target, draft


def _shape(
  pair: pairs.PairConfig, field: str, layers: int
) -> ModelConfig | AttachedConfig | EagleConfig:
  """Returns the shape of "target" or "draft"."""
  value = pair.named(field)
  if field == "draft" and value == pairs.CACHE:
    raise base.InputError(
      "PairConfig.draft: received 'cache', expected a draft with weights: the n-gram"
      " cache cannot be compiled ahead of time."
    )
  if field == "draft" and value == pairs.ATTACHED:
    return pair.attached
  if _needs_no_weights(pair, field):
    shape = sizes.size(Path(value).name)
  else:
    shape = pairs.shape_of(pair, field)
  if isinstance(shape, EagleConfig) and layers:
    cut = tuple(min(number, layers) for number in shape.state_layers)
    return dataclasses.replace(shape, state_layers=cut)
  if isinstance(shape, AttachedConfig | EagleConfig):
    return shape
  shape = dataclasses.replace(shape, dtype=pair.dtype)
  if not layers:
    return shape
  names = {field.name for field in dataclasses.fields(shape)}
  depths = names & {"num_layers", "num_encoder_layers", "num_decoder_layers"}
  return dataclasses.replace(shape, **dict.fromkeys(depths, layers))


def _needs_no_weights(pair: pairs.PairConfig, field: str) -> bool:
  """Whether a path ends in the name of a published model and does not exist."""
  path = Path(pair.folder) / pair.named(field)
  return path.name in sizes.SIZES and not path.exists()


def _loaded(
  model: base.Model,
  shardings: Any,
  dtype: str = "float32",
  short: frozenset[str] = frozenset(),
) -> base.Params:
  """Returns the shapes of a model's parameters as they are loaded.

  Those whose path is in `short` are in bfloat16, whatever the `dtype`.
  """
  flat = tensors.flat(jax.eval_shape(model.init, jax.random.key(0)))
  typed = {
    path: jax.ShapeDtypeStruct(x.shape, "bfloat16" if path in short else dtype)
    for path, x in flat.items()
  }
  params = flax.traverse_util.unflatten_dict(typed, sep="/")
  return jax.tree.map(_at, params, shardings)


def _at(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _result(function: Callable[..., Any], *arguments: Any) -> Any:
  """Returns the shapes of a function's result, with the compiler's shardings.

  Raises:
    InputError: arguments and result do not fit into the memory of a chip.
  """
  shapes = jax.eval_shape(function, *arguments)
  sharding = jax.tree.leaves(arguments)[0].sharding
  if len(sharding.device_set) == 1:  # a single device
    return jax.tree.map(lambda leaf: _at(leaf, sharding), shapes)
  try:
    # Only XLA knows how it shards a result, so the function is compiled for it.
    places = jax.jit(function).lower(*arguments).compile().output_shardings
  except jax.errors.JaxRuntimeError as error:
    message = str(error).splitlines()[0]
    if "RESOURCE_EXHAUSTED" not in message:
      raise
    raise base.InputError(
      f"compile: the weights do not fit ({message.partition(': ')[2]}) Raise"
      " PartitionConfig.model, or choose a chip with more memory."
    ) from None
  return jax.tree.map(_at, shapes, places)


def _copies(
  prepare: Callable[..., Any], params: base.Params, is_split: bool
) -> list[Any]:
  """Returns the arrays of a served copy that are not the parameters themselves."""
  with native.portable(is_split):
    result = _result(prepare, params)
    jaxpr = jax.make_jaxpr(prepare)(params).jaxpr
  inputs = set(jaxpr.invars)
  leaves = zip(jax.tree.leaves(result), jaxpr.outvars, strict=True)
  # An output variable that is also an input needs no memory of its own.
  return [leaf for leaf, out in leaves if out not in inputs]


def bytes_of(tree: Any) -> int:
  """Returns the bytes of a tree on one chip."""
  return sum(
    int(np.prod(leaf.sharding.shard_shape(leaf.shape), dtype=np.int64))
    * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(tree)
  )
