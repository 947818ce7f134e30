"""Loads a target, its draft and their vocabulary, checks and places them."""

import contextlib
import dataclasses
import functools
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np

from osd_jax import assets, base, formats, remote, runs, sharding
from osd_jax.data.vocabulary import Vocabulary, stated_extra_ids
from osd_jax.decoding import ngrams
from osd_jax.models import attached, eagle, families, served, weights
from osd_jax.models.convert import eagle as heads
from osd_jax.models.convert import folders, hugging_face
from osd_jax.models.families import ModelConfig
from osd_jax.models.shapes import (
  EXACT_SERVING,
  AttachedConfig,
  DraftServing,
  EagleConfig,
  LlamaConfig,
  T5Config,
  T5GemmaConfig,
)

# Values of `PairConfig.draft`: a new draft instead of a file
ATTACHED = "attached"
CACHE = "cache"
NONE = "none"
SHIPPED = "shipped:demo_target.safetensors"
# Prefix of the target or the draft: shipped weights at the cost of a published T5.
PADDED = "padded:"
_SHIPPED_INDEPENDENT_DRAFT = "shipped:demo_draft.safetensors"
_SHIPPED_DRAFT = "shipped:demo_attached_draft.safetensors"
_SHIPPED_VOCABULARY = "shipped:demo_vocabulary.model"
_SEED = 0  # of the parameters of a new attached draft
_note = functools.cache(logging.getLogger(__name__).warning)  # once per text


@dataclasses.dataclass(frozen=True)
class PairConfig(base.Config):
  """The files of a pair; the target alone is enough.

  A path may be "shipped:NAME" for a file of this package, or an address such as
  gs://BUCKET/NAME.

  >>> PairConfig(target="flan-t5-large", draft="attached").attached.width
  128

  Attributes:
    target: weights of the target: a folder of transformers with config.json and
      safetensors, its name on the Hugging Face hub, a GGUF file, or a file that this
      package wrote. "padded:flan-t5-base" is the shipped target, padded with zeros to
      the shape of that T5: the same answers at its cost (`osd_tools.padded`).
    draft: weights of the draft, as for the target, or the folder of an EAGLE-3 head in
      the format of speculators or SpecForge. "attached" creates an attached draft
      with random parameters, which learns while it serves. "cache" drafts from n-grams
      of the prompt and of served answers, without training. "none" decodes plainly, in
      `osd generate`, `osd serve` and Python. "" means the shipped draft of the shipped
      target; for others an attached draft that is mixed with the n-gram cache and rests
      until it is trained. Rounds then draft while the next token is worth its time.
      "padded:t5-small" is the shipped independent draft, padded like the target.
    vocabulary: the vocabulary of both: a folder with spiece.model, tokenizer.json or
      tokenizer.model, or one of these files. "" takes the target's folder.
    extra_ids: number of sentinel tokens of a T5, see `Vocabulary.load`; None takes the
      number that the target needs.
    chat_template: for decoder-only models: "own" applies the chat template in the
      vocabulary's folder to every prompt, None does so if there is one; any other text
      is the template itself; "" applies none.
    template_variables: names and values for the chat template, such as
      (("enable_thinking", False),) of Qwen3.
    dtype: "float32" or "bfloat16", the type that both models compute in. A target that
      is stored in bfloat16 stays so in memory for both: float32 products widen it.
    draft_serving: approximations in the served draft; the learner trains all of it.
      A cache has nothing to approximate.
    folder: prefix of the paths above, unless they are absolute or shipped.
    attached: shape of a new attached draft or EAGLE-3 head; files contain their own.
    sibling_draft: accepts an attached draft of another target of the same sizes: a copy
      of this one before it was quantized or fine-tuned, or after.
    state_layer: for a decoder-only target, the layer whose hidden states an attached
      draft takes; 0 means the layer in the target's file, usually the last.
  """

  target: base.Path = SHIPPED
  draft: str = ""
  vocabulary: str = ""
  extra_ids: base.CountOrZero | None = None
  chat_template: str | None = None
  template_variables: tuple[tuple[str, Any], ...] = ()
  dtype: Annotated[str, base.OneOf("float32", "bfloat16")] = "float32"
  draft_serving: DraftServing = DraftServing()
  folder: str = ""
  attached: AttachedConfig | EagleConfig = AttachedConfig()
  sibling_draft: bool = False
  state_layer: base.CountOrZero = 0

  @property
  def is_shipped(self) -> bool:
    """Whether the target is the shipped one, padded or not."""
    return self.target == SHIPPED or self.target.startswith(PADDED)

  @property
  def padding(self) -> str:
    """A sentence for users if the target is padded, otherwise ""."""
    if not self.target.startswith(PADDED):
      return ""
    return (
      "The target is the shipped model, padded with zeros to the cost of"
      f" {self.target.removeprefix(PADDED)}: its answers are those of the small model,"
      " its times those of the large one."
    )

  def named(self, field: str) -> str:
    """Returns field "target", "draft" or "vocabulary", or its default if it is ""."""
    if value := getattr(self, field):
      return value
    if field == "draft":
      return _SHIPPED_DRAFT if self.is_shipped else ATTACHED
    # A weights file has no vocabulary next to it. Its header decides whether the
    # shipped one fits.
    has_own = not self.is_shipped and folders.holds_model(self.path("target"))
    return self.target if has_own else _SHIPPED_VOCABULARY

  def path(self, field: str) -> Path:
    """Resolves the path in field "target", "draft" or "vocabulary"."""
    value = self.named(field)
    if value.startswith(PADDED):
      value = SHIPPED if field == "target" else _SHIPPED_INDEPENDENT_DRAFT
    if self.folder and not value.startswith(assets.PREFIX):
      if not remote.is_remote(self.folder) or remote.is_remote(value):
        return Path(self.folder) / value
      value = f"{self.folder.rstrip('/')}/{value}"
    return assets.resolve(value, f"PairConfig.{field}")


