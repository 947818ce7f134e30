"""Plants faults one at a time and checks that the tests catch every fault.

        python tests/planted_faults.py                 # all: an hour on two cores
        python tests/planted_faults.py adaptive.py     # by file or name

A fault replaces a text of a package and names the tests that should fail. It is
planted in a copy of them, so the working tree never changes. The same tests must
pass in a copy without the fault. `make test` and CI do not run this program.
"""

import collections
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 900  # seconds for the tests of one fault; a hanging test counts as failed
PACKAGES = ("osd_jax", "osd_serve", "osd_tools")
COPIED = (*PACKAGES, "tests", "gin_configs", "docs", "pyproject.toml")


class Fault(NamedTuple):
  """A change to the package, and the tests that must fail because of it.

  Attributes:
    name: what goes wrong.
    right: a text that occurs once in the packages.
    wrong: the text that replaces it.
    tests: arguments of pytest, separated by spaces; `-k` takes one word.
  """

  name: str
  right: str
  wrong: str
  tests: str


SCHEDULE = "tests/distillation/test_schedule.py"
CONTROLLER = "tests/engine/test_controller.py"
WORTH = "tests/distillation/test_worth.py"
BUFFER = "tests/distillation/test_buffer.py"
UPDATE = "tests/distillation/test_update.py"
ONLINE = "tests/test_online.py"
ENGINE = "tests/engine/test_engine.py"
FAMILIES = "tests/engine/test_families.py"
DRAFTING = "tests/engine/test_drafting.py"
ROUNDS = "tests/decoding/test_rounds.py"
LAW = "tests/decoding/test_law.py"
ACCEPT = "tests/decoding/test_accept.py"
BLOCK = "tests/decoding/test_block.py"
DRAFTERS = "tests/decoding/test_drafters.py"
RECORDS = "tests/decoding/test_records.py"
NARROWING = "tests/distillation/test_subsample.py"
CHECKPOINTS = "tests/runs/test_checkpoint.py"
LLAMA = "tests/models/test_llama.py tests/models/test_models.py"
EAGLE = "tests/models/test_eagle.py"
LEARNER = "tests/distillation/test_learner.py"
STATE = "tests/decoding/test_state.py"
TOKENIZERS = "tests/data/test_tokenizers.py"
NGRAMS = "tests/decoding/test_ngrams.py"
MIXED = "tests/decoding/test_mixed.py"
CACHE = "tests/engine/test_cache_engine.py"
CACHE_DRAFT = "tests/test_cache_draft.py"
SERVING = "tests/serving/test_"

