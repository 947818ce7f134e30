"""The loop of algorithm 1 in one compiled call: propose, verify, accept, append.

    text so far     t0 t1 t2                      (t2 was not read by the target yet)
    propose         d0 d1 d2                      K = 3 draft steps
    verify          rows after t2 d0 d1 d2        one target call, K + 1 rows
    accept          d0 d1 | r                     d2 is rejected, r drawn from row 2
    append          t0 t1 t2 d0 d1 r              caches rewound to what was emitted

K = 0 is plain decoding: the same round with an empty proposal.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from osd_jax import base, native
from osd_jax.decoding import accept as accept_lib
from osd_jax.decoding import drafters, mixed, records
from osd_jax.decoding import state as state_lib

# Small fields that the host reads after every call, and the settings, which every draft
# step reads. On a mesh every device holds them whole.
_READ_BY_HOST = ("tokens", "length", "stop_reason", "settings", "counters")


@dataclasses.dataclass(frozen=True)
class DecodeSpec:
  """The static description of decoding: every compiled call takes one.

  Two specs that compare equal share their compiled calls. K, the bucket of prompt
  lengths and the number of rounds are arguments of the calls themselves.

  Attributes:
    target: the target model.
    drafter: how tokens are drafted; None for plain decoding only.
    rows: B, requests in flight.
    target_length: T, the upper limit of every request's length limit.
    record_top_k: k, entries kept of every target distribution; 0 records nothing.
    rule: acceptance rule, a key of `accept.RULES` or a rule of your own.
    partitioner: a `sharding.Partitioner`; None for one device.
    widths: numbers of drafted tokens that a verification may have, ascending to K. Each
      round drafts as many tokens as are worth their price, and takes the smallest width
      that holds them. () drafts K tokens in every round.
    prefill_rows: prompts that a call prefills, unless a mesh splits the rows; a divisor
      of `rows`.
    prefill_chunk: tokens of each prompt that a call reads at most; 0: any number.
    all_greedy: no row samples or has a penalty; see `for_rows`.
  """

  target: base.Model
  drafter: drafters.ModelDrafter | None = None
  rows: int = 1
  target_length: int = 96
  record_top_k: int = 0
  rule: str | accept_lib.Rule = "rejection"
  partitioner: Any = None
  widths: tuple[int, ...] = ()
  prefill_rows: int = 1
  prefill_chunk: int = 0
  all_greedy: bool = False

  @classmethod
  def of(
    cls,
    target: base.Model,
    draft: base.Model | None = None,
    partitioner: Any = None,
    cache_tokens: int = 0,
    widths: tuple[int, ...] = (),
    **settings: Any,
  ) -> "DecodeSpec":
    """Returns the spec of a pair of models.

    Args:
      target: the target model.
      draft: the draft model; None decodes plainly.
      partitioner: a `sharding.Partitioner`; None for one device.
      cache_tokens: tokens of served answers in an n-gram cache that is mixed with a
        trained draft; 0 for no cache.
      widths: numbers of drafted tokens, for drafters that can say what a token is
        worth; others ignore it.
      settings: the other fields.
    """
    drafter = None
    if draft is not None:
      # The head of an attached draft is the target's, which stays split.
      whole = (
        partitioner is not None and not draft.frozen and partitioner.is_whole(draft)
      )
      drafter = drafters.ModelDrafter(draft, whole)
      if cache_tokens or draft.absorb is not None:
        # On a mesh a loop that ends by the rows' survival would need communication.
        widths = widths if partitioner is None else ()
        drafter = mixed.drafter(draft, whole, target, cache_tokens, widths)
    if not isinstance(drafter, mixed.NgramDrafter):
      widths = ()
    return cls(target, drafter, partitioner=partitioner, widths=widths, **settings)

  @property
  def draft(self) -> base.Model | None:
    """The draft model, or None for plain decoding."""
    return None if self.drafter is None else self.drafter.model

  @property
  def resting(self) -> "DecodeSpec":
    """Decoding while the draft rests: by a mixture's cache alone, or plain.

    A mixture needs `widths`: otherwise a round would verify K tokens in any case.
    """
    drafter = None
    if isinstance(self.drafter, mixed.Mixture):
      drafter = self.drafter.resting() if self.widths else None
    return dataclasses.replace(self, drafter=drafter)

  def for_rows(self, is_sampled: bool) -> "DecodeSpec":
    """Leaves sampling and penalties out of the program if no row needs them.

    Not on a CPU, where a branch costs less than compiling two programs.
    """
    return self if native.forms() or is_sampled else self.greedy

  @property
  def greedy(self) -> "DecodeSpec":
    """Decoding of greedy rows that have no penalty."""
    return dataclasses.replace(self, all_greedy=True)

  @property
  def is_split(self) -> bool:
    """Whether a mesh splits the rows."""
    return self.partitioner is not None and self.partitioner.parts(self.rows) > 1

  @property
  def parts(self) -> int:
    """Number of parts of the rows; each part prefills its own prompt."""
    return self.partitioner.parts(self.rows) if self.is_split else self.prefill_rows

  def by_part(self, function: Callable[..., Any], *trees: Any) -> Any:
    """Applies a function of [rows, ...] leaves to each part, inside jit."""
    if self.parts == 1:
      return function(*trees)
    if self.is_split:
      return self.partitioner.by_part(function, *trees)
    parted = lambda leaf: leaf.reshape(self.parts, -1, *leaf.shape[1:])
    parts = jax.vmap(function)(*jax.tree.map(parted, trees))
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), parts)

  def place(self, state: state_lib.DecodeState) -> state_lib.DecodeState:
    """Constrains the rows to their shardings, inside jit."""
    if self.partitioner is None:
      return state
    return jax.lax.with_sharding_constraint(state, self.shardings(state))

  def shardings(self, state: state_lib.DecodeState) -> state_lib.DecodeState:
    """Returns the shardings of the rows; needs a partitioner."""
    rows = self.partitioner.of_rows(state.replace(draft_cache=None))
    read = {name: getattr(state, name) for name in _READ_BY_HOST}
    return rows.replace(
      draft_cache=self.partitioner.of_draft_rows(self.draft, state.draft_cache),
      **jax.tree.map(lambda _: self.partitioner.replicated, read),
    )

  def replicate(self, tree: Any) -> Any:
    """Keeps small arrays whole on every device, inside jit."""
    if self.partitioner is None:
      return tree
    return jax.lax.with_sharding_constraint(tree, self.partitioner.replicated)

  @contextlib.contextmanager
  def traced(self) -> Iterator[None]:
    """Context in which models and rounds are traced.

    XLA cannot split a foreign call: on a mesh it would gather every kernel and cache
    for it. So the native products are off there.
    """
    if self.partitioner is None:
      yield
      return
    mesh = self.partitioner.mesh.abstract_mesh
    with native.portable(mesh.size > 1), jax.sharding.use_abstract_mesh(mesh):
      yield


def run_rounds(
  spec: DecodeSpec,
  num_draft_tokens: int,
  target_served: base.Params,
  draft_served: base.Params,
  max_rounds: jax.Array,
  state: state_lib.DecodeState,
  prices: jax.Array | None = None,
) -> state_lib.DecodeState:
  """Runs rounds until any running row stops or `max_rounds` have passed.

  Nothing is read back to the host inside. New settings, requests or draft parameters
  compile nothing.

  Args:
    spec: static description of decoding; rows that are all greedy may have their own.
    num_draft_tokens: K in 0..16 (static); 0 decodes plainly.
    target_served: prepared parameters of the target.
    draft_served: prepared parameters of the draft; not read if K is 0.
    max_rounds: [] int32, an array so that changing it compiles nothing.
    state: rows in flight; stopped and empty rows stay unchanged.
    prices: [K] float32, see `ModelDrafter.propose`; only if `spec.widths` is not empty.

  Returns:
    The rows after the last round.
  """
  running_at_start = state.stop_reason == base.StopReason.RUNNING
  settings = state.settings
  state = state.replace(settings=settings.replace(all_greedy=spec.all_greedy))
  idle_cache = state.draft_cache
  if not num_draft_tokens:
    # A loop copies the values that it carries, so an unused cache stays outside.
    state = state.replace(draft_cache=None)

  def continues(carry):
    count, state = carry
    running = state.stop_reason == base.StopReason.RUNNING
    # As soon as one row stops, the host can give its place to a waiting request.
    none_stopped = jnp.any(running) & jnp.all(running == running_at_start)
    return none_stopped & (count < max_rounds)

  def body(carry):
    count, state = carry
    state = one_round(
      spec, num_draft_tokens, target_served, draft_served, state, prices
    )
    return count + 1, state

  _, state = jax.lax.while_loop(continues, body, (jnp.int32(0), state))
  if not num_draft_tokens:
    state = state.replace(draft_cache=idle_cache)
  return state.replace(settings=settings)


def one_round(
  spec: DecodeSpec,
  num_draft_tokens: int,
  target_served: base.Params,
  draft_served: base.Params,
  state: state_lib.DecodeState,
  prices: jax.Array | None = None,
) -> state_lib.DecodeState:
  """Runs one round of algorithm 1, lines 4 to 14; stopped rows do not change."""
  drafter, draft_cache = spec.drafter, state.draft_cache
  if not num_draft_tokens:
    drafter = None
  if drafter is not None:
    rule, settings = accept_lib.resolve(spec.rule), state.settings
    if rule.noise_per_round:
      seed = accept_lib.round_seed(settings.seed, state.length)
      settings = settings.replace(seed=seed)
    propose = functools.partial(
      drafter.propose,
      draft_served,
      draft_cache,
      state.replace(settings=settings),
      num_draft_tokens,
      rule.draft_noise,
    )
    proposal, draft_cache = propose() if prices is None else propose(prices=prices)
    proposal = proposal.only_where(state.settings.speculative)
  else:
    proposal = _empty_proposal(spec.target, state)
  judgement, target_cache = judge(spec, target_served, state, proposal)
  state = state.replace(target_cache=target_cache, draft_cache=draft_cache)
  state = state_lib.append(state, judgement, proposal, spec.target.eos_ids)
  if drafter is not None:
    # After `append`, because the drafter rewinds to what was emitted.
    state = state.replace(draft_cache=drafter.observe(state.draft_cache, state))
  return state


def judge(
  spec: DecodeSpec,
  served: base.Params,
  state: state_lib.DecodeState,
  proposal: base.Proposal,
) -> tuple[state_lib.Judgement, Any]:
  """Verifies a proposal and accepts a prefix of it.

  With `spec.widths` only as many tokens are judged as the smallest width that holds
  every row's proposal: the logits of each take time, and those of sampled rows most.

  Returns:
    The judgement of K + 1 tokens, and the target's cache, which has read them.
  """
  num_draft_tokens = proposal.tokens.shape[1]

  def judged(width, cache):
    part = proposal.first(width)
    inputs = inputs_of(state, part)
    verification, cache = verify(spec.target, served, cache, *inputs)
    # `state.length` is that of the round's start: the draws of a token depend on its
    # absolute position.
    acceptance = accept_lib.accept(
      part, verification, state.settings, state.length, spec.rule, state.text
    )
    row_records = None
    if state.records is not None:
      row_records = records.from_logits(
        verification.logits, state.records.ids.shape[-1]
      )
    judgement = state_lib.Judgement.of(acceptance, verification, row_records)
    return judgement.padded(num_draft_tokens + 1), cache

  if proposal.lengths is None or not spec.widths or not num_draft_tokens:
    return judged(num_draft_tokens, state.target_cache)
  widths, cache = (0, *spec.widths), state.target_cache
  smallest = jnp.sum(jnp.max(proposal.lengths) > jnp.asarray(widths))
  shapes = jax.eval_shape(lambda: judged(widths[-1], cache)[0])
  judgement = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
  for index, width in enumerate(widths):
    # A loop that runs once or not at all. XLA writes into what a loop carries, but
    # would copy the cache into and out of each branch of a `switch`.
    _, judgement, cache = jax.lax.while_loop(
      lambda carry: carry[0],
      lambda carry, width=width: (jnp.zeros((), bool), *judged(width, carry[2])),
      (smallest == index, judgement, cache),
    )
  return judgement, cache


def inputs_of(
  state: state_lib.DecodeState, proposal: base.Proposal
) -> tuple[jax.Array, base.Proposal]:
  """The last tokens [B] and the proposal; `base.NO_TOKEN` marks empty places.

  That is in rows that do not run, and after a short proposal. Models skip these inputs
  where that saves time; their logits are never used.
  """
  running = state.stop_reason == base.StopReason.RUNNING
  is_token = running[:, None] & proposal.is_proposed
  return jnp.where(running, state.last_token, base.NO_TOKEN), proposal.replace(
    tokens=jnp.where(is_token, proposal.tokens, base.NO_TOKEN)
  )


def verify(
  target: base.Model,
  served: base.Params,
  cache: Any,
  last_token: jax.Array,
  proposal: base.Proposal,
) -> tuple[base.Verification, Any]:
  """Scores last_token and the K drafted tokens in one call (algorithm 1, "verify").

  Args:
    target: the target, as pure functions (static).
    served: prepared parameters of the target.
    cache: its cache, of length c per row.
    last_token: [B] int32, emitted but not yet fed; NO_TOKEN in rows that do not run.
    proposal: K drafted tokens per row.

  Returns:
    K + 1 rows of target logits, row i judging the i-th token of this round, and the
    cache, into which they have been written.
  """
  tokens = jnp.concatenate([last_token[:, None], proposal.tokens], axis=1)
  logits, cache = target.decode(served, tokens, cache)
  return base.Verification(logits), cache


def _empty_proposal(target: base.Model, state: state_lib.DecodeState) -> base.Proposal:
  rows = state.length.shape[0]
  return base.Proposal(
    tokens=jnp.zeros((rows, 0), jnp.int32),
    logits=jnp.zeros((rows, 0, target.vocab_size), jnp.float32),
  )
