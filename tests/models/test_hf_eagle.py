"""EAGLE-3 heads next to the code of speculators (`make test-hf`)."""

import dataclasses
import functools
import json
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from osd_jax.models import attached, eagle, families
from osd_jax.models.convert import eagle as heads
from osd_jax.models.convert import hugging_face

pytestmark = pytest.mark.hf

VOCAB, DRAFT_VOCAB, WIDTH, DEPTH, PROMPTS, PROMPT, TEXT, STEPS = (
  96,
  60,
  32,
  6,
  64,
  7,
  9,
  5,
)
STATE_LAYERS = (2, 3, 5)
ROWS = 8  # whose logits are compared
COMMON = {
  "vocab_size": VOCAB,
  "hidden_size": WIDTH,
  "intermediate_size": 48,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 8,
  "max_position_embeddings": 128,
  "eos_token_id": 2,
  "pad_token_id": None,
}
FLAGS = {
  "llama": {"norm_before_residual": True},
  "qwen3": {"fc_norm": True, "norm_output": True},
}
KINDS = pytest.mark.parametrize("kind", FLAGS)


@functools.cache
def speculators():
  """The package, without the reader of its training data, which needs more packages."""
  name = "speculators.train.data"
  sys.modules.setdefault(name, types.SimpleNamespace(BatchType=dict))
  return pytest.importorskip("speculators.models.eagle3")


def noisy(model, seed):
  import torch

  generator = torch.Generator().manual_seed(seed)
  with torch.no_grad():
    for parameter in model.parameters():
      noise = torch.randn(parameter.shape, generator=generator)
      usual = 1 if parameter.ndim == 1 else 0
      parameter.copy_(usual + 0.3 * noise / max(parameter.shape[-1] / 12, 1) ** 0.5)
  return model.eval()


@pytest.fixture(scope="module", params=FLAGS)
def case(request, tmp_path_factory):
  """A target and a head of torch, their folders, and texts with the target's states."""
  import torch
  import transformers

  kind, folder = request.param, tmp_path_factory.mktemp(request.param)
  config_type = {"llama": "LlamaConfig", "qwen3": "Qwen3Config"}[kind]
  config_type = getattr(transformers, config_type)
  shape = config_type(**COMMON, num_hidden_layers=DEPTH)
  target = noisy(transformers.AutoModelForCausalLM.from_config(shape), 1)
  target.save_pretrained(folder / "target")
  config = speculators().Eagle3SpeculatorConfig(
    transformer_layer_config=config_type(
      **COMMON, num_hidden_layers=1, attn_implementation="eager"
    ),
    draft_vocab_size=DRAFT_VOCAB,
    eagle_aux_hidden_state_layer_ids=list(STATE_LAYERS),
    speculators_config={
      "algorithm": "eagle3",
      "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
      "default_proposal_method": "greedy",
      "verifier": {"name_or_path": str(folder / "target"), "architectures": []},
    },
    **FLAGS[kind],
  )
  head = noisy(speculators().Eagle3DraftModel(config), 2)
  ids = np.sort(np.random.default_rng(3).choice(VOCAB, DRAFT_VOCAB, replace=False))
  marks = np.zeros(VOCAB, bool)
  marks[ids] = True
  head.load_vocab_mappings(
    torch.tensor(marks), torch.tensor(ids - np.arange(DRAFT_VOCAB))
  )
  head.save_pretrained(folder / "head")
  tokens = np.random.default_rng(4).integers(3, VOCAB, (PROMPTS, PROMPT + TEXT))
  with torch.no_grad():
    hidden = target(torch.tensor(tokens), output_hidden_states=True).hidden_states
  states = torch.cat([hidden[number] for number in STATE_LAYERS], dim=-1)
  # Recorded states are rounded.
  states = states.to(torch.bfloat16).float()
  return types.SimpleNamespace(
    kind=kind, folder=folder, head=head, ids=ids, tokens=tokens, states=states.numpy()
  )


def theirs(case, tokens, states, steps):
  """Logits [steps, B, T, draft vocabulary] of torch: step s at q is for token q + s."""
  import torch

  found = []
  hook = case.head.lm_head.register_forward_hook(lambda *call: found.append(call[-1]))
  with torch.no_grad():
    for row, of_row in zip(tokens, states, strict=True):
      # The first token has no state before it.
      case.head(
        torch.tensor(of_row[None, :-1]),
        torch.tensor(row[None, 1:]),
        torch.zeros(1, len(row) - 1, dtype=torch.long),
        ttt_steps=steps,
      )
  hook.remove()
  logits = torch.cat(found).reshape(len(tokens), steps, len(tokens[0]) - 1, -1)
  return logits.numpy().swapaxes(0, 1)


def loaded(case, **changes):
  """Our head: the model, its parameters and the target."""
  target = hugging_face.load(case.folder / "target")
  embedding = target.params["token_embedder"]["embedding"]
  head = heads.load(case.folder / "head", target.config, embedding)
  config = dataclasses.replace(head.config, **changes)
  model = attached.build(config, target.config)
  frozen = eagle.frozen_of(config, target.config, target.params, head.own)
  return model, model.join(head.params, frozen), target, head