FAULTS = [
  # Faults that an earlier version of the tests did not catch.
  Fault(
    "resume drops the saved shortlist",
    '    shortlist = host["shortlist"]\n',
    "    shortlist = None\n",
    f"{ONLINE} -k saved_draft",
  ),
  Fault(
    "resume serves the newest average",
    "self._drafts[name] = self._draft.join(trained, self._frozen)",
    'self._drafts[name] = self._draft.join(arrays["learner"].served, self._frozen)',
    f"{ONLINE} -k saved_draft",
  ),
  Fault(
    "a swap without a shortlist resets it",
    "    if shortlist is not None:\n      size =",
    "    if shortlist is None and self.spec.draft.shortlist:\n"
    "      shortlist = np.arange(self.spec.draft.shortlist)\n"
    "    if shortlist is not None:\n      size =",
    f"{FAMILIES} -k shortlist",
  ),
  Fault(
    "replay is drawn with the key of the new rows",
    "_draw(key_replay, buffer.filled",
    "_draw(key_new, buffer.filled",
    BUFFER,
  ),
  Fault(
    "ages that are already drawn keep their weight",
    "jax.lax.top_k(jnp.where(ages < size, scores, -jnp.inf), count)[1]",
    "jax.random.randint(key, (count,), 0, jnp.maximum(size, 1))",
    BUFFER,
  ),
  Fault(
    "a launch keeps the slices that were requested before",
    "self._update = update = _Update(finished, tuple(batches), self.learner)",
    "self._update = update = _Update(finished, tuple(batches), self.learner, asked=9)",
    LEARNER,
  ),
  Fault(
    "waiting for an update counts as serving time",
    "self._behind = started - update.started - update.waited < update.seconds",
    "self._behind = started - update.started < update.seconds",
    LEARNER,
  ),
  Fault(
    "an interval is counted from the start of the run",
    "    is_due = state.finished - state.last_update >= self.update_interval\n"
    "    if not is_due or not request.slices:",
    "    is_due = state.finished >= self.update_interval\n"
    "    if not is_due or not request.slices:",
    SCHEDULE,
  ),
  Fault(
    "a shift compares the last requests with a window that contains them",
    "  newer, earlier = overlaps[-SHORT:], overlaps[:-SHORT]",
    "  newer, earlier = overlaps[-SHORT:], overlaps",
    SCHEDULE,
  ),
  Fault(
    "a loss compares fewer tokens than a record has",
    "  count = max(config.num_tokens, batch.records.ids.shape[-1])",
    "  count = config.num_tokens",
    "tests/distillation/test_subsample.py -k in_full",
  ),
  Fault(
    "a shift needs no past",
    "if len(earlier) >= SHORT else 0.0",
    "if len(earlier) else 0.0",
    SCHEDULE,
  ),
  Fault(
    "the price of a probe ignores its tokens",
    "costs.round_ms[1] - tokens * costs.resting_ms(state)",
    "costs.round_ms[1] - costs.resting_ms(state)",
    CONTROLLER,
  ),
  Fault(
    "debt has no limit",
    "return max(state.saved_ms + change, floor)",
    "return state.saved_ms + change",
    CONTROLLER,
  ),
  Fault(
    "low temperatures give greedy distributions",
    "greedy = temperature == 0",
    "greedy = temperature < 1e-3",
    "tests/decoding/test_sampling.py",
  ),
  Fault(
    "low temperatures give greedy draws",
    "needs_more = jnp.any(settings.temperature > 0)",
    "needs_more = jnp.any(settings.temperature > 1e-3)",
    "tests/decoding/test_sampling.py",
  ),
  Fault(
    "low temperatures use greedy acceptance",
    "jnp.any(settings.temperature > 0) | is_penalized,",
    "jnp.any(settings.temperature > 1e-3) | is_penalized,",
    "tests/decoding/test_accept.py",
  ),
  # The round.
  Fault(
    "all drafted tokens use the noise of one position",
    "settings, at = rows.settings, rows.length + offset",
    "settings, at = rows.settings, rows.length + 0 * offset",
    LAW,
  ),
  Fault(
    "the first round reads the stale second input",
    "begun = (position > 0).astype(jnp.int32)",
    "begun = jnp.ones_like(position)",
    ROUNDS,
  ),
  Fault(
    "the last drafted token counts as read by the draft",
    "return jnp.maximum(length - 1, 0)",
    "return length",
    ROUNDS,
  ),
  Fault(
    "a bonus token is marked as an error",
    "(offset == acceptance.accepted[:, None]) & proposed",
    "offset == acceptance.accepted[:, None]",
    "tests/decoding/test_state.py",
  ),
  Fault(
    "tokens after the end of sequence are emitted",
    "count = jnp.where(ends, jnp.argmax(is_eos, axis=1) + 1, count)",
    "count = jnp.where(ends, count, count)",
    "tests/decoding/test_state.py",
  ),
  Fault(
    "a stopped row is written to",
    "new = jnp.where(write, new.astype(row.dtype), old)",
    "new = new.astype(row.dtype)",
    f"{ROUNDS} tests/decoding/test_state.py",
  ),
  Fault(
    "a call continues after a row has stopped",
    "jnp.any(running) & jnp.all(running == running_at_start)",
    "jnp.any(running)",
    f"{ROUNDS} -k returns_when",
  ),
  Fault(
    "an empty residual has no fallback",
    "jnp.where(empty, target_row, residual)",
    "residual",
    ACCEPT,
  ),
  Fault(
    "tokens after the proposed length of a row are accepted",
    "  passes = passes & proposal.is_proposed\n",
    "",
    DRAFTERS,
  ),
  Fault(
    "the bonus token after the proposed length is drawn from a residual",
    "  return jnp.where(row < proposal.lengths[:, None], row_probs, 0.0)",
    "  return row_probs",
    f"{LAW} -k vary",
  ),
  Fault(
    "a rejected deterministic proposal can be recovered",
    "    return jax.nn.one_hot(token, vocab_size)",
    "    return 0 * jax.nn.one_hot(token, vocab_size)",
    f"{LAW} -k logits",
  ),
  Fault(
    "the residual is the whole target row",
    "jnp.maximum(target_row - draft_row, 0.0)",
    "target_row",
    LAW,
  ),
  Fault(
    "the block rule recovers tokens as rejection does",
    "jnp.maximum(share * target_row - draft_row, 0.0)",
    "jnp.maximum(target_row - draft_row, 0.0)",
    BLOCK,
  ),
  Fault(
    "the block rule accepts up to the first token that fails",
    "accepted = jnp.max(jnp.where(passed, count, 0), axis=1)",
    "accepted = _count_prefix(proposal, passed) + 0 * count[0]",
    BLOCK,
  ),
  Fault(
    "a block goes on after the proposed length of its row",
    "proposal.is_proposed[:, 1:] & (sampling.sums(rows) > 0)",
    "sampling.sums(rows) > 0",
    f"{BLOCK} -k shorter",
  ),
  Fault(
    "a block goes on after a broken target row",
    "proposal.is_proposed[:, 1:] & (sampling.sums(rows) > 0)",
    "proposal.is_proposed[:, 1:]",
    f"{BLOCK} -k broken_target",
  ),
  Fault(
    "a text is kept with more than probability 1",
    "jnp.minimum(probs[-1] * target, draft)",
    "probs[-1] * target",
    BLOCK,
  ),
  Fault(
    "a token that the draft cannot draw is kept",
    "jnp.where(can_be_drawn, ratio, 0.0)",
    "jnp.where(can_be_drawn, ratio, kept[-1])",
    f"{BLOCK} -k broken_draft",
  ),
  Fault(
    "drafts of the block rule use the noise of the round before",
    "    if rule.noise_per_round:\n",
    "    if rule.noise_per_round and rule.coupled:\n",
    f"{LAW} -k law_of_the_target",
  ),
  Fault(
    "the block rule judges with the noise of the round before",
    "_uniform(round_seed(settings.seed, position), offsets)",
    "_uniform(settings.seed, offsets)",
    f"{LAW} -k law_of_the_target",
  ),
  # Records and learning.
  Fault(
    "chosen blocks are left unsorted, so ties keep later entries",
    "  blocks_of_top = jnp.sort(blocks_of_top, axis=-1)\n",
    "",
    RECORDS,
  ),
  Fault(
    "the tail includes the last token that is kept",
    "jnp.where(logits < least, masses, 0.0)",
    "jnp.where(logits <= least, masses, 0.0)",
    "tests/decoding/test_records.py",
  ),
  Fault(
    "micro-batches are trimmed by padding instead of the mask",
    "judged = np.flatnonzero(np.any(np.asarray(batch.mask), axis=0))",
    "judged = np.flatnonzero(np.any(np.asarray(batch.target) != 0, axis=0))",
    UPDATE,
  ),
  Fault(
    "a step that is not finite is applied",
    "lambda new, old: jnp.where(finite, new, old)",
    "lambda new, old: new",
    UPDATE,
  ),
  Fault(
    "a skipped update gets a version",
    "before.version + (after.step > before.step)",
    "before.version + 1",
    UPDATE,
  ),
  Fault(
    "the average decays at the wrong rate",
    "1 - config.ema_decay)",
    "config.ema_decay)",
    UPDATE,
  ),
  Fault(
    "positions outside the mask are learnt",
    "is_read = batch.mask & (batch.weight > 0)[:, None]",
    "is_read = jnp.ones_like(batch.mask) & (batch.weight > 0)[:, None]",
    "tests/distillation/test_losses.py",
  ),
  Fault(
    "updated parameters keep the sharding that XLA chose",
    "    learner = jax.block_until_ready(sharding.place_like(learner, state))",
    "    learner = jax.block_until_ready(state)",
    "tests/test_sharding.py",
  ),
  # Catching up.
  Fault(
    "catching up waits for stopped rows",
    "return jnp.any(running & (cache.length < target_length))",
    "return jnp.any(cache.length < target_length)",
    DRAFTING,
  ),
  Fault(
    "the last chunk counts in full",
    "end = jnp.minimum(cache.length + CHUNK, target_length)",
    "end = cache.length + CHUNK",
    DRAFTING,
  ),
  Fault(
    "chunks start one input late",
    "tokens, states = self._inputs(rows, cache.length, CHUNK)",
    "tokens, states = self._inputs(rows, cache.length + 1, CHUNK)",
    DRAFTING,
  ),
  Fault(
    "rows that lag less are fed past their text",
    "end = jnp.minimum(cache.length + CHUNK, target_length)",
    "end = jnp.minimum(cache.length + CHUNK, jnp.max(target_length))",
    DRAFTING,
  ),
  # Drafts that read the states of tokens.
  Fault(
    "accepted tokens keep the states of the draft",
    "if not self.model.reads_tokens or not count:",
    "if True:",
    "tests/decoding/test_model_law.py -k fed_again",
  ),
  Fault(
    "states of tokens are read one position late",
    "before = start[:, None] + jnp.arange(count)[None] - 1",
    "before = start[:, None] + jnp.arange(count)[None]",
    "tests/decoding/test_model_law.py -k fed_again",
  ),
  Fault(
    "trained steps attend to tokens that are not verified",
    "jnp.concatenate([ago >= step, *visible], axis=-1)",
    "jnp.concatenate([ago >= 0, *visible], axis=-1)",
    "tests/models/test_attached.py -k trained_steps",
  ),
  Fault(
    "each trained step goes on from the target's states",
    "before = jnp.pad(states, ",
    "before = jnp.pad(token_states, ",
    "tests/models/test_attached.py -k trained_steps",
  ),
  # Drafting with an adaptive K.
  Fault(
    "a request without a draft prefill counts as read by the draft",
    "    inputs[list(lacking)] = 0\n",
    "",
    DRAFTING,
  ),
  Fault(
    "a started chunk is not counted",
    "return max(-(-lag // drafters.CHUNK), 0), prefills",
    "return max(lag // drafters.CHUNK, 0), prefills",
    DRAFTING,
  ),
  Fault(
    "the draft prefill of a request is repeated",
    "      slot.lacks_draft = False\n",
    "      pass\n",
    DRAFTING,
  ),
  Fault(
    "the cost of catching up is not reported to the policy",
    "    self._spent_ms += missing_ms\n",
    "",
    f"{CONTROLLER} -k delays",
  ),
  Fault(
    "a new request inherits the counts of the previous one",
    "        counts[number] = 0\n",
    "        pass\n",
    DRAFTING,
  ),
  Fault(
    "a probe prefills new requests for the draft at once",
    "or self.controller.state.is_drafting",
    "or self.controller.state.num_draft_tokens > 0",
    DRAFTING,
  ),
  Fault(
    "a resumed policy loses the progress of its rows",
    "      self._progress = read_progress(self._state, self.spec.drafter)\n",
    "      pass\n",
    DRAFTING,
  ),
  Fault(
    "a resumed engine forgets which requests lack a prefill",
    'fields = {name: value for name, value in saved.items() if name != "tag"}',
    'fields = {"number": saved["number"], "milliseconds": saved["milliseconds"]}',
    DRAFTING,
  ),
  # Checkpoints.
  Fault(
    "checksums are not compared",
    "if checksums[name] is not None and _checksum(array) != checksums[name]:",
    "if False:",
    CHECKPOINTS,
  ),
  Fault(
    "an older step can be written",
    "    if step < latest:",
    "    if False:",
    CHECKPOINTS,
  ),
  Fault(
    "the step that is being written is ignored when the next is due",
    "newest, future = self._writing",
    "newest, future = max(self.steps(), default=0), self._writing[1]",
    CHECKPOINTS,
  ),
  Fault(
    "an error of the writing thread is lost",
    "    future.result()\n",
    "",
    CHECKPOINTS,
  ),
  Fault(
    "a damaged step is not moved away",
    "(self._directory / str(step)).rename(aside)",
    "pass",
    CHECKPOINTS,
  ),
  Fault(
    "checkpoints are written at normal priority",
    'background.Worker("checkpoints", low_priority=True)',
    'background.Worker("checkpoints")',
    CHECKPOINTS,
  ),
  Fault(
    "a longer prompt waits until the rows in flight have finished",
    "    self._fit_bucket()\n",
    "    if self._bucket_of(self._waiting[0][1]) > self._bucket and len(free) < rows:\n"
    "      return False\n"
    "    self._fit_bucket()\n",
    ENGINE,
  ),
  Fault(
    "padding that is added to a prompt counts as token 0",
    "fill = base.NO_TOKEN if jnp.issubdtype(leaf.dtype, jnp.integer) else 0",
    "fill = 0",
    "tests/engine/test_cache_engine.py -k longer_bucket",
  ),
  Fault(
    "a checkpoint is not copied before it is written",
    "    copied = _copied(leaves)",
    "    copied = leaves",
    CHECKPOINTS,
  ),
  Fault(
    "negatives are not weighted for the tokens that they represent",
    "stands_for = np.log(vocab_size / config.num_negatives)",
    "stands_for = 0.0",
    NARROWING,
  ),
  Fault(
    "the target mass of omitted tokens is lost",
    "tail=records.tail + lost,",
    "tail=records.tail,",
    NARROWING,
  ),
  Fault(
    "an attached draft does not normalise the target's embedding",
    "self.inward(layers.normalized(embedded))",
    "self.inward(embedded)",
    "tests/models/test_attached.py",
  ),
  Fault(
    "a short prompt is padded like a long one in flight",
    "(batch,) = self._batches(slots, bucket)",
    "(batch,) = self._batches(slots, self._bucket)",
    "tests/engine/test_engine.py -k padded",
  ),
  Fault(
    "a short prompt that joins long ones is compiled while serving",
    "if before > after and self.config.rows > 1:",
    "if False:",
    "tests/engine/test_engine.py -k warm_engine",
  ),
  Fault(
    "rows that do not run are computed like the others",
    "jnp.where(running, state.last_token, base.NO_TOKEN), proposal",
    "state.last_token, proposal",
    "tests/decoding/test_rounds.py -k no_token",
  ),
  Fault(
    "a token whose embedding is zero counts as padding",
    "x, cache = self.decoder.step(x, cache, is_token)\n    if self.states",
    "x, cache = self.decoder.step(x, cache, jnp.any(x != 0, axis=-1))\n"
    "    if self.states",
    "tests/models/test_models.py -k embedding_is_zero",
  ),
  Fault(
    "padding of prompts is computed like tokens",
    "return jnp.where(mask[..., None], self.token_embedder(source), 0)",
    "return self.token_embedder(source)",
    "tests/models/test_models.py -k padding_of_a_prompt",
  ),
  Fault(
    "inputs without a token get attention",
    "return jnp.where(sees[:, :, None, :, None], context, 0)",
    "return context",
    "tests/models/test_models.py -k stays_zero",
  ),
  Fault(
    "the controller prices a single row like all rows",
    "self._table.rounds(is_sampled, len(rows))",
    "self._table.rounds(is_sampled)",
    "tests/engine/test_controller.py -k pays_for_one",
  ),
  Fault(
    "one device prefills prompts one by one",
    "self.partitioner.parts(self.rows) if self.is_split else self.prefill_rows",
    "self.partitioner.parts(self.rows) if self.is_split else 1",
    "tests/engine/test_prompts.py -k prompts_of_one_prefill",
  ),
  Fault(
    "rows that decode wait for all chunks of a prompt",
    "if tokens > chunk and self._occupied():",
    "if False:",
    "tests/engine/test_chunks.py -k wait_for_one_chunk",
  ),
  Fault(
    "a draft that joins leaves the noise of a prompt that is being read",
    "      slot.prompt = self._padded(slot.request, slot.number)\n",
    "      pass\n",
    "tests/engine/test_chunks.py -k numbers_its_noise",
  ),
  Fault(
    "a late prefill reads another row",
    "spec.by_part(cache.take_row, all_states, slots)",
    "spec.by_part(cache.take_row, all_states, slots * 0)",
    "tests/test_attached_runs.py -k late",
  ),
  Fault(
    "saved rows continue under another model",
    "    if changed:",
    "    if False:",
    CHECKPOINTS,
  ),
  Fault(
    "a refused prompt drops the answers in flight",
    "          failure, request = error, _END  # raised",
    "          raise error  # raised",
    "tests/engine/test_server.py -k earlier",
  ),
  Fault(
    "logits that are not finite end an answer without a word",
    "        _check_finite(answer.index, answer.stop_reason)\n",
    "        pass\n",
    "tests/engine/test_server.py -k broken",
  ),
  Fault(
    "a draft learnt in another thread is never swapped in",
    "        self.swap_pending()\n        if self._learner is not None:",
    "        if self._learner is not None:",
    "tests/engine/test_server.py",
  ),
  Fault(
    "a checkpoint does not wait until all answers are processed",
    "      self._rows += self._calls.wait()\n      # The rows in flight",
    "      # The rows in flight",
    ONLINE,
  ),
  # Decoder-only models.
  Fault(
    "a prompt's last token is attended to twice",
    "  return mask & (count > 1)",
    "  return mask & (count > 0)",
    LLAMA,
  ),
  Fault(
    "a llama's scores are one position off",
    "[one[:, source.shape[1] :] for one in states]",
    "[one[:, source.shape[1] - 1 : -1] for one in states]",
    LLAMA,
  ),
  Fault(
    "an EAGLE-3 head forgets the state before the first token of an answer",
    "jnp.where(slot[..., None] == 0, newest, states)",
    "states",
    "tests/models/test_models.py -k eagle",
  ),
  Fault(
    "the later steps of an EAGLE-3 head see tokens that were verified after them",
    "blocks = [ago >= step, ",
    "blocks = [ago >= 0, ",
    "tests/models/test_attached.py -k trained_steps",
  ),
  Fault(
    "layers of SpecForge are counted as those of speculators",
    'first, config = 1, fields.get("eagle_config")',
    'first, config = 0, fields.get("eagle_config")',
    EAGLE,
  ),
  Fault(
    "offsets of a draft vocabulary are taken for its ids",
    "ids = np.arange(size) + offsets",
    "ids = offsets",
    EAGLE,
  ),
  Fault(
    "decoding positions ignore the length of the prompt",
    "at = jnp.sum(mask, axis=1, dtype=jnp.int32)[:, None] + slot",
    "at = slot",
    LLAMA,
  ),
  Fault(
    "every widened part of a bfloat16 head is the first",
    "first = start * math.prod(kernel.shape[1:])",
    "first = 0 * math.prod(kernel.shape[1:])",
    "tests/native/test_products.py -k parts",
  ),
  Fault(
    "a target in bfloat16 is copied to float32",
    "jnp.asarray(leaf, None if leaf.dtype == jnp.bfloat16 else dtype)",
    "jnp.asarray(leaf, dtype)",
    "tests/models/test_stored_weights.py -k logits",
  ),
  Fault(
    "native attention shares keys between the wrong heads",
    "  folded = query.transpose(0, 3, 2, 1, 4).reshape(",
    "  folded = query.reshape(",
    LLAMA,
  ),
  Fault(
    "every chunk of a prompt is written over the first",
    "update_slice_in_dim(stored, new, start, axis=2)",
    "update_slice_in_dim(stored, new, 0, axis=2)",
    LLAMA,
  ),
  Fault(
    "position scaling stretches the short wavelengths",
    "  return share * plain + (1 - share) * plain / scaling.factor",
    "  return (1 - share) * plain + share * plain / scaling.factor",
    LLAMA,
  ),
  Fault(
    "a window has one token too many",
    "keys[:, None] > queries[..., None] - window",
    "keys[:, None] >= queries[..., None] - window",
    LLAMA,
  ),
  Fault(
    "the window of a step is measured from the beginning of the answer",
    "biases(self.config, visible, at, prompt_positions(mask))",
    "biases(self.config, visible, slot, prompt_positions(mask))",
    LLAMA,
  ),
  Fault(
    "layers with a window take the global wavelengths",
    "  theta = config.local_rope_theta if is_local else config.rope_theta",
    "    theta = config.rope_theta",
    LLAMA,
  ),
  Fault(
    "the first input of a llama's draft is padding",
    "  return jnp.where(position == 0, state.start[:, None], before)",
    "  return jnp.where(position == 0, base.PAD_ID, before)",
    f"{FAMILIES} -k llama",
  ),
  Fault(
    "only the first end-of-sequence token ends a row",
    "[tokens == token for token in ids]",
    "[tokens == token for token in ids[:1]]",
    STATE,
  ),
  Fault(
    "a long decoder-only prompt loses its end",
    "    return np.concatenate([prompt[:count], prompt[count - length :]])",
    "    return prompt[:length]",
    TOKENIZERS,
  ),
  Fault(
    "a resumed shorter update runs all slices",
    'self._draw(host["slices"])',
    "self._draw(self.config.update.steps_per_update)",
    LEARNER,
  ),
  Fault(
    "all remaining slices run between two calls",
    "      requests = max(self._requests_left(finished), 1)",
    "      requests = 1",
    LEARNER,
  ),
  Fault(
    "updates on a mesh run in the background",
    "on_mesh = sharding.is_distributed(params) or jax.process_count() > 1",
    "on_mesh = jax.process_count() > 1",
    "tests/engine/test_measurement.py",
  ),
  Fault(
    "a token outside a short head counts as its last token",
    "jnp.full(vocab_size, size, jnp.int32)",
    "jnp.full(vocab_size, size - 1, jnp.int32)",
    "tests/engine/test_agreement.py",
  ),
  Fault(
    "a cost schedule counts padding as tokens",
    "np.count_nonzero(np.asarray(batch.mask))",
    "np.asarray(batch.mask).size",
    LEARNER,
  ),
  Fault(
    "a launch does not move the mark between old and new rows",
    "      self.runner.launch(batches, self.finished)\n"
    "      self._since = int(self._buffer.added)\n",
    "      self.runner.launch(batches, self.finished)\n",
    f"{LEARNER} -k new_rows",
  ),
  Fault(
    "a draft that is far worse serves",
    "return not overlap >= LEAST_SHARE * other",
    "return False",
    f"{LEARNER} -k far_worse",
  ),
  Fault(
    "a restored learner serves its newest parameters",
    "self._drafts[name] = self._draft.join(trained, self._frozen)",
    'self._drafts[name] = self._draft.join(arrays["learner"].params, self._frozen)',
    f"{LEARNER} -k restored_learner",
  ),
  Fault(
    "every slice of an update draws the same rows",
    "  key = jax.random.fold_in(key, index)",
    "  key = jax.random.fold_in(key, 0)",
    UPDATE,
  ),
  Fault(
    "the history of a schedule is longer than its window",
    "state, finished=state.finished + 1, recent=recent[-SHORT:]",
    "state, finished=state.finished + 1, recent=recent[-5 * SHORT :]",
    SCHEDULE,
  ),
  Fault(
    "a request from before a swap counts for the new version",
    "  place = -2 if old and len(state.versions) > 1 else -1",
    "  place = -1",
    WORTH,
  ),
  Fault(
    "the savings of a pause have no upper bound",
    "saved_ms=min(saved, most))",
    "saved_ms=saved)",
    WORTH,
  ),
  Fault(
    "compared requests have a fixed place in their block",
    "    return place == choice",
    "    return place == 0 * choice",
    "tests/loop/test_meter.py",
  ),
  Fault(
    "an n-gram with the same hash is a candidate",
    "matches = jnp.all(equal | ignored, axis=-1)",
    "matches = jnp.any(equal | ignored, axis=-1)",
    f"{NGRAMS} -k never_named",
  ),
  Fault(
    "a repeated n-gram of an answer writes one way only",
    'bucket].get(mode="fill", fill_value=0) + earlier) % WAYS',
    'bucket].get(mode="fill", fill_value=0)) % WAYS',
    f"{NGRAMS} -k repeated_token",
  ),
  Fault(
    "the cache proposes under the distribution of the learned draft",
    "logits = jnp.where(by_cache[..., None], one_hot, logits)\n",
    "del by_cache, one_hot\n",
    f"{MIXED} -k takes_over",
  ),
  Fault(
    "tokens drawn after a rejected one are kept",
    "state = state.replace(drawn=jnp.where(is_judged, state.drawn, -1))\n",
    "del is_judged\n",
    f"{MIXED} -k were_judged",
  ),
  Fault(
    "a sampled draft is scored by its most likely token",
    "learned = jnp.where(draws >= 0, drawn_right, stand_in)",
    "learned = top",
    f"{MIXED} -k are_accepted",
  ),
  Fault(
    "verification of too few tokens",
    "(smallest == index, judgement, cache),",
    "(smallest == index + 1, judgement, cache),",
    f"{MIXED} -k smallest_width",
  ),
  Fault(
    "each row pays for a draft step alone",
    "jnp.sum(jnp.where(running, survival, 0.0)) * mean",
    "jnp.max(jnp.where(running, survival, 0.0)) * mean",
    f"{MIXED} -k pay_for",
  ),
  Fault(
    "survival of the last token only",
    "survival = survival * self._survival(params, state)",
    "survival = self._survival(params, state)",
    f"{MIXED} -k product",
  ),
  Fault(
    "rejected positions are scored",
    "is_scored = jnp.arange(count) < jnp.minimum(length, state.length[0])",
    "is_scored = jnp.arange(count) < count",
    f"{MIXED} -k scored_once",
  ),
  Fault(
    "replicas keep their answers to themselves",
    "        replica.unseen.extend(texts)\n",
    "        pass\n",
    "tests/tools/test_replicas.py -k shared",
  ),
  Fault(
    "entries of the n-gram cache are only hidden by their hash",
    "is_kept & is_own &",
    "is_kept &",
    f"{NGRAMS} -k salt",
  ),
  Fault(
    "salts share the places of an n-gram",
    "for part in (salt[..., 0], salt[..., 1], *tokens):",
    "for part in tokens:",
    f"{NGRAMS} -k salt",
  ),
  Fault(
    "cache_salt is not given to the engine",
    "self._salt(ask.cache_salt)",
    "self._salt(None)",
    f"{SERVING}privacy.py -k other_salt",
  ),
  Fault(
    "checkpoints without answers hold an update's rows",
    "(has_rows and self.runner.pending()) or (None, None)",
    "self.runner.pending() or (None, None)",
    f"{LEARNER} -k without_rows",
  ),
  Fault(
    "learning is paid for what the cache knows already",
    "    if self.mixed <= self.now or self.now >= 1:\n",
    "    if self.now >= 0:\n",
    f"{WORTH} -k leaves_open",
  ),
  Fault(
    "a cleared cache keeps the scores of its tokens",
    "      self._serve_memory(self.spec.drafter.memory())\n",
    "      table = self.spec.drafter.memory().table\n"
    "      self._serve_memory(self._memory.replace(table=table))\n",
    f"{CACHE} -k cleared",
  ),
  Fault(
    "tokens are proposed for rows that must not draft",
    "    proposal = proposal.only_where(state.settings.speculative)\n",
    "",
    f"{DRAFTERS} -k must_not",
  ),
  Fault(
    "a request that must not draft is forgotten",
    "draws.settings(limit, request.speculative, request.cache_salt)",
    "draws.settings(limit, True, request.cache_salt)",
    f"{DRAFTING} -k must_not",
  ),
  Fault(
    "rows that must not draft count as drafting ones",
    "  if row in state.undrafted:\n    return 0.0\n",
    "",
    f"{CONTROLLER} -k worth_less",
  ),
  Fault(
    "a cache is measured after it took the answer up",
    "    rows, params = 1, draft.init(jax.random.key(0))\n",
    "    rows, params = 1, draft.init(jax.random.key(0))\n"
    "    params = absorbed(draft, params, answers[0])\n",
    f"{CACHE_DRAFT} -k taken_up",
  ),
  Fault(
    "a continued run measures an empty cache",
    "      self._cache = memory.table\n",
    "      pass\n",
    "tests/test_resume.py -k alone",
  ),
  Fault(
    "a new draft empties the cache",
    "return memory.replace(draft=prepared)",
    "return self.memory().replace(draft=prepared)",
    f"{CACHE} -k leave_the_cache",
  ),
  Fault(
    "made-up requests stay in the cache",
    "self._serve_memory(memory)  # without the made-up requests",
    "pass",
    f"{CACHE} -k leave_the_cache",
  ),
  Fault(
    "a plain row is scored with the draft state of an earlier request",
    "np.bool_(slot.lacks_draft and self._resting.drafter is None)",
    "np.False_",
    f"{CACHE} -k plain_steps",
  ),
  Fault(
    "a round without proposals rejects token 0",
    "if not proposal.tokens.shape[1]:",
    "if False:",
    f"{LAW} -k dear",
  ),
  Fault(
    "the time of the cache alone is not counted",
    "(KEPT * plain + state.cache_ms)",
    "(KEPT * plain)",
    CONTROLLER,
  ),
  Fault(
    "a draft that has rested does not read what it missed",
    "    fed_length = jnp.minimum(state.length, state.draft.length)\n",
    "    fed_length = state.length\n",
    "tests/engine/test_families.py -k after_pauses",
  ),
  # osd serve.
  Fault(
    "a client that leaves keeps its row",
    "    if self.is_cancelled:\n",
    "    if False:\n",
    f"{SERVING}stress.py -k frees_its_row",
  ),
  Fault(
    "a client that leaves a stream is not noticed",
    "      self._on_end()\n",
    "      pass\n",
    f"{SERVING}stress.py -k frees_its_row",
  ),
  Fault(
    "the queue has no bound",
    "        raise QueueFullError\n",
    "        pass\n",
    f"{SERVING}stress.py -k full_queue",
  ),
  Fault(
    "answers with learn = false are written to the disk and learned",
    "return job.prompt.learn and not job.is_cancelled",
    "return not job.is_cancelled",
    f"{SERVING}learning.py -k leave_no_trace",
  ),
  Fault(
    "the client has its answer before the disk",
    "    entries = [self._entry(answer) for answer in answers or ()]\n    every",
    "    self.source.publish(answers or ())\n"
    "    entries = [self._entry(answer) for answer in answers or ()]\n    every",
    f"{SERVING}learning.py -k before_its_client",
  ),
  Fault(
    "a restarted server forgets the answers after its checkpoint",
    "self._process_again(runs.read(self.log.outputs.path))",
    "self._process_again(iter(()))",
    f"{SERVING}learning.py -k killed",
  ),
  Fault(
    "pieces of a stream are sent twice",
    "    self._given = max(self._given, len(text))\n",
    "",
    f"{SERVING}answers.py -k streamed",
  ),
]