@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
  """A loaded pair, placed on the mesh."""

  target: base.Model
  target_params: base.Params  # its parameters, in the layout that decoding reads
  # The target in float64, for certificates; needs `jax.enable_x64`.
  rescoring_target: base.Model
  draft: base.Model  # None in `plain()`
  draft_params: base.Params
  # Shape of the draft, for `save_draft`; None for user-defined drafts and for a cache.
  draft_config: ModelConfig | AttachedConfig | EagleConfig | None
  vocabulary: Vocabulary  # the vocabulary of both
  # Identity of the target, for attached drafts; None for user-defined targets.
  identity: weights.Identity | None = None
  # Name of the target that the draft was attached to, if it is another one of the same
  # sizes; otherwise "".
  sibling: str = ""
  # Whether `PairConfig` named no draft, so that it is a new one with random parameters.
  is_new: bool = False
  # `AttachedWeights.own` of the draft, for `save_draft`.
  own: base.Params = dataclasses.field(default_factory=dict)

  @property
  def models(self) -> tuple[Any, ...]:
    """Target, its trained parameters, draft, its trained parameters."""
    return self.target, self.target_params, self.draft, self.draft_params

  def plain(self) -> "Pair":
    """The pair without its draft."""
    return dataclasses.replace(self, draft=None, draft_params=None, is_new=False)

  def with_draft(self, draft: base.Model, params: base.Params) -> "Pair":
    """The same target with another draft."""
    return dataclasses.replace(
      self, draft=draft, draft_params=params, draft_config=None, is_new=False
    )

  def with_cache_size(self, tokens: int) -> "Pair":
    """The pair with a cache of this size; 0 and other drafts change nothing."""
    if not tokens or not adapts_untrained(self):
      return self
    draft = ngrams.build(self.target, tokens)
    params = draft.init(jax.random.key(_SEED))
    return dataclasses.replace(self, draft=draft, draft_params=params)

  @property
  def named_params(self) -> dict[str, base.Params]:
    """The parameters that a run must continue with, by name."""
    named = {"target": self.target_params}
    if self.draft is not None:
      named["first draft"] = self.draft.split(self.draft_params)[0]
    return named

  @property
  def draft_bytes(self) -> int:
    """Size of the file that `save_draft` writes, without its header."""
    trained, _ = self.draft.split(self.draft_params)
    return sum(leaf.nbytes for leaf in jax.tree.leaves((trained, self.own)))

  def save_draft(
    self, path: str | Path, params: base.Params, notes: str, storage: str = "float32"
  ) -> Path:
    """Writes parameters of the draft to a file.

    `PairConfig.draft` accepts the file, unless the draft is user-defined.

    Raises:
      BrokenDraftError: a parameter is NaN or infinite; nothing is written.
      InputError, DiskError: the file cannot be written; the error names the file that
        was written instead. Or the draft is a cache, or there is none.
    """
    if self.draft is None:
      raise base.InputError(
        f"save: {path} is not written: plain decoding has no draft to save."
      )
    if self.draft.absorb is not None:
      raise base.InputError(
        f"save: {path} is not written: the {self.draft.name} has no weights to save."
        " The checkpoints of `osd online` contain it."
      )
    # The frozen part belongs to the target, whose file contains it already.
    trained, _ = self.draft.split(params)
    weights.check_finite("the draft", trained, storage)
    try:
      runs.check_output("save", path)
      return self._write_draft(path, trained, notes, storage)
    except (base.InputError, base.DiskError) as error:
      # Hours of learning must not be lost to a full disk or a mistyped path.
      for folder in (tempfile.gettempdir(), Path.cwd(), Path.home()):
        with contextlib.suppress(OSError):
          spare = Path(tempfile.mkdtemp(prefix="osd_draft_", dir=folder))
          file = spare / "draft.safetensors"
          self._write_draft(file, trained, notes, storage)
          break
      else:
        raise
      raise type(error)(f"{error} The draft is in {file}.") from error

  def _write_draft(
    self, path: str | Path, trained: base.Params, notes: str, storage: str
  ) -> Path:
    match self.draft_config:
      case None:
        return weights.save_tree(path, trained, notes, storage)
      case AttachedConfig() | EagleConfig():
        assert self.identity is not None
        target = self.identity
        content = weights.AttachedWeights(
          self.draft_config,
          trained,
          target.fingerprint,
          target.name,
          notes,
          target.sizes,
          self.own,
        )
      case _:
        fingerprint = self.vocabulary.fingerprint
        content = weights.Weights(self.draft_config, trained, fingerprint, notes)
    return weights.save(path, content, storage)

  def load_draft(self, path: str | Path) -> base.Params:
    """Reads parameters that `save_draft` wrote for the draft of this pair.

    Raises:
      InputError: the file does not contain such a draft.
    """
    if not isinstance(self.draft_config, AttachedConfig | EagleConfig):
      return weights.load(path).params
    assert self.identity is not None
    draft = attached.load(path, self.identity, bool(self.sibling))
    if draft.config != self.draft_config:
      raise base.InputError(
        f"load_draft: {path} holds a draft of the shape {draft.config}, expected"
        f" {self.draft_config}; load a pair with this draft instead."
      )
    same = draft.own.keys() == self.own.keys() and all(
      np.array_equal(leaf, self.own[name]) for name, leaf in draft.own.items()
    )
    if not same:
      raise base.InputError(
        f"load_draft: {path} holds a head with another embedding or draft vocabulary"
        " than this pair's; load a pair with this draft instead."
      )
    return self.draft.join(draft.params, self.draft.split(self.draft_params)[1])