def ours(case, steps=STEPS, states=None, change=None, **changes):
  """Our logits [steps, B, T, V] of the texts."""
  model, params, target, _ = loaded(case, **changes)
  params = params if change is None else change(params)
  states = case.states if states is None else states
  prompt, text = case.tokens[:ROWS, :PROMPT], case.tokens[:ROWS, PROMPT:]
  score = functools.partial(attached._scorer, target=target.config, encode=None)
  config = dataclasses.replace(loaded(case)[3].config, **changes)
  return np.asarray(
    jax.jit(score(config, steps=steps))(
      params,
      jnp.asarray(prompt, jnp.int32),
      jnp.ones(prompt.shape, bool),
      jnp.asarray(text, jnp.int32),
      target_states=jnp.asarray(states[:ROWS, :PROMPT]),
      # The state at the last token of the prompt is that of the first input.
      token_states=jnp.asarray(states[:ROWS, PROMPT - 1 : -1]),
    )
  )


def differs(case, found, steps=STEPS):
  """Largest difference to torch's logits, over all positions that a step can have."""
  expected = theirs(case, case.tokens[:ROWS], case.states[:ROWS], steps)
  apart = 0.0
  for step in range(steps):
    # Our position t of the text has the input PROMPT - 1 + t, theirs begins with 1.
    at = np.arange(step, TEXT)
    theirs_at = PROMPT - 2 + at - step
    mine = found[step][:, at][..., case.ids]
    apart = max(apart, np.abs(mine - expected[step][:, theirs_at]).max())
  return apart


def test_logits_of_five_steps_equal_those_of_speculators(case):
  assert differs(case, ours(case)) < 1e-4


def test_planted_faults_are_found(case):
  def without_norm(params):
    layer = params["decoder"]["layers_0"]
    scale = layer["state_layer_norm"]["scale"]
    layer = {**layer, "state_layer_norm": {"scale": jnp.ones_like(scale)}}
    return {**params, "decoder": {**params["decoder"], "layers_0": layer}}

  late = np.roll(case.states, -1, axis=1)
  residual = not FLAGS[case.kind].get("norm_before_residual", False)
  for found in (
    ours(case, states=late),  # not shifted
    ours(case, change=without_norm),
    ours(case, norm_before_residual=residual),
    ours(case, norm_output=not FLAGS[case.kind].get("norm_output", False)),
  ):
    assert differs(case, found) > 1e-2


def test_states_are_those_of_the_numbered_layers(case):
  target = hugging_face.load(case.folder / "target")
  prompt, text = case.tokens[:4, :PROMPT], case.tokens[:4, PROMPT - 1 :]
  for shift in (0, 1):
    numbers = tuple(number + shift for number in STATE_LAYERS)
    model = families.build(target.config, states=numbers)
    mask = jnp.ones(prompt.shape, bool)
    served = model.prepare(target.params)
    cache = model.prefill(served, jnp.asarray(prompt, jnp.int32), mask, 12)
    _, cache = model.decode(served, jnp.asarray(text[:, :6], jnp.int32), cache)
    read = np.concatenate([cache.target_states, cache.token_states[:, 1:6]], axis=1)
    apart = np.abs(read.astype(np.float32) - case.states[:4, : PROMPT + 5]).max()
    assert (apart < 0.05) == (shift == 0), apart


def test_chains_draft_the_same_tokens(case):
  model, params, target, _ = loaded(case)
  served = model.prepare(params)
  count = PROMPT + 3  # tokens that are verified
  tokens, states = case.tokens[:, :count], case.states[:, :count]
  given = jnp.asarray(tokens[:, :PROMPT], jnp.int32)
  prompt = given, jnp.asarray(states[:, :PROMPT])
  cache = model.prefill(served, prompt, jnp.ones(given.shape, bool), 16)
  fed = jnp.asarray(tokens[:, PROMPT - 1 :], jnp.int32)
  before = jnp.asarray(states[:, PROMPT - 2 : -1])
  logits, cache = model.decode(served, fed, cache, before)
  cache, chain = cache.replace(token_states=cache.token_states[:, -1:]), []
  for _ in range(STEPS):
    chain.append(np.asarray(jnp.argmax(logits[:, -1], axis=-1)))
    logits, cache = model.decode(served, jnp.asarray(chain[-1])[:, None], cache)
  longer, unknown = tokens, np.zeros_like(states[:, :1])
  for step in range(STEPS):
    known = np.concatenate([states, np.repeat(unknown, step, axis=1)], axis=1)
    at = theirs(case, longer, known, step + 1)[step][:, count - 2]
    drafted = case.ids[at.argmax(-1)]
    np.testing.assert_array_equal(drafted, chain[step])
    longer = np.concatenate([longer, drafted[:, None]], axis=1)
  assert len(np.unique(np.stack(chain))) > 10


def test_speculators_loads_what_we_write(case, tmp_path):
  *_, head = loaded(case)
  moved = jax.tree.map(lambda leaf: 1.01 * leaf, head.params)
  changed = dataclasses.replace(head, params=moved)
  path = heads.write(tmp_path / "ours", changed, "speculators")
  fields = json.loads((path / "config.json").read_text())
  config = speculators().Eagle3SpeculatorConfig.from_dict(fields)
  assert config.eagle_aux_hidden_state_layer_ids == list(STATE_LAYERS)
  config.transformer_layer_config._attn_implementation = "eager"
  model = speculators().Eagle3DraftModel.from_pretrained(path, config=config)
  model.embed_tokens.load_state_dict(case.head.embed_tokens.state_dict())
  other = types.SimpleNamespace(**{**vars(case), "head": model.eval()})
  again = heads.load(path, hugging_face.load(case.folder / "target").config)
  assert again.config == head.config
  found = ours(case, change=lambda params: {**params, **moved})
  assert differs(other, found) < 1e-4
  assert differs(case, found) > 1e-3  # negative control: the head did change