def main(words: list[str]) -> int:
  """Returns 1 if a fault survives or if tests fail without a fault, else 0."""
  faults = [
    fault
    for fault in FAULTS
    if not words or any(word in f"{where(fault)} {fault.name}" for word in words)
  ]
  ready: dict[str, bool] = {}
  caught, total = collections.Counter(), collections.Counter()
  for fault in faults:
    if fault.tests not in ready:
      ready[fault.tests] = outcome(None, fault.tests) == "passed"
    started = time.perf_counter()
    result = outcome(fault, fault.tests) if ready[fault.tests] else "fails without it"
    name = where(fault)
    total[name] += 1
    caught[name] += result == "failed"
    verdict = {"failed": "caught", "passed": "SURVIVED"}.get(result, result.upper())
    seconds = time.perf_counter() - started
    print(f"{verdict:9} {name:35} {fault.name} ({seconds:.0f} s)", flush=True)
  print()
  for name in sorted(total):
    print(f"{name:35} {caught[name]} of {total[name]} caught")
  return int(caught != total)


def where(fault: Fault) -> str:
  """Returns the file of a package that contains the text of the fault."""
  files = [
    str(path.relative_to(ROOT))
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
    if fault.right in path.read_text()
  ]
  if len(files) != 1 or (ROOT / files[0]).read_text().count(fault.right) != 1:
    raise ValueError(f"{fault.name!r}: its text is in {files}, expected one place")
  return files[0]


def outcome(fault: Fault | None, tests: str) -> str:
  """Runs the tests in a copy of the package, with the fault if there is one."""
  with tempfile.TemporaryDirectory() as folder:
    copy = Path(folder)
    for name in COPIED:
      source = ROOT / name
      (shutil.copytree if source.is_dir() else shutil.copy)(source, copy / name)
    if fault is not None:
      path = copy / where(fault)
      path.write_text(path.read_text().replace(fault.right, fault.wrong))
    return run(copy, tests)


def run(copy: Path, tests: str) -> str:
  """Runs pytest; returns "passed", "failed", or an unexpected exit code in words."""
  environment = {
    **os.environ,
    "PYTHONPATH": str(copy),
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache" / "tests"),
  }
  command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
  try:
    tests_run = subprocess.run(
      [*command, *tests.split()],
      cwd=copy,
      env=environment,
      capture_output=True,
      text=True,
      timeout=PATIENCE,
    )
  except subprocess.TimeoutExpired:
    return "failed"
  outcomes = {0: "passed", 1: "failed"}
  return outcomes.get(tests_run.returncode, f"ended with {tests_run.returncode}")


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