def load_pair(
  config: PairConfig | Pair,
  partitioner: sharding.Partitioner | None = None,
  default: str = "",
) -> Pair:
  """Loads a pair; a loaded pair is returned unchanged.

  `default` is the draft of a config that names none; "" for that of `PairConfig.draft`.

  >>> load_pair(PairConfig()).vocabulary.size
  1536

  Raises:
    InputError: a file is missing or does not contain weights, or target, draft and
      vocabulary do not fit together.
  """
  if isinstance(config, Pair):
    return config
  partitioner = partitioner or sharding.make()
  is_named = bool(config.draft)
  config = dataclasses.replace(config, draft=config.draft or default)
  target, vocabulary = _target(config)
  identity = weights.identity(target, Path(config.target).name)
  is_untrained = config.named("draft") == ATTACHED or not is_named
  if is_untrained and not config.is_shipped and (hint := shipped_draft(identity)):
    _note(hint)
  if vocabulary.is_causal and vocabulary.template is config.chat_template is None:
    _note(f"{config.target} has no chat template: prompts go in as they are.")
  draft = _draft(config, target, identity, vocabulary)
  states = draft.config.reads if isinstance(draft, weights.AttachedWeights) else ""
  # The target is never trained, so it is kept once, as it is served.
  layout = EXACT_SERVING.layout if partitioner.mesh.size == 1 else base.Layout.TRAINED
  target_model = families.build(target.config, "target", states=states, kept=layout)
  params = served.taken(target.params, config.dtype, layout)
  target_params = partitioner.place_params(target_model, params)
  serving = config.draft_serving
  if draft is None:
    draft_model = ngrams.build(target_model)
    first = draft_model.init(jax.random.key(_SEED))
  else:
    draft_model = _draft_model(draft, target.config, serving, layout)
    first = draft.params
  # The draft stays in float32 because it is trained.
  draft_params = partitioner.place_draft(draft_model, first)
  own = draft.own if isinstance(draft, weights.AttachedWeights) else {}
  if own and partitioner.mesh.size > 1:
    own = jax.device_put(own, partitioner.replicated)
  if isinstance(draft, weights.AttachedWeights):
    draft = dataclasses.replace(draft, own=own)
    frozen = _frozen(draft, target.config, target_params, serving, layout)
    draft_params = draft_model.join(draft_params, frozen)
  pair = Pair(
    target=target_model,
    target_params=target_params,
    rescoring_target=families.build(
      dataclasses.replace(target.config, dtype="float64"),
      "rescoring target",
      kept=layout,
    ),
    draft=draft_model,
    draft_params=draft_params,
    draft_config=draft and draft.config,
    vocabulary=vocabulary,
    identity=identity,
    sibling=_sibling(draft, identity),
    is_new=not is_named and config.named("draft") == ATTACHED,
    own=own,
  )
  return pair.plain() if config.named("draft") == NONE else pair


