"""Compares two forms of a draft attached to a decoder-only target, on the same rows.

"prompt" is the form of this package: it attends to the target's hidden states of the
prompt and continues from tokens. "states" is EAGLE's form: it also gets the target's
state before each verified token. It is trained on these states only ("1 step"), or also
on its own states within a draft ("3 steps"). Everything else is equal: layer size,
head, embedding, rows, loss (forward KL over all tokens, at every position of an answer)
and optimizer. The target answers held-out prompts; a draft of K tokens starts wherever
the previous one ended.

Serving the form "states" would have further costs: verification returns [B, K + 1, E],
the buffer stores E numbers per token, and a new draft has to process prompts again
after each swap.

  python experiments/draft_forms/run.py [--steps 1500] [--forms "prompt"]
      [--rows 3000 25 3000 25] [--gin_file experiments/llama_attached_draft.gin]
"""

import argparse
import dataclasses
import functools
import json
import time
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich.console
import rich.progress
import rich.table
import states

from osd_jax import base, corpus, offline, pairs, sharding
from osd_jax.data import batches
from osd_jax.distillation import optimizers
from osd_jax.main import settings
from osd_jax.models import attached, families, layers, llama, shapes, weights
from osd_tools import batches as training_batches

K = 7
TURNS = 20
SHOWN = (1, 2, 4, 7)  # drafted tokens


@flax.struct.dataclass
class Rows:
  """Texts with the target's states and distributions.

  Attributes:
    source: [R, S] int32.
    source_mask: [R, S] bool.
    target: [R, T] int32.
    mask: [R, T] bool.
    log_probs: [R, T, V] float32, the target's.
    before: [R, S + T, E] float32, the target's state before each token.
    tokens: [R, S + T] int32, the target's inputs.
    positions: [R, S + T] int32.
    fed: [R, S + T] bool; slots with a token.
    target_states: [R, S, E] bfloat16, the target's hidden states of prompts.
  """

  source: jax.Array
  source_mask: jax.Array
  target: jax.Array
  mask: jax.Array
  log_probs: jax.Array
  before: jax.Array
  tokens: jax.Array
  positions: jax.Array
  fed: jax.Array
  target_states: jax.Array


@dataclasses.dataclass(frozen=True)
class Form:
  """A draft of one form.

  Attributes:
    init: (key) -> parameters.
    logits: (parameters, rows, steps) -> [R, T, V] for each step of a draft.
    taught: number of steps of a draft in the loss.
    optimizer: the optimizer.
  """

  init: Callable[[jax.Array], Any]
  logits: Callable[[Any, Rows, int], list[jax.Array]]
  taught: int
  optimizer: optax.GradientTransformation


class Judge:
  """The target, which provides what drafts learn."""

  def __init__(self, kept: weights.Weights, pad_id: int):
    """Raises InputError unless the target is decoder-only."""
    if not isinstance(kept.config, shapes.LlamaConfig):
      raise base.InputError(
        f"draft_forms: received a target of kind {type(kept.config).__name__}, expected"
        " a decoder-only one; name its run by --gin_file."
      )
    self.config, self.params, self._pad_id = kept.config, kept.params, pad_id
    self.frozen = attached.frozen_of(kept.config, kept.params)

  @functools.partial(jax.jit, static_argnums=0)
  def rows(self, source: jax.Array, target: jax.Array) -> Rows:
    """Rows of texts [R, S], [R, T]."""
    mask = source != self._pad_id
    module, length = llama.Llama(self.config), source.shape[1]
    tokens, positions, text_mask, outputs = module.apply(
      {"params": self.params}, source, mask, target, method=_all_states
    )
    # The last token of a prompt is the first decoder input, so the state before it is
    # that of the token before.
    last = length - 1 - jnp.argmax(text_mask[:, :length][:, ::-1], axis=1)
    end = jnp.take_along_axis(outputs, last[:, None, None], axis=1)
    before = states.later(outputs, 1)
    before = jnp.concatenate([before[:, :length], end, before[:, length + 1 :]], axis=1)
    return Rows(
      source=source,
      source_mask=mask,
      target=target,
      mask=target != self._pad_id,
      log_probs=jax.nn.log_softmax(self.logits(outputs[:, length:])),
      before=before,
      tokens=tokens,
      positions=positions,
      fed=text_mask,
      target_states=families.encode_for_draft(
        self.config, self.frozen["encoder"], source, mask
      ),
    )

  def logits(self, found: jax.Array) -> jax.Array:
    """Logits [R, T, V] of states [R, T, E]."""
    return found * self.config.head_scale @ self.frozen["head"].T


