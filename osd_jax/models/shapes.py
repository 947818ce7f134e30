"""Configurations: shapes of models, and approximations in a served draft."""

import dataclasses
from typing import Annotated, ClassVar

from osd_jax import base, native

ACTIVATIONS = ("relu", "gelu", "silu", "linear")  # `layers` computes them
ComputeType = Annotated[str, base.OneOf("float32", "bfloat16", "float64")]
Activations = Annotated[
  tuple[Annotated[str, base.OneOf(*ACTIVATIONS)], ...],
  base.NonEmpty("at least one name"),
]


@dataclasses.dataclass(frozen=True)
class T5Config(base.Config):
  """Shape of a T5. The defaults are t5-small's (T5 1.0).

  Attributes:
    vocab_size: V, rows of the embedding (checkpoints pad 32,100 to 32,128).
    width: E, size of the embeddings and of the residual stream.
    num_heads: H, attention heads.
    head_dim: D, size of one head.
    mlp_dim: inner width of the feed-forward blocks.
    num_encoder_layers: encoder layers.
    num_decoder_layers: L, decoder layers.
    mlp_activations: ("relu",) for T5 1.0, ("gelu", "linear") for T5 1.1 and Flan-T5.
    tied_head: the embedding is also the output head, applied to the decoder's output
      times width ** -0.5.
    relative_buckets: entries of the relative position bias per head.
    relative_max_distance: all distances of at least this many tokens share a bucket.
    dtype: "float32" or "bfloat16"; the type that the model computes in and that its
      served copy has. "float64" is used for rescoring and needs `jax.enable_x64`.
    embedding_std: standard deviation of the initial embedding (1 in t5x).
  """

  vocab_size: base.Count = 32128
  width: base.Count = 512
  num_heads: base.Count = 8
  head_dim: base.Count = 64
  mlp_dim: base.Count = 2048
  num_encoder_layers: base.Count = 6
  num_decoder_layers: base.Count = 6
  mlp_activations: Activations = ("relu",)
  tied_head: bool = True
  relative_buckets: int = 32
  relative_max_distance: int = 128
  dtype: ComputeType = "float32"
  embedding_std: base.Positive = 1.0

  # The same for every T5; see `LlamaConfig`.
  embedding_scale: ClassVar[float] = 1.0
  logit_cap: ClassVar[float] = 0.0
  eos_ids: ClassVar[tuple[int, ...]] = (base.EOS_ID,)

  def checks(self):
    half = self.relative_buckets // 2
    return {
      "relative_buckets": (
        half >= 2 and self.relative_buckets % 2 == 0,
        "an even number >= 4 (the encoder uses half of them for each direction)",
      ),
      "relative_max_distance": (
        self.relative_max_distance > half,
        f"more than {half}, half of relative_buckets: those hold one distance each",
      ),
    }

  @property
  def head_scale(self) -> float:
    """Factor on the decoder's output before the output head."""
    return self.width**-0.5 if self.tied_head else 1.0


@dataclasses.dataclass(frozen=True)
class RopeScaling(base.Config):
  """Stretched rotary positions, as introduced by Llama 3.1 ("llama3").

  Attributes:
    factor: long wavelengths are multiplied by this.
    low_freq_factor: wavelengths above original_positions / low_freq_factor are long.
    high_freq_factor: wavelengths below original_positions / high_freq_factor are short
      and stay as they are; between the two limits the factor is interpolated.
    original_positions: context length before stretching.
  """

  factor: Annotated[float, base.AtLeast(1)] = 8.0
  low_freq_factor: base.Positive = 1.0
  high_freq_factor: float = 4.0
  original_positions: base.Count = 8192

  def checks(self):
    low = self.low_freq_factor
    high_enough = self.high_freq_factor > low
    return {"high_freq_factor": (high_enough, f"more than low_freq_factor ({low})")}