def _target(config: PairConfig) -> tuple[weights.Weights, Vocabulary]:
  """Reads the target and its vocabulary."""
  # Both come before the weights, which may take minutes to read. A folder without a
  # model has no vocabulary either, and is refused for what it holds.
  path = Path(config.target)
  if path.is_dir() and heads.is_head(path):
    raise base.InputError(
      f"PairConfig.target: {path} holds an EAGLE-3 head, which drafts for a target;"
      " name it as PairConfig.draft, and the folder of a whole model as the target."
    )
  if folders.holds_model(path):
    shape_of(config, "target")
  vocabulary = load_vocabulary(config)
  with _reading(config, "target") as (module, path):
    target = _typed(config, module.load(path, as_stored=True))
  has_vocabulary = config.vocabulary or target.vocabulary
  if not (has_vocabulary or module is hugging_face):
    raise base.InputError(
      f"PairConfig.vocabulary: {config.target} does not say which vocabulary it was"
      " trained with; name its vocabulary."
    )
  extra_ids = _wanted_extra_ids(target, vocabulary)
  if config.extra_ids is None and extra_ids:
    vocabulary = load_vocabulary(dataclasses.replace(config, extra_ids=extra_ids))
  vocabulary = vocabulary.limited_to(target.config.vocab_size)
  check_vocabulary(config, "target", target, vocabulary)
  # The identity of a target includes its state layer, since a draft that was trained on
  # one layer's states cannot use those of another.
  target = dataclasses.replace(target, config=with_state_layer(config, target.config))
  return target, vocabulary


