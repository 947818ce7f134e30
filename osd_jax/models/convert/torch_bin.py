"""torch's `pytorch_model.bin`: the only file that imports torch, and only if called."""

import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from osd_jax import base
from osd_jax.models.tensors import Tensors


def open_bin(path: Path) -> Tensors:
  """Opens a state dictionary that torch pickled, with `weights_only`.

  Args:
    path: the file.

  Returns:
    Its tensors, float32.

  Raises:
    ValueError: the file cannot be read, or holds more than tensors.
    ImportError: torch is not installed.
  """
  try:
    import torch
  except ImportError as error:
    raise base.MissingExtraError(
      f"convert: {path} can only be read with torch, which is not installed; install"
      " torch, or convert the file to safetensors where it is."
    ) from error
  try:
    state = torch.load(
      path,
      map_location="cpu",
      weights_only=True,
      mmap=zipfile.is_zipfile(path),  # files of torch 1.5 and before cannot be
    )
  except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
    raise base.InputError(
      f"convert: cannot read {path}: {str(error).splitlines()[0]}; expected tensors"
      " alone, as torch.save writes a state dictionary. A file that asks for more is"
      " not opened."
    ) from error
  if not isinstance(state, dict) or not all(map(torch.is_tensor, state.values())):
    raise base.InputError(
      f"convert: cannot read {path}: it holds no mapping of names to tensors;"
      " expected a state dictionary."
    )
  shapes = {name: tuple(x.shape) for name, x in state.items()}
  return Tensors(shapes, lambda name: _numpy(state[name]), lambda name: path)


def _numpy(tensor: Any) -> np.ndarray:
  return (tensor.float() if tensor.is_floating_point() else tensor).numpy()
