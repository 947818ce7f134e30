"""Prompts of a corpus."""

import json

import pytest

from osd_jax import assets
from osd_jax.data import batches, prompts
from osd_jax.data.sources import TaskConfig
from osd_jax.data.vocabulary import Vocabulary


@pytest.fixture(scope="module")
def vocabulary():
  return Vocabulary.load(assets.resolve("shipped:demo_vocabulary.model"))


def tasks_from_lines(folder, lines):
  path = folder / "lines.jsonl"
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  task = TaskConfig(name="lines", pattern=path.name, data_dir=str(folder))
  return batches.BatchConfig(tasks=(task,), reader="plain", target_length=4)


def test_prompts_come_once_whatever_is_asked_for(vocabulary, tmp_path):
  lines = [{"prompt": f"add {n} and 1", "reference": str(n + 1)} for n in range(9)]
  config = tasks_from_lines(tmp_path, lines)
  for count, expected in ((None, 9), (4, 4), (100, 9)):
    found = prompts.prompts(config, vocabulary, count)
    texts = [vocabulary.decode(prompt.tokens) for prompt in found]
    assert len(texts) == len(set(texts)) == expected
    assert set(texts) <= {line["prompt"] for line in lines}


def test_a_prompt_without_reference_has_an_empty_one(vocabulary, tmp_path):
  lines = [{"prompt": "one"}, {"prompt": "two", "reference": "2"}]
  found = prompts.prompts(tasks_from_lines(tmp_path, lines), vocabulary)
  lengths = {vocabulary.decode(p.tokens): len(p.reference) for p in found}
  assert lengths["one"] == 0
  assert lengths["two"] >= 2  # negative control: the text and end-of-sequence