def shipped_draft(target: weights.Identity) -> str:
  """Returns how to use a draft that ships for a target's sizes, "" without one."""
  for path in sorted(assets.FOLDER.glob("*.safetensors")):
    if weights.is_attached(path):
      header = weights.opened(path, weights.ATTACHED)[1]
      if header.get("target_sizes") == target.sizes:
        options = f"--draft {assets.PREFIX}{path.name}"
        if header["target"] not in (target.fingerprint, target.with_first_end):
          options += " --gin.PairConfig.sibling_draft=True"
        return (
          f"A trained draft for {header['target_name']} ships with this package. If"
          f" your target is this model or a copy of it, add {options}"
        )
  return ""


def adapts_untrained(config: PairConfig | Pair) -> bool:
  """Whether the draft is a cache, which takes up answers and cannot be trained."""
  if isinstance(config, PairConfig):
    return config.named("draft") == CACHE
  return config.draft is not None and config.draft.absorb is not None


def can_learn(config: PairConfig | Pair) -> bool:
  """Whether there is a draft that can be trained: neither a cache nor none."""
  if isinstance(config, PairConfig):
    return config.named("draft") not in (CACHE, NONE)
  return config.draft is not None and config.draft.absorb is None


def load_vocabulary(config: PairConfig) -> Vocabulary:
  """Loads the vocabulary of a config, without the sentinels that it does not state."""
  path = config.path("vocabulary")
  return Vocabulary.load(
    path, config.extra_ids or 0, config.chat_template, config.template_variables
  )


def shape_of(
  config: PairConfig, field: str
) -> ModelConfig | AttachedConfig | EagleConfig:
  """The shape of "target" or "draft", from the header of its file or config.json."""
  with _reading(config, field) as (module, path):
    if field == "draft" and module is hugging_face and heads.is_head(path):
      target = shape_of(config, "target")
      assert not isinstance(target, AttachedConfig | EagleConfig)
      return heads.shape_of(path, target)
    return module.shape_of(path)


def bfloat16_of(config: PairConfig) -> frozenset[str]:
  """Paths of the target's parameters that are stored in bfloat16, and stay so."""
  with _reading(config, "target") as (module, path):
    return module.bfloat16_of(path)


@contextlib.contextmanager
def _reading(config: PairConfig, field: str) -> Iterator[tuple[Any, Path]]:
  """Yields the module that reads a model, and its path; names the field in errors."""
  path, value = config.path(field), config.named(field)
  with _naming(f"PairConfig.{field}"):
    if value.startswith(PADDED):
      yield formats.tool("padded").Reader(value.removeprefix(PADDED)), path
      return
    yield hugging_face if folders.holds_model(path) else weights, path


@contextlib.contextmanager
def _naming(field: str) -> Iterator[None]:
  """Names a field in errors."""
  try:
    yield
  except base.InputError as error:
    raise base.InputError(f"{field}: {error}") from error


def with_state_layer(config: PairConfig, shape: ModelConfig) -> ModelConfig:
  """The target's shape with `PairConfig.state_layer`, or an InputError."""
  if not config.state_layer:
    return shape
  has_encoder = isinstance(shape, T5Config | T5GemmaConfig)
  if has_encoder or config.state_layer > shape.num_layers:
    layers = "an encoder" if has_encoder else shape.num_layers
    raise base.InputError(
      f"PairConfig.state_layer: received {config.state_layer}, expected at most the"
      f" number of layers of a decoder-only target; {config.target} has {layers}. Set"
      " 0 for the last layer."
    )
  return dataclasses.replace(shape, state_layer=config.state_layer)


