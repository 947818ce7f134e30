"""The logbook of an online run: what outputs.jsonl keeps."""

import numpy as np
import pytest

from osd_jax import runs
from osd_jax.loop import log

TEXT = {"index": 0, "text": "answer \u00e9", "tokens_per_target_call": 1.5}
IDS = {"prompt_ids": [0, 1], "output_ids": [0, 1, 2]}


@pytest.mark.parametrize(
  ("keep", "expected"), [("none", []), ("text", [TEXT]), ("ids", [TEXT | IDS])]
)
def test_outputs_keep_nothing_texts_or_ids(tmp_path, keep, expected):
  directory = runs.RunDirectory(tmp_path)
  book = log.Log(directory, keep, False, print, True)
  ids = {name: np.array(value) for name, value in IDS.items()}
  book.write_output(TEXT | {"tokens_per_target_call": np.float32(1.5)} | ids)
  book.close()
  assert list(runs.read(directory.outputs_path)) == expected
