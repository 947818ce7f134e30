"""What a T5 is made of, and what a served draft leaves out: checked numbers."""

import dataclasses

from osd_jax import base, native
from osd_jax.models import layers


@dataclasses.dataclass(frozen=True)
class T5Config:
  """Shape of a T5. The defaults are t5-small's (T5 1.0).

  Attributes:
    vocab_size: V, rows of the embedding (checkpoints pad 32,100 to 32,128).
    width: E, size of a token's vector.
    num_heads: H, heads of every attention.
    head_dim: D, size of one head.
    mlp_dim: inner width of the feed-forward block.
    num_encoder_layers: encoder layers.
    num_decoder_layers: L, decoder layers.
    mlp_activations: ("relu",) for 1.0, ("gelu", "linear") for 1.1 and Flan.
    tied_head: the output head is the embedding, scaled by width ** -0.5.
    relative_buckets: entries of the relative position bias.
    relative_max_distance: distances from here on share a bucket.
    dtype: "float32" or "bfloat16"; compute type and type of the served copy. "float64"
      is for rescoring alone and needs `jax.enable_x64`.
    embedding_std: standard deviation of the initial embedding (t5x: 1).
  """

  vocab_size: int = 32128
  width: int = 512
  num_heads: int = 8
  head_dim: int = 64
  mlp_dim: int = 2048
  num_encoder_layers: int = 6
  num_decoder_layers: int = 6
  mlp_activations: tuple[str, ...] = ("relu",)
  tied_head: bool = True
  relative_buckets: int = 32
  relative_max_distance: int = 128
  dtype: str = "float32"
  embedding_std: float = 1.0

  def __post_init__(self):
    object.__setattr__(self, "mlp_activations", tuple(self.mlp_activations))
    base.check_types(self)
    base.check_choices(self, dtype=("float32", "bfloat16", "float64"))
    base.check_counts(self, "vocab_size", "width", "num_heads", "head_dim", "mlp_dim")
    base.check_counts(self, "num_encoder_layers", "num_decoder_layers")
    half, known = self.relative_buckets // 2, layers.ACTIVATIONS
    base.check_fields(
      self,
      {
        "relative_buckets": (
          half >= 2 and self.relative_buckets % 2 == 0,
          "an even number >= 4 (the encoder halves it for both directions)",
        ),
        "relative_max_distance": (
          self.relative_max_distance > half,
          f"more than {half}, half of relative_buckets: those hold one distance each",
        ),
        "embedding_std": (0 < self.embedding_std < float("inf"), "a finite number > 0"),
        "mlp_activations": (
          self.mlp_activations and set(self.mlp_activations) <= known.keys(),
          f"names out of {sorted(known)}",
        ),
      },
    )

  @property
  def head_scale(self) -> float:
    """What the decoder's output is multiplied with before the head."""
    return self.width**-0.5 if self.tied_head else 1.0

  @property
  def eos_ids(self) -> tuple[int, ...]:
    """Tokens that end a sequence; every T5 has the same."""
    return (base.EOS_ID,)


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """Stretched rotary positions, as Llama 3.1 introduced them ("llama3").

  Attributes:
    factor: wavelengths far beyond the original context are longer by this.
    low_freq_factor: the original context over this is the shortest of them.
    high_freq_factor: wavelengths below the original context over this stay.
    original_positions: length of the context before.
  """

  factor: float = 8.0
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_positions: int = 8192

  def __post_init__(self):
    base.check_types(self)
    base.check_counts(self, "original_positions")
    low, high = self.low_freq_factor, self.high_freq_factor
    checks = {
      "factor": (self.factor >= 1, "a number >= 1"),
      "low_freq_factor": (low > 0, "a number > 0"),
      "high_freq_factor": (high > low, f"more than low_freq_factor ({low})"),
    }
    base.check_fields(self, checks)


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
  """Shape of a decoder-only model: Llama, Vicuna, Mistral, Qwen2, Qwen3. Llama-2-7B's.

  Attributes:
    vocab_size: V, rows of the embedding.
    width: E, size of a token's vector.
    num_heads: H, heads of the queries.
    num_kv_heads: heads of keys and values, a divisor of H; each serves H / that many.
    head_dim: D, size of one head.
    mlp_dim: inner width of the feed-forward block.
    num_layers: L, decoder layers.
    tied_head: the output head is the embedding.
    rope_theta: base of the rotary positions' wavelengths.
    rope_scaling: stretches them; None does not.
    norm_epsilon: added to mean squares.
    attention_bias: queries, keys and values have a bias (Qwen2).
    output_bias: the attention's output has one too.
    query_key_norm: queries and keys of every head are normalised (Qwen3).
    max_positions: of prompt and output together.
    eos_ids: tokens that end a sequence.
    state_layer: an attached draft takes the hidden states after this many layers; 0
      means after all of them.
    dtype: as in `T5Config`.
    embedding_std: standard deviation of the initial embedding.
  """

  vocab_size: int = 32000
  width: int = 4096
  num_heads: int = 32
  num_kv_heads: int = 32
  head_dim: int = 128
  mlp_dim: int = 11008
  num_layers: int = 32
  tied_head: bool = False
  rope_theta: float = 10000.0
  rope_scaling: RopeScaling | None = None
  norm_epsilon: float = 1e-5
  attention_bias: bool = False
  output_bias: bool = False
  query_key_norm: bool = False
  max_positions: int = 4096
  eos_ids: tuple[int, ...] = (2,)
  state_layer: int = 0
  dtype: str = "float32"
  embedding_std: float = 1.0

  def __post_init__(self):
    if isinstance(self.rope_scaling, dict):  # read from a file
      object.__setattr__(self, "rope_scaling", RopeScaling(**self.rope_scaling))
    object.__setattr__(self, "eos_ids", tuple(self.eos_ids))
    base.check_types(self)
    base.check_choices(self, dtype=("float32", "bfloat16", "float64"))
    base.check_counts(self, "vocab_size", "width", "num_heads", "num_kv_heads")
    base.check_counts(self, "head_dim", "mlp_dim", "num_layers", "max_positions")
    base.check_counts(self, "state_layer", least=0)
    heads, ends = self.num_heads, self.eos_ids
    base.check_fields(
      self,
      {
        "num_kv_heads": (
          heads % self.num_kv_heads == 0,
          f"a divisor of num_heads ({heads})",
        ),
        "head_dim": (self.head_dim % 2 == 0, "an even number: halves are rotated"),
        "rope_theta": (self.rope_theta > 0, "a number > 0"),
        "norm_epsilon": (0 < self.norm_epsilon < 1, "a small number > 0"),
        "eos_ids": (
          ends and all(base.is_count(i, 0) and i < self.vocab_size for i in ends),
          f"ids in 0..{self.vocab_size - 1}, at least one",
        ),
        "state_layer": (
          self.state_layer <= self.num_layers,
          f"an integer in 0..num_layers ({self.num_layers})",
        ),
        "embedding_std": (0 < self.embedding_std < float("inf"), "a finite number > 0"),
      },
    )

  @property
  def head_scale(self) -> float:
    """What the decoder's output is multiplied with before the head."""
    return 1.0

  @property
  def queries_per_head(self) -> int:
    """Heads of queries that share one head of keys and values."""
    return self.num_heads // self.num_kv_heads

  @property
  def last_state_layer(self) -> int:
    """Number of layers before the hidden states that an attached draft takes."""
    return self.state_layer or self.num_layers


