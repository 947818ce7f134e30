"""Sampling as a published model asks for it: `generation_config.json` of its folder.

The file is read as `generate` of transformers reads it, defaults included.
"""

import dataclasses
from pathlib import Path
from typing import Any

from osd_jax import base, formats, pairs
from osd_jax.engine.requests import OwnSampling, SamplingConfig
from osd_jax.models.convert import folders

FILE = "generation_config.json"
# Fields that apply only if `do_sample` is set, with the defaults of transformers.
_SAMPLED = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}
_PENALTY = "repetition_penalty"

# Fields that change what is drawn, or where an answer ends, in a way that decoding here
# does not have, with their values without effect; null and [] never have one.
_OTHERS: dict[str, tuple[Any, ...]] = {
  "bad_words_ids": (),
  "begin_suppress_tokens": (),
  "constraints": (),
  "dola_layers": (),
  "encoder_no_repeat_ngram_size": (0,),
  "encoder_repetition_penalty": (1,),
  "exponential_decay_length_penalty": (),
  "force_words_ids": (),
  "forced_bos_token_id": (),
  "forced_decoder_ids": (),
  "forced_eos_token_id": (),
  "guidance_scale": (1,),
  "min_length": (0,),
  "min_new_tokens": (0,),
  "no_repeat_ngram_size": (0,),
  "num_beams": (1,),
  "penalty_alpha": (0,),
  "sequence_bias": (),
  "stop_strings": (),
  "suppress_tokens": (),
  "token_healing": (False,),
  "watermarking_config": (),
  # Names of llama.cpp, from the metadata of a GGUF file.
  "mirostat": (0,),
  "penalty_last_n": (-1,),
  "sequence": ("",),
  "xtc_probability": (0,),
}
_SAMPLED_OTHERS: dict[str, tuple[Any, ...]] = {
  "epsilon_cutoff": (0,),
  "eta_cutoff": (0,),
  "top_h": (),
  "typical_p": (1,),
}


def resolved(
  sampling: SamplingConfig | OwnSampling, pair: pairs.PairConfig | pairs.Pair
) -> SamplingConfig:
  """Returns the sampling of a run; `OwnSampling` is read from the target's folder.

  The folder is that of the vocabulary if the target is a weights file of this package.

  Raises:
    InputError: see `read`; or the pair is loaded, so that its folder is not known.
  """
  if isinstance(sampling, SamplingConfig):
    return sampling
  if isinstance(pair, pairs.Pair):
    raise base.InputError(
      "OwnSampling: received a loaded pair, expected a PairConfig, which names the"
      " target's folder; or give the SamplingConfig that generation_config.read"
      " returns."
    )
  path = pair.path("target")
  if not folders.holds_model(path):
    path = pair.path("vocabulary")
  return dataclasses.replace(read(path), seed=sampling.seed)


def read(path: str | Path) -> SamplingConfig:
  """Reads the sampling that a model's `generation_config.json` states.

  Without `do_sample` the model is decoded greedily, whatever its temperature; a
  repetition penalty applies in both cases.

  Args:
    path: a folder of transformers, a file in it, or a GGUF file.

  Raises:
    InputError: there is no such file, a field has a wrong value, or a field asks for
      something that is not supported.
  """
  fields_of_file, file = _fields(Path(path))
  is_sampled = fields_of_file.get("do_sample", False)
  if not isinstance(is_sampled, bool):
    raise base.InputError(
      f"OwnSampling: {file}: do_sample: received {is_sampled!r}, expected true or"
      " false."
    )
  others = _OTHERS | (_SAMPLED_OTHERS if is_sampled else {})
  for name, neutral in others.items():
    if (value := fields_of_file.get(name, [])) != [] and value not in neutral:
      raise base.InputError(
        f"OwnSampling: {file}: {name}: received {value!r}, which is not supported;"
        " give a SamplingConfig with the settings that you want."
      )
  defaults = {_PENALTY: 1.0, **(_SAMPLED if is_sampled else {})}
  fields = {name: fields_of_file.get(name, value) for name, value in defaults.items()}
  try:
    sampling = SamplingConfig(**fields)
  except base.InputError as error:
    problem = str(error).splitlines()[0].removeprefix("SamplingConfig.")
    raise base.InputError(f"OwnSampling: {file}: {problem}") from error
  if is_sampled and not sampling.temperature:
    raise base.InputError(
      f"OwnSampling: {file}: temperature: received 0 with do_sample, expected a number"
      " above 0; set do_sample to false for greedy decoding."
    )
  return sampling


def _fields(path: Path) -> tuple[dict[str, Any], Path]:
  """The fields that are not null, and the file to name in errors."""
  folder = formats.folder_of(path)
  is_folder = folder == path
  folder = folder.parent if folder.is_file() else folder
  file = folder / FILE if is_folder else path
  if not (folder / FILE).is_file():
    raise base.InputError(
      f"OwnSampling: {path} has no {FILE}, expected the file in which a model of"
      " transformers states its sampling (general.sampling in a GGUF file); give a"
      " SamplingConfig instead."
    )
  fields = folders.read_json(folder / FILE)
  return {name: value for name, value in fields.items() if value is not None}, file