def _all_states(module: llama.Llama, source, mask, target):
  """The inputs of `Llama.score`, and the states after the last norm."""
  inputs = layers.inputs_of(target, llama.last_token(source, mask))
  source_mask = llama.without_last(mask)
  after = jnp.sum(source_mask, axis=1, dtype=jnp.int32)[:, None] + jnp.arange(
    inputs.shape[1]
  )
  tokens = jnp.concatenate([source, inputs], axis=1)
  positions = jnp.concatenate([llama.prompt_positions(mask), after], axis=1)
  text_mask = jnp.concatenate([source_mask, jnp.ones(inputs.shape, bool)], axis=1)
  embedded = module.token_embedder(tokens)
  outputs, _ = module.decoder.over(embedded, text_mask, positions)
  return tokens, positions, text_mask, module.decoder.decoder_norm(outputs[-1])


def forms(judge: Judge, config: optimizers.OptimizerConfig) -> dict[str, Form]:
  """All forms by name."""
  shape = attached.AttachedConfig()
  ours = attached.build(shape, judge.config)

  def by_prompt(params, rows: Rows, steps: int):
    whole = ours.join(params, judge.frozen)
    text = (rows.source, rows.source_mask, rows.target)
    # Its output depends on tokens only, so it is the same at every step of a draft.
    return [ours.score(whole, *text, target_states=rows.target_states)] * steps

  theirs = states.States(
    judge.config.width, shape.width, shape.num_heads, shape.head_dim, shape.mlp_dim
  )

  def by_states(params, rows: Rows, steps: int):
    embedded = judge.frozen["embedding"][rows.tokens]
    arguments = (embedded, rows.before, rows.positions, rows.fed)
    first = rows.source.shape[1]
    outputs = theirs.apply({"params": params}, *arguments, first, steps)
    return [judge.logits(state) for state in outputs]

  def init_states(key):
    wide = jnp.zeros((1, 2, judge.config.width))
    places = jnp.zeros((1, 2), jnp.int32)
    return theirs.init(key, wide, wide, places, places == 0, 1, 1)["params"]

  scaled = dataclasses.replace(config, query_multiplier=1.0)
  make = optimizers.make_optimizer
  return {
    "prompt": Form(ours.init, by_prompt, 1, make(config)),
    "states, taught 1 step": Form(init_states, by_states, 1, make(scaled)),
    "states, taught 3 steps": Form(init_states, by_states, 3, make(scaled)),
  }


def places(mask: jax.Array, step: int) -> jax.Array:
  """[R, T] bool; positions that a step of a draft, counted from 0, can reach."""
  return mask & (jnp.arange(mask.shape[1]) >= step)[None]


@functools.partial(jax.jit, static_argnums=0)
def learn(form: Form, params, state, rows: Rows):
  """One optimizer step; returns loss, parameters and state."""

  def loss(params):
    total = count = 0.0
    for step, logits in enumerate(form.logits(params, rows, form.taught)):
      ratio = rows.log_probs - jax.nn.log_softmax(logits)
      divergence = jnp.sum(jnp.exp(rows.log_probs) * ratio, axis=-1)
      where = places(rows.mask, step)
      total += jnp.sum(jnp.where(where, divergence, 0.0))
      count += jnp.sum(where)
    return total / count

  value, gradient = jax.value_and_grad(loss)(params)
  changes, state = form.optimizer.update(gradient, state, params)
  return value, optax.apply_updates(params, changes), state


@functools.partial(jax.jit, static_argnums=0)
def judged(form: Form, params, rows: Rows):
  """Overlap and whether the greedy token is right, [K, R, T] each."""
  logits = jnp.stack(form.logits(params, rows, K))
  probs = jax.nn.softmax(logits)
  overlap = jnp.sum(jnp.minimum(probs, jnp.exp(rows.log_probs)), axis=-1)
  return overlap, jnp.argmax(logits, axis=-1) == rows.target


def calls_of(right: np.ndarray, length: int) -> int:
  """Number of verifications for an answer, if `right` [K, T] tokens are accepted."""
  place = calls = 0
  while place < length:
    run = 0
    while run < K and place + run < length and right[run, place + run]:
      run += 1
    place, calls = place + run + 1, calls + 1
  return calls


