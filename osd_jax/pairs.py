"""A target and its draft with the vocabulary they share: loaded, checked, placed."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from osd_jax import assets, base, remote, sharding
from osd_jax.data import tokenizers
from osd_jax.data.vocabulary import Vocabulary, stated_extra_ids
from osd_jax.models import attached, convert, families, weights
from osd_jax.models.families import ModelConfig
from osd_jax.models.shapes import AttachedConfig, DraftServing, T5Config

ATTACHED = "attached"  # in place of a file


@dataclasses.dataclass(frozen=True)
class PairConfig:
  """Which files make the pair.

  "shipped:NAME" is a file of the package, gs://BUCKET/NAME one in a bucket.

  >>> bring_only_a_target = PairConfig(target="flan-t5-large", draft="attached")
  >>> bring_only_a_target.attached.width
  128

  Attributes:
    target: weights of the target: a file of this package, or a folder of transformers
      (config.json beside safetensors), here or on the Hugging Face hub.
    draft: weights of the draft, likewise; or "attached": a draft that stands on the
      target, from random parameters. It grows from what it serves.
    vocabulary: what both read and write: a SentencePiece model, a tokenizer.json, or a
      folder that holds one (spiece.model, tokenizer.json, tokenizer.model).
    extra_ids: sentinels behind a T5's pieces, see `Vocabulary.load`.
    chat_template: of decoder-only models: "own" puts every prompt into the chat
      template of the vocabulary's folder; any other text is such a template; "" does
      nothing.
    dtype: "float32" or "bfloat16"; what both models compute in.
    draft_serving: what the served draft leaves out; the learner trains all of it.
    folder: where the paths above begin, unless they are absolute or shipped.
    attached: shape of an attached draft that begins at random; a file says its own.
    draft_seed: of its parameters.
    state_layer: layers of a decoder-only target that a prompt has passed where an
      attached draft reads it; 0: what the target's file says, mostly all.
  """

  target: str = "shipped:demo_target.safetensors"
  draft: str = "shipped:demo_attached_draft.safetensors"
  vocabulary: str = "shipped:demo_vocabulary.model"
  extra_ids: int = 0
  chat_template: str = ""
  dtype: str = "float32"
  draft_serving: DraftServing = DraftServing()
  folder: str = ""
  attached: AttachedConfig = AttachedConfig()
  draft_seed: int = 0
  state_layer: int = 0

  def __post_init__(self):
    base.check_types(self)
    base.check_choices(self, dtype=("float32", "bfloat16"))
    base.check_counts(self, "extra_ids", "draft_seed", "state_layer", least=0)
    paths = ("target", "draft", "vocabulary")
    base.check_fields(self, {f: (getattr(self, f), "a path") for f in paths})

  def path(self, field: str) -> Path:
    """The file or folder that "target", "draft" or "vocabulary" means."""
    value = getattr(self, field)
    if self.folder and not value.startswith(assets.PREFIX):
      if not remote.is_remote(self.folder) or remote.is_remote(value):
        return Path(self.folder) / value
      value = f"{self.folder.rstrip('/')}/{value}"
    return assets.resolve(value, f"PairConfig.{field}")


@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
  """A loaded pair, placed on the mesh.

  Attributes:
    target: functions of the target.
    target_params: its parameters, in the type that it computes in.
    rescoring_target: the target in float64, for certificates; needs `jax.enable_x64`.
    draft: functions of the draft; of `plain()` None.
    draft_params: its parameters.
    draft_config: shape of the draft, to write it back; None for a kind of your own.
    vocabulary: shared by both.
    identity: of the target, that an attached draft may stand on; None: it is not ours.
  """

  target: base.Model
  target_params: base.Params
  rescoring_target: base.Model
  draft: base.Model
  draft_params: base.Params
  draft_config: ModelConfig | AttachedConfig | None
  vocabulary: Vocabulary
  identity: weights.Identity | None = None

  def plain(self) -> "Pair":
    """The target alone."""
    return dataclasses.replace(self, draft=None, draft_params=None)

  def with_draft(self, draft: base.Model, params: base.Params) -> "Pair":
    """The same target with another draft."""
    return dataclasses.replace(
      self, draft=draft, draft_params=params, draft_config=None
    )

  def save_draft(
    self,
    path: str | Path,
    params: base.Params,
    notes: str,
    storage: str = "float32",
  ) -> Path:
    """Writes adapted parameters of the draft; `PairConfig.draft` reads our kinds."""
    trained, _ = self.draft.split(params)
    match self.draft_config:
      case None:
        return weights.save_tree(path, trained, notes, storage)
      case AttachedConfig():
        assert self.identity is not None
        fingerprint, name = self.identity.fingerprint, self.identity.name
        kept = weights.AttachedWeights(
          self.draft_config, trained, fingerprint, name, notes
        )
      case _:
        fingerprint = self.vocabulary.fingerprint
        kept = weights.Weights(self.draft_config, trained, fingerprint, notes)
    return weights.save(path, kept, storage)

  def load_draft(self, path: str | Path) -> base.Params:
    """Parameters that `save_draft` wrote of a draft of this pair, of a kind of ours.

    Raises:
      InputError: the file holds no such draft.
    """
    if isinstance(self.draft_config, AttachedConfig):
      assert self.identity is not None
      trained = weights.load_attached(path, self.identity).params
      return self.draft.join(trained, self.draft.split(self.draft_params)[1])
    return weights.load(path).params


def load_pair(
  config: PairConfig | Pair, partitioner: sharding.Partitioner | None = None
) -> Pair:
  """Reads the three files or folders; a loaded pair stays as it is.

  >>> load_pair(PairConfig()).vocabulary.size
  1536

  Raises:
    ValueError: a file is missing or holds no weights, or target, draft and vocabulary
      do not belong together.
  """
  if isinstance(config, Pair):
    return config
  partitioner = partitioner or sharding.make()
  vocabulary = tokenizers.load_any(
    config.path("vocabulary"), config.extra_ids, config.chat_template
  )
  target = _read(config, "target", config.path("target"), vocabulary)
  target = dataclasses.replace(target, config=handing_out(config, target.config))
  identity = weights.identity(target, Path(config.target).name)
  draft = _draft(config, target, identity, vocabulary)
  is_attached = isinstance(draft, weights.AttachedWeights)
  target_model = families.build(target.config, "target", return_states=is_attached)
  # It is never trained: more bits than it computes with would only take room.
  params = jax.tree.map(lambda leaf: jnp.asarray(leaf, config.dtype), target.params)
  target_params = partitioner.place_params(target_model, params)
  if is_attached:
    draft_model = attached.build(
      draft.config, target.config, "attached draft", config.draft_serving
    )
  else:
    draft_model = families.build(draft.config, "draft", config.draft_serving)
  draft_params = partitioner.place_draft(draft_model, draft.params)
  if is_attached:
    frozen = attached.frozen_of(target.config, target_params, config.draft_serving)
    draft_params = draft_model.join(draft_params, frozen)
  return Pair(
    target=target_model,
    target_params=target_params,
    rescoring_target=families.build(
      dataclasses.replace(target.config, dtype="float64"), "rescoring target"
    ),
    draft=draft_model,
    draft_params=draft_params,
    draft_config=draft.config,
    vocabulary=vocabulary,
    identity=identity,
  )


def shape_of(config: PairConfig, field: str) -> ModelConfig | AttachedConfig:
  """The shape of "target" or "draft" as a file, or a folder's config.json, states it.

  Raises:
    InputError: there is no such file.
  """
  path = config.path(field)
  try:
    if path.is_dir():
      return convert.shape_of_hugging_face(path)
    return weights.shape_of(path)
  except base.InputError as error:
    raise base.InputError(f"PairConfig.{field}: {error}") from error


def handing_out(config: PairConfig, shape: ModelConfig) -> ModelConfig:
  """The target's shape with `PairConfig.state_layer`.

  Raises:
    InputError: it has no such layer, or an encoder, which is read whole.
  """
  if not config.state_layer:
    return shape
  if isinstance(shape, T5Config) or config.state_layer > shape.num_layers:
    layers = "an encoder" if isinstance(shape, T5Config) else shape.num_layers
    raise base.InputError(
      f"PairConfig.state_layer: received {config.state_layer}, expected at most the"
      f" layers of a decoder-only target; {config.target} has {layers}. 0 reads what"
      " has passed all."
    )
  return dataclasses.replace(shape, state_layer=config.state_layer)


def check_vocabulary(
  config: Any, field: str, held: weights.Weights, vocabulary: Vocabulary
) -> None:
  """Raises InputError unless weights can be those of a vocabulary.

  Args:
    config: has fields `vocabulary` and `extra_ids`, which made it.
    field: the field of `config` that names the weights.
    held: the weights.
    vocabulary: the vocabulary.
  """
  name, path = type(config).__name__, getattr(config, field)
  _check_family(config, field, held, vocabulary)
  size, wanted = held.config.vocab_size, _wanted_extra_ids(held, vocabulary)
  if wanted not in (None, config.extra_ids):
    raise base.InputError(
      f"{name}.extra_ids: received {config.extra_ids}, expected {wanted} for {path}: so"
      " many sentinels stand behind the pieces of its vocabulary."
    )
  if held.vocabulary not in ("", vocabulary.fingerprint):
    raise base.InputError(
      f"{name}.{field}: {path} was trained with the vocabulary"
      f" {held.vocabulary[:12]}..., but {name}.vocabulary {config.vocabulary} with"
      f" extra_ids {config.extra_ids} is {vocabulary.fingerprint[:12]}..."
      f" ({vocabulary.size} ids); expected the same. Name the vocabulary that the"
      " weights were trained with."
    )
  if size < vocabulary.size:
    raise base.InputError(
      f"{name}.{field}: {path} has {size} token ids, expected at least the"
      f" {vocabulary.size} of {config.vocabulary} with extra_ids {config.extra_ids}."
    )


def _check_family(
  config: Any, field: str, held: weights.Weights, vocabulary: Vocabulary
) -> None:
  """Raises InputError where weights and vocabulary are of different families."""
  name, path = type(config).__name__, getattr(config, field)
  is_causal = not isinstance(held.config, T5Config)
  if is_causal != vocabulary.is_causal:
    kinds = ("T5", "decoder-only model")
    raise base.InputError(
      f"{name}.{field}: {path} is a {kinds[is_causal]}, but {name}.vocabulary"
      f" {config.vocabulary} is the vocabulary of a {kinds[vocabulary.is_causal]};"
      " name the one that the weights were trained with."
    )
  if not isinstance(held.config, T5Config) and vocabulary.eos_ids[0] not in (
    held.config.eos_ids
  ):
    raise base.InputError(
      f"{name}.{field}: {path} ends a sequence with {held.config.eos_ids}, but"
      f" {name}.vocabulary {config.vocabulary} with {vocabulary.eos_ids[0]}; expected"
      " one of them. Put the eos_token_id right in the folder's"
      " generation_config.json."
    )


def _wanted_extra_ids(held: weights.Weights, vocabulary: Vocabulary) -> int | None:
  """How many sentinels a vocabulary must have for some weights, None if unknown."""
  if vocabulary.is_causal:
    return None
  if held.vocabulary:
    for count in (0, 100):
      known = Vocabulary.load(vocabulary.path, count)
      if known.fingerprint == held.vocabulary:
        return count
    return None
  pieces = vocabulary.size - vocabulary.extra_ids
  # Published models say so in their tokenizer's settings or have T5's own numbers.
  is_t5 = pieces == 32_000 and held.config.vocab_size in (32_100, 32_128)
  stated = stated_extra_ids(vocabulary)
  return 100 if is_t5 and stated is None else stated


def _draft(
  config: PairConfig,
  target: weights.Weights,
  identity: weights.Identity,
  vocabulary: Vocabulary,
) -> weights.Weights | weights.AttachedWeights:
  """The draft of a file, or one that stands on the target from random parameters."""
  if config.draft == ATTACHED:
    model = attached.build(config.attached, target.config)
    params = jax.jit(model.init)(jax.random.key(config.draft_seed))
    return weights.AttachedWeights(config.attached, params, identity.fingerprint)
  path = config.path("draft")
  if weights.is_attached(path):
    try:
      return weights.load_attached(path, identity)
    except base.InputError as error:
      raise base.InputError(f"PairConfig.draft: {error}") from error
  draft = _read(config, "draft", path, vocabulary)
  if type(target.config) is not type(draft.config):
    raise base.InputError(
      f"PairConfig: target {config.target} is a {type(target.config).__name__}, draft"
      f" {config.draft} a {type(draft.config).__name__}; expected models of one family."
    )
  if target.config.vocab_size != draft.config.vocab_size:
    raise base.InputError(
      f"PairConfig: target {config.target} has {target.config.vocab_size} token ids,"
      f" draft {config.draft} has {draft.config.vocab_size}; expected the same"
      " number. Choose a draft trained with the target's vocabulary."
    )
  return draft


def _read(
  config: PairConfig, field: str, path: Path, vocabulary: Vocabulary
) -> weights.Weights:
  read = convert.read_hugging_face if path.is_dir() else weights.load
  try:
    held = read(path)
  except base.InputError as error:
    raise base.InputError(f"PairConfig.{field}: {error}") from error
  check_vocabulary(config, field, held, vocabulary)
  return dataclasses.replace(
    held, config=dataclasses.replace(held.config, dtype=config.dtype)
  )