@dataclasses.dataclass(frozen=True)
class LlamaConfig(base.Config):
  """Shape of a decoder-only model: Llama, Vicuna, Mistral, Qwen or Gemma.

  The defaults are Llama-2-7B's.

  Attributes:
    vocab_size: V, rows of the embedding.
    width: E, size of a token's vector.
    num_heads: H, query heads.
    num_kv_heads: heads of keys and values, a divisor of H. Each is shared by
      H / num_kv_heads query heads.
    head_dim: D, size of one head.
    mlp_dim: inner width of the feed-forward blocks.
    num_layers: L, decoder layers.
    mlp_activations: of the gated feed-forward blocks; ("gelu", "linear") in a Gemma.
    tied_head: the embedding is also the output head.
    rope_theta: base of the rotary wavelengths.
    rope_scaling: stretches the wavelengths; None leaves them as they are.
    rope_factor: positions are divided by this, another kind of stretching.
    local_rope_theta: base of the wavelengths in layers with a window, which are not
      stretched (Gemma 3); 0 treats all layers alike.
    windows: number of tokens that each layer attends to, the token itself included; 0
      means all. The tuple is repeated for all layers: (512, 512, 0) has full attention
      in every third layer.
    norm_epsilon: added to mean squares before the root.
    attention_bias: query, key and value projections have a bias (Qwen2).
    output_bias: the output projection of the attention has a bias.
    query_key_norm: queries and keys are normalized per head (Qwen3, Gemma 3).
    query_pre_attn_scalar: queries are divided by the root of this; 0 means head_dim.
    attention_cap: attention logits are bounded to this by a tanh (Gemma 2); 0 means no
      bound.
    logit_cap: the same for the logits of the output head.
    post_norms: the results of attention and feed-forward block are normalized (Gemma).
    unit_offset_norms: norms multiply by 1 + scale (Gemma).
    scaled_embeddings: embedded tokens are multiplied by the root of `width` (Gemma).
    max_positions: longest prompt and output together, in tokens.
    eos_ids: tokens that end a sequence.
    state_layer: an attached draft takes the hidden states after this many layers; 0
      means after all of them.
    dtype: as in `T5Config`.
    embedding_std: standard deviation of the initial embedding.
  """

  vocab_size: base.Count = 32000
  width: base.Count = 4096
  num_heads: base.Count = 32
  num_kv_heads: base.Count = 32
  head_dim: base.Count = 128
  mlp_dim: base.Count = 11008
  num_layers: base.Count = 32
  mlp_activations: Activations = ("silu", "linear")
  tied_head: bool = False
  rope_theta: base.Positive = 10000.0
  rope_scaling: RopeScaling | None = None
  rope_factor: base.Positive = 1.0
  local_rope_theta: base.NonNegative = 0.0
  windows: Annotated[tuple[base.CountOrZero, ...], base.NonEmpty("at least one")] = (0,)
  norm_epsilon: Annotated[float, base.Above(0), base.Below(1)] = 1e-5
  attention_bias: bool = False
  output_bias: bool = False
  query_key_norm: bool = False
  query_pre_attn_scalar: base.NonNegative = 0.0
  attention_cap: base.NonNegative = 0.0
  logit_cap: base.NonNegative = 0.0
  post_norms: bool = False
  unit_offset_norms: bool = False
  scaled_embeddings: bool = False
  max_positions: base.Count = 4096
  eos_ids: tuple[int, ...] = (2,)
  state_layer: base.CountOrZero = 0
  dtype: ComputeType = "float32"
  embedding_std: base.Positive = 1.0

  head_scale: ClassVar[float] = 1.0  # as in `T5Config`

  def checks(self):
    heads, vocab_size = self.num_heads, self.vocab_size
    return {
      "num_kv_heads": (
        heads % self.num_kv_heads == 0,
        f"a divisor of num_heads ({heads})",
      ),
      "head_dim": (self.head_dim % 2 == 0, "an even number: halves are rotated"),
      "eos_ids": (
        self.eos_ids and all(0 <= i < vocab_size for i in self.eos_ids),
        f"ids in 0..{vocab_size - 1}, at least one",
      ),
      "state_layer": (
        self.state_layer <= self.num_layers,
        f"an integer in 0..num_layers ({self.num_layers})",
      ),
    }

  @property
  def embedding_scale(self) -> float:
    """Factor on embedded tokens."""
    return self.width**0.5 if self.scaled_embeddings else 1.0

  @property
  def query_scale(self) -> float:
    """Factor on queries."""
    return (self.query_pre_attn_scalar or self.head_dim) ** -0.5

  def window_of(self, layer: int) -> int:
    """Number of tokens that a layer attends to; 0 means all."""
    return self.windows[layer % len(self.windows)]

  @property
  def queries_per_head(self) -> int:
    """Query heads that share one head of keys and values."""
    return self.num_heads // self.num_kv_heads

  @property
  def last_state_layer(self) -> int:
    """`state_layer` as a number in 1..num_layers."""
    return self.state_layer or self.num_layers


@dataclasses.dataclass(frozen=True)
class T5GemmaConfig(LlamaConfig):
  """Shape of a T5Gemma, whose encoder and decoder differ in their depth only.

  The other fields are those of `LlamaConfig`. An attached draft takes the output of the
  encoder, so `state_layer` is not used.

  Attributes:
    num_encoder_layers: encoder layers.
    start_id: first input of the decoder.
  """

  num_encoder_layers: base.Count = 26
  start_id: base.CountOrZero = 2