def check_vocabulary(
  config: Any, field: str, model: weights.Weights, vocabulary: Vocabulary
) -> None:
  """Raises InputError unless weights fit a vocabulary.

  The error names the config, and its `field` with the path of the weights.
  """
  name, path = type(config).__name__, getattr(config, field)
  own, is_causal = vocabulary.path, not isinstance(model.config, T5Config)
  sentinels, needed = vocabulary.extra_ids, _wanted_extra_ids(model, vocabulary)
  if is_causal != vocabulary.is_causal:
    kinds = ("T5", "decoder-only model")
    raise base.InputError(
      f"{name}.{field}: {path} is a {kinds[is_causal]}, but {name}.vocabulary {own} is"
      f" the vocabulary of a {kinds[vocabulary.is_causal]}; name the vocabulary of the"
      " weights."
    )
  if not isinstance(model.config, T5Config) and vocabulary.eos_ids[0] not in (
    model.config.eos_ids
  ):
    raise base.InputError(
      f"{name}.{field}: {path} ends a sequence with {model.config.eos_ids}, but"
      f" {name}.vocabulary {own} with {vocabulary.eos_ids[0]}; expected one of them."
      " Correct eos_token_id in generation_config.json of the folder."
    )
  # Reported before the fingerprints, which differ whenever extra_ids is wrong.
  if needed not in (None, sentinels):
    raise base.InputError(
      f"{name}.extra_ids: received {sentinels}, expected {needed} for {path}, the"
      " number of sentinel tokens in its vocabulary."
    )
  if model.vocabulary not in ("", vocabulary.fingerprint):
    raise base.InputError(
      f"{name}.{field}: {path} was trained with the vocabulary"
      f" {model.vocabulary[:12]}..., but {name}.vocabulary {own} with extra_ids"
      f" {sentinels} is {vocabulary.fingerprint[:12]}... ({vocabulary.size} ids);"
      " expected the same. Name the vocabulary of the weights."
    )
  # Published models pad their embedding, so it may be larger than the vocabulary.
  if model.config.vocab_size < vocabulary.size:
    raise base.InputError(
      f"{name}.{field}: {path} has {model.config.vocab_size} token ids, expected at"
      f" least the {vocabulary.size} of {own} with extra_ids {sentinels}."
    )


def _wanted_extra_ids(model: weights.Weights, vocabulary: Vocabulary) -> int | None:
  """The number of sentinel tokens that weights need, None if unknown."""
  if vocabulary.is_causal or vocabulary.path.endswith(".json"):
    return None  # a tokenizer.json holds its sentinels
  if model.vocabulary:
    # The fingerprint covers extra_ids, so trying both usual values finds the right one.
    for count in (0, 100):
      candidate = Vocabulary.load(vocabulary.path, count)
      if candidate.fingerprint == model.vocabulary:
        return count
    return None
  pieces = vocabulary.size - vocabulary.extra_ids
  # Published models state it in their tokenizer's settings, or have the sizes of T5.
  is_t5 = pieces == 32_000 and model.config.vocab_size in (32_100, 32_128)
  own_count = stated_extra_ids(vocabulary)
  return 100 if is_t5 and own_count is None else own_count


