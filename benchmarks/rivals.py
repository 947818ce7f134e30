"""Hugging Face `generate`, plain and assisted, on the same shapes."""

import functools
from collections.abc import Callable
from typing import Any

import contenders
import numpy as np
import torch
import transformers

from osd_jax.models.convert import hugging_face
from osd_jax.models.families import ModelConfig
from osd_jax.models.shapes import T5Config

transformers.logging.set_verbosity_error()

ATTEMPTS = 16


def random_model(config: ModelConfig, dtype: str = "float32", seed: int = 0) -> Any:
  """Returns a transformers model with random weights.

  Args:
    config: shape of the model.
    dtype: "float32" or "bfloat16".
    seed: seed of the weights.
  """
  torch.manual_seed(seed)
  if not isinstance(config, T5Config):
    fields = hugging_face.config_to(config)
    theirs = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = transformers.AutoModelForCausalLM.from_config(theirs)
    model.generation_config.pad_token_id = 0
    return model.to(getattr(torch, dtype)).eval()
  gated = len(config.mlp_activations) > 1
  theirs = transformers.T5Config(
    vocab_size=config.vocab_size,
    d_model=config.width,
    num_heads=config.num_heads,
    d_kv=config.head_dim,
    d_ff=config.mlp_dim,
    num_layers=config.num_encoder_layers,
    num_decoder_layers=config.num_decoder_layers,
    feed_forward_proj="gated-gelu" if gated else "relu",
    tie_word_embeddings=config.tied_head,
    decoder_start_token_id=0,
    dropout_rate=0.0,
  )
  model = transformers.T5ForConditionalGeneration(theirs)
  return model.to(getattr(torch, dtype)).eval()


class HuggingFace:
  """Greedy answers of a fixed length by `generate`.

  Attributes:
    tokens: output tokens per call.
  """

  def __init__(
    self,
    model: Any,
    sources: np.ndarray,
    target: int,
    assistant: Any = None,
    num_draft_tokens: int = 0,
  ):
    """Answers all `sources` [N, S] at each call, `target` tokens each.

    Args:
      model: target.
      sources: prompts; assisted generation processes them one at a time.
      target: output tokens per prompt.
      assistant: draft; None for plain generation.
      num_draft_tokens: constant K of assisted generation.
    """
    self._model, self._assistant, self._target = model, assistant, target
    batches = [sources] if assistant is None else [row[None] for row in sources]
    self._batches = [torch.from_numpy(batch.astype(np.int64)) for batch in batches]
    self.tokens = len(sources) * target
    if assistant is not None:
      settings = assistant.generation_config
      settings.num_assistant_tokens = num_draft_tokens
      settings.num_assistant_tokens_schedule = "constant"
      settings.assistant_confidence_threshold = 0.0
      settings.eos_token_id = None

  @torch.inference_mode()
  def __call__(self) -> np.ndarray:
    outputs = [
      self._model.generate(
        batch,
        attention_mask=torch.ones_like(batch),
        do_sample=False,
        num_beams=1,
        max_new_tokens=self._target,
        eos_token_id=None,
        assistant_model=self._assistant,
      )
      for batch in self._batches
    ]
    tokens = torch.cat(outputs)[
      :, -self._target :
    ].numpy()  # without the prompt or start token
    assert tokens.size == self.tokens, tokens.shape
    return tokens


class Scripted:
  """Assisted generation whose drafted tokens are right with probability alpha.

  Attributes:
    tokens: output tokens per call.
  """

  def __init__(
    self,
    model: Any,
    assistant: Any,
    sources: np.ndarray,
    target: int,
    num_draft_tokens: int,
    alpha: float,
  ):
    """Generates the continuations from which the scripts are made.

    Args:
      model: target.
      assistant: draft; its `forward` is replaced.
      sources: [N, S] prompts.
      target: output tokens per prompt.
      num_draft_tokens: K.
      alpha: synthetic acceptance.
    """
    self._alpha, self._size = alpha, model.config.vocab_size
    begun = 0 if model.config.is_encoder_decoder else sources.shape[1] - 1
    self._choose = script(assistant, begun)
    self._serve = [
      HuggingFace(model, row[None], target, assistant, num_draft_tokens)
      for row in sources
    ]
    self.tokens = len(sources) * target
    plain = [HuggingFace(model, row[None], target)() for row in sources]
    self._script(np.concatenate(plain))
    for _ in range(ATTEMPTS):  # bfloat16 verification can differ from plain decoding
      emitted = self()
      if np.array_equal(emitted, self._emitted):
        break
      self._script(emitted)

  def _script(self, emitted: np.ndarray) -> None:
    self._emitted = emitted
    self._wanted = [
      contenders.corrupted(row[None], self._alpha, self._size, seed=index)[0]
      for index, row in enumerate(emitted)
    ]

  def __call__(self) -> np.ndarray:
    found = []
    for script, serve in zip(self._wanted, self._serve, strict=True):
      self._choose(script)
      found.append(serve())
    return np.concatenate(found)


def script(assistant: Any, begun: int = 0) -> Callable[[np.ndarray], None]:
  """Makes an assistant draft scripted tokens, as `contenders.scripted` does.

  The assistant runs in full; then the scripted token gets the largest logit.

  Args:
    assistant: changed in place.
    begun: number of inputs before the one that predicts the first output token.

  Returns:
    A function that sets the script [T] int32 of the next request.
  """
  forward, current = assistant.forward, {}

  def choose(tokens: np.ndarray) -> None:
    current["script"] = torch.from_numpy(tokens.astype(np.int64))

  @functools.wraps(forward)  # generate() reads the signature
  def scripted(*args, **kwargs):
    past, tokens = kwargs.get("past_key_values"), current["script"]
    before = 0 if past is None else int(past.get_seq_length())
    output = forward(*args, **kwargs)
    count = output.logits.shape[1]
    at = torch.arange(before - begun, before - begun + count)
    at = at.clamp(min=0, max=len(tokens) - 1)
    top = output.logits.amax(-1) + 1
    output.logits[0, torch.arange(count), tokens[at]] = top[0]
    return output

  assistant.forward = scripted
  return choose