def figures(form: Form, params, rows: Rows) -> dict[str, float]:
  """Overlap per drafted token, and tokens per target call."""
  overlap, right = map(np.asarray, judged(form, params, rows))
  mask = np.asarray(rows.mask)
  overlaps = {}
  for step in SHOWN:
    where = np.asarray(places(rows.mask, step - 1))
    overlaps[f"overlap, token {step}"] = float(overlap[step - 1][where].mean())
  lengths = mask.sum(axis=1)
  calls = [calls_of(right[:, row], length) for row, length in enumerate(lengths)]
  overlaps["tokens a call"] = float(lengths.sum() / np.sum(calls))
  return overlaps


def answered(pair: pairs.Pair, config: offline.OfflineConfig, judge: Judge) -> Rows:
  """Held-out prompts with the target's own answers."""
  prompts = batches.read_corpus(config.evaluation, pair.vocabulary)
  server = corpus.plain_server(pair, config.decoding, config.partition)
  answers = server.run(corpus.requests(prompts, config.sampling))
  length, pad_id = config.decoding.target_length, pair.vocabulary.pad_id
  source = np.full((len(answers), config.evaluation.source_length), pad_id, np.int32)
  target = np.full((len(answers), length), pad_id, np.int32)
  for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
    source[row, : len(prompt.tokens)] = prompt.tokens
    target[row, : len(answer.tokens)] = answer.tokens
  return judge.rows(source, target)


def taught(
  form: Form, stream: training_batches.BatchStream, judge: Judge, steps: int, bar
) -> tuple[Any, Any]:
  """Parameters and optimizer state after training on a corpus."""
  params = form.init(jax.random.key(0))
  state = form.optimizer.init(params)
  for step in bar:
    batch = stream[step]
    loss, params, state = learn(
      form, params, state, judge.rows(batch.source, batch.target)
    )
    if not np.isfinite(loss):
      raise FloatingPointError(f"step {step}: the loss is {loss}")
  return params, state


def step_ms(
  made: dict[str, Form], ends: dict[str, Any], rows: Rows
) -> dict[str, float]:
  """Median CPU milliseconds of an optimizer step; the forms take turns."""
  times: dict[str, list[float]] = {name: [] for name in made}
  for _ in range(TURNS):
    for name, form in made.items():
      started = time.process_time()
      jax.block_until_ready(learn(form, *ends[name], rows))
      times[name].append((time.process_time() - started) * 1e3)
  return {name: float(np.median(spent[1:])) for name, spent in times.items()}


def chosen(made: dict[str, Form], names: list[str] | None) -> dict[str, Form]:
  """The forms with these names; None means all."""
  unknown = set(names or ()) - made.keys()
  if unknown:
    raise base.InputError(
      f"--forms: received {sorted(unknown)}, expected some of {list(made)}."
    )
  return {name: form for name, form in made.items() if names is None or name in names}


def main() -> None:
  """Trains every form and prints a table."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--gin_file", default="experiments/llama_attached_draft.gin")
  parser.add_argument("--steps", type=int, default=1500)
  parser.add_argument("--rows", type=int, nargs=4, default=[3000, 25, 3000, 25])
  parser.add_argument("--forms", nargs="+", help="some of them, by name")
  args = parser.parse_args()
  bindings = [
    f"warm_start/BatchConfig.limit_rows={tuple(args.rows)}",
    f"OptimizerConfig.total_steps={args.steps}",
  ]
  config, _ = settings.load(offline.OfflineConfig, [args.gin_file], bindings)
  pair = pairs.load_pair(config.pair, sharding.make(config.partition))
  judge = Judge(weights.load(config.pair.target), pair.vocabulary.pad_id)
  update = config.update
  size = dataclasses.replace(
    config.corpus, batch_size=update.num_new + update.num_replay
  )
  stream = training_batches.BatchStream(size, pair.vocabulary)
  held_out = answered(pair, config, judge)
  by_name = chosen(forms(judge, update.optimizer), args.forms)
  ends, rows_of = {}, {}
  console = rich.console.Console(stderr=True)
  for name, form in by_name.items():
    bar = rich.progress.track(range(args.steps), name, console=console)
    ends[name] = taught(form, stream, judge, args.steps, bar)
    count = sum(leaf.size for leaf in jax.tree.leaves(ends[name][0]))
    rows_of[name] = {"parameters": count, **figures(form, ends[name][0], held_out)}
  rows = judge.rows(stream[0].source, stream[0].target)
  for name, spent in step_ms(by_name, ends, rows).items():
    rows_of[name]["ms a step of 16 rows"] = spent
  table = rich.table.Table("form", *next(iter(rows_of.values())))
  for name, row in rows_of.items():
    print(json.dumps({"form": name, "rows": args.rows, **row}))
    table.add_row(name, *(f"{value:,.4g}" for value in row.values()))
  console.print(table)


if __name__ == "__main__":
  main()