@dataclasses.dataclass(frozen=True)
class AttachedConfig(base.Config):
  """Shape of an attached draft; see `models/attached.py`.

  >>> AttachedConfig(width=64, num_heads=2).decoder(T5Config()).num_decoder_layers
  1

  Attributes:
    width: size of the draft's own residual stream.
    num_heads: H, heads of every attention.
    head_dim: D, size of one head.
    mlp_dim: inner width of the feed-forward blocks.
    num_layers: L, decoder layers.
    mlp_activations: as in `T5Config`.
    relative_buckets: as in `T5Config`.
    relative_max_distance: as in `T5Config`.
    reads: "prompt": the target's hidden states of the prompt; "tokens": also the one
      before every verified token, as EAGLE does.
  """

  # Without constraints of their own: `decoder` makes a T5Config, which checks them.
  width: int = 128
  num_heads: int = 4
  head_dim: int = 32
  mlp_dim: int = 384
  num_layers: base.Count = 1
  mlp_activations: Activations = ("gelu", "linear")
  relative_buckets: int = 32
  relative_max_distance: int = 128
  reads: Annotated[str, base.OneOf("prompt", "tokens")] = "prompt"

  def checks(self):
    self.decoder(T5Config())  # raises if its layers cannot be built
    return {}

  def decoder(self, target: T5Config | LlamaConfig) -> T5Config:
    """The shape of the decoder layers, computing in the dtype of a target."""
    fields = {
      field.name: getattr(self, field.name) for field in dataclasses.fields(self)
    }
    del fields["reads"]
    return T5Config(
      vocab_size=target.vocab_size,
      num_encoder_layers=1,  # T5Config needs one; no encoder is built
      num_decoder_layers=fields.pop("num_layers"),
      dtype=target.dtype,
      **fields,
    )


@dataclasses.dataclass(frozen=True)
class EagleConfig(base.Config):
  """Shape of an EAGLE-3 head; see `models/eagle.py`.

  Attributes:
    layers: shape of its layers, as of a model with the target's vocabulary. Its dtype,
      end-of-sequence tokens and tied head are not used.
    draft_vocab_size: number of tokens that its output head covers.
    state_layers: the head reads the target's hidden states after each of these numbers
      of layers; 0 is the embedding.
    norm_before_residual: the first layer adds to the normalized states, not to the
      states.
    state_norm: how the target's states are normalized first: "", "joined" all
      together, or "each" by itself.
    norm_output: the head's next step goes on from its normalized outputs.
  """

  layers: LlamaConfig = LlamaConfig(num_layers=1)
  draft_vocab_size: base.Count = 32000
  state_layers: Annotated[
    tuple[base.CountOrZero, ...], base.NonEmpty("at least one number")
  ] = (2, 16, 29)
  norm_before_residual: bool = False
  state_norm: Annotated[str, base.OneOf("", "joined", "each")] = ""
  norm_output: bool = False

  def checks(self):
    layers, usual = self.layers, LlamaConfig()
    # Other engines have no heads with these.
    refused = ("windows", "post_norms", "unit_offset_norms", "scaled_embeddings")
    refused += ("attention_cap", "logit_cap", "query_pre_attn_scalar")
    is_plain = all(getattr(layers, name) == getattr(usual, name) for name in refused)
    return {
      "draft_vocab_size": (
        self.draft_vocab_size <= layers.vocab_size,
        f"at most the vocabulary of the target ({layers.vocab_size})",
      ),
      "layers": (
        is_plain and layers.attention_bias == layers.output_bias,
        "layers of a Llama or Qwen3: with biases in all projections of the attention or"
        f" in none, and the defaults of {', '.join(refused)}",
      ),
    }

  @property
  def reads(self) -> tuple[int, ...]:
    """The states that the target keeps; see `AttachedConfig.reads`."""
    return self.state_layers

  def decoder(self, target: T5Config | LlamaConfig) -> LlamaConfig:
    """The shape of the layers and of the output head, in the dtype of a target."""
    return dataclasses.replace(
      self.layers,
      vocab_size=self.draft_vocab_size,
      eos_ids=(0,),
      tied_head=False,
      dtype=target.dtype,
    )


@dataclasses.dataclass(frozen=True)
class DraftServing(base.Config):
  """Approximations in the copy of a draft that serves requests.

  They change which tokens are proposed and never which are emitted, because the target
  verifies every token. The learner trains the full draft.

  Attributes:
    int8: quantize the decoder and the output head to 8 bits.
    shortlist: N, number of tokens that the output head covers; all other tokens have
      probability 0. 0 covers the whole vocabulary.
  """

  int8: bool = False
  shortlist: base.CountOrZero = 0

  def checks(self):
    # One token would be end-of-sequence, which a shortlist always contains.
    expected = "at least 2 tokens (end-of-sequence is one), or 0 for all"
    return {"shortlist": (self.shortlist != 1, expected)}

  @property
  def layout(self) -> base.Layout:
    """How the served decoder stores its kernels.

    On a mesh, which splits the outputs of each kernel, the trained kernels are served.
    """
    if self.int8:
      return base.Layout.INT8
    if native.is_split():
      return base.Layout.TRAINED
    return base.Layout.SERVED if native.forms() else base.Layout.PACKED


EXACT_SERVING = DraftServing()  # no approximation
