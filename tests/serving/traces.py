"""Looks for token ids in all files of a run directory."""

import json

import numpy as np
import orbax.checkpoint as ocp


def holds(array, tokens):
  """Whether the tokens follow one another somewhere in an array of integers."""
  if not np.issubdtype(array.dtype, np.integer) or array.ndim == 0:
    return False
  flat, tokens = np.asarray(array).ravel().astype(np.int64), np.asarray(tokens)
  if len(flat) < len(tokens):
    return False
  windows = np.lib.stride_tricks.sliding_window_view(flat, len(tokens))
  return bool(np.any(np.all(windows == tokens, axis=1)))


def checkpointed(folder, tokens):
  """Checkpoints whose arrays hold the tokens; they are compressed on disk."""
  steps = []
  for metadata in folder.rglob("arrays/_METADATA"):
    arrays = ocp.StandardCheckpointer().restore(metadata.parent)
    if any(holds(np.asarray(array), tokens) for array in arrays.values()):
      steps.append(metadata.parent.parent.name)
  return steps


def of(folder, tokens, *texts):
  """Files that hold the token ids, as text or bytes, or one of the texts."""
  ids = np.asarray(tokens)
  patterns = [
    json.dumps(ids.tolist())[1:-1].encode(),
    json.dumps(ids.tolist(), separators=(",", ":"))[1:-1].encode(),
    *(ids.astype(kind).tobytes() for kind in (np.int32, np.uint16, np.int64)),
    *(text.encode() for text in texts),
  ]
  files = [path for path in folder.rglob("*") if path.is_file()]
  names = [
    str(path.relative_to(folder))
    for path in files
    if any(one in path.read_bytes() for one in patterns)
  ]
  return names + checkpointed(folder, tokens)