@dataclasses.dataclass(frozen=True)
class AttachedConfig:
  """Shape of a draft that is attached to a target; see `models/attached.py`.

  >>> AttachedConfig(width=64, num_heads=2).decoder(T5Config()).num_decoder_layers
  1

  Attributes:
    width: size of a token's vector between the target's embedding and its head.
    num_heads: H, heads of every attention.
    head_dim: D, size of one head.
    mlp_dim: inner width of the feed-forward block.
    num_layers: L, decoder layers.
    mlp_activations: as in `T5Config`.
    relative_buckets: as in `T5Config`.
    relative_max_distance: as in `T5Config`.
  """

  width: int = 128
  num_heads: int = 4
  head_dim: int = 32
  mlp_dim: int = 384
  num_layers: int = 1
  mlp_activations: tuple[str, ...] = ("gelu", "linear")
  relative_buckets: int = 32
  relative_max_distance: int = 128

  def __post_init__(self):
    object.__setattr__(self, "mlp_activations", tuple(self.mlp_activations))
    base.check_types(self)
    base.check_counts(self, "num_layers")
    self.decoder(T5Config())  # checks the rest

  def decoder(self, target: T5Config | LlamaConfig) -> T5Config:
    """The shape of its decoder layers, in the compute type of a target."""
    return T5Config(
      vocab_size=target.vocab_size,
      width=self.width,
      num_heads=self.num_heads,
      head_dim=self.head_dim,
      mlp_dim=self.mlp_dim,
      num_encoder_layers=1,  # never built
      num_decoder_layers=self.num_layers,
      mlp_activations=self.mlp_activations,
      relative_buckets=self.relative_buckets,
      relative_max_distance=self.relative_max_distance,
      dtype=target.dtype,
    )


@dataclasses.dataclass(frozen=True)
class DraftServing:
  """What a served draft may leave out: only the target decides what is emitted.

  Attributes:
    int8: decoder and output head are quantised to 8 bits; the learner keeps its own.
    shortlist: N, tokens that the output head covers; others get no mass. 0 covers all.
  """

  int8: bool = False
  shortlist: int = 0

  def __post_init__(self):
    base.check_types(self)
    fits = self.shortlist == 0 or self.shortlist >= 2
    expected = "at least 2 tokens (end-of-sequence is one), or 0 for all"
    base.check_fields(self, {"shortlist": (fits, expected)})

  @property
  def layout(self) -> layers.Layout:
    """Of the decoder's kernels; but for CPUs, as they were trained: no second copy."""
    if self.int8:
      return layers.Layout.INT8
    return layers.Layout.SERVED if native.forms() else layers.Layout.TRAINED