def _draft(
  config: PairConfig,
  target: weights.Weights,
  identity: weights.Identity,
  vocabulary: Vocabulary,
) -> weights.Weights | weights.AttachedWeights | None:
  """Loads the draft, or creates an attached one; None for a cache and for "none"."""
  if config.named("draft") in (CACHE, NONE):
    return None
  if config.named("draft") == ATTACHED:
    return _new_draft(config, target, identity)
  with _reading(config, "draft") as (module, path):
    if config.target.startswith(PADDED) and config.named("draft") == _SHIPPED_DRAFT:
      small = weights.load(config.path("target"))
      return formats.tool("padded").attached_draft(path, small, identity)
    if module is hugging_face and heads.is_head(path):
      shape = _decoder_only(config, target)
      return heads.load(path, shape, target.params["token_embedder"]["embedding"])
    if weights.is_attached(path):
      draft = attached.load(path, identity, config.sibling_draft)
      if isinstance(draft.config, EagleConfig):
        shape = _decoder_only(config, target)
        heads.check_target(path, draft.config, shape, draft.own)
      return draft
    draft = _typed(config, module.load(path))  # it is trained in float32
  check_vocabulary(config, "draft", draft, vocabulary)
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


def _new_draft(
  config: PairConfig, target: weights.Weights, identity: weights.Identity
) -> weights.AttachedWeights:
  """An attached draft with random parameters."""
  shape, own = config.attached, {}
  if isinstance(shape, EagleConfig):
    with _naming("PairConfig.attached"):
      heads.check_target("EagleConfig", shape, _decoder_only(config, target), own)
    # The shape may be that of a target which shares its embedding with its head.
    layers = dataclasses.replace(shape.layers, tied_head=False)
    shape = dataclasses.replace(shape, layers=layers)
  # A fixed seed: two runs with the same settings start from the same draft.
  model = attached.build(shape, target.config)
  params = jax.jit(model.init)(jax.random.key(_SEED))
  if isinstance(shape, EagleConfig):
    ids = eagle.first_ids(shape, target.config.eos_ids)
    own = {} if ids is None else {"ids": ids}
    params = eagle.begun(shape, target, params, ids)
  return weights.AttachedWeights(shape, params, identity.fingerprint, own=own)


def _decoder_only(config: PairConfig, target: weights.Weights) -> LlamaConfig:
  """The shape of a target that an EAGLE-3 head can read."""
  shape = target.config
  if not isinstance(shape, LlamaConfig) or isinstance(shape, T5GemmaConfig):
    raise base.InputError(
      f"received {config.named('draft')!r}: an EAGLE-3 head reads the layers of a"
      f" decoder-only target; {config.target} is a {type(shape).__name__}."
    )
  if config.draft_serving.shortlist:
    raise base.InputError(
      "an EAGLE-3 head has its own draft vocabulary; draft_serving may have no"
      f" shortlist: received {config.draft_serving.shortlist}, expected 0."
    )
  return shape


def _frozen(
  draft: weights.AttachedWeights,
  target: ModelConfig,
  params: base.Params,
  serving: DraftServing,
  kept: base.Layout,
) -> base.Params:
  """The parameters of an attached draft that belong to its target."""
  if isinstance(draft.config, EagleConfig):
    return eagle.frozen_of(draft.config, target, params, draft.own)
  return attached.frozen_of(target, params, serving, kept)


def _sibling(
  draft: weights.Weights | weights.AttachedWeights | None, target: weights.Identity
) -> str:
  """The name of the draft's own target, if `target` is only its copy."""
  if not isinstance(draft, weights.AttachedWeights) or not draft.target:
    return ""  # a published head does not say for which weights it was trained
  trained_for = draft.target_name or "an unnamed target"
  return trained_for if draft.target != target.fingerprint else ""


def _draft_model(
  draft: weights.Weights | weights.AttachedWeights,
  target: ModelConfig,
  serving: DraftServing,
  kept: base.Layout,
) -> base.Model:
  if isinstance(draft, weights.AttachedWeights):
    return attached.build(draft.config, target, "attached draft", serving, kept)
  return families.build(draft.config, "draft", serving)


def _typed(config: PairConfig, model: weights.Weights) -> weights.Weights:
  shape = dataclasses.replace(model.config, dtype=config.dtype)
  return dataclasses.replace(model, config=shape)
