import dataclasses
import json

import jax
import numpy as np
import pytest
import tabular_pair

from osd_jax import assets, base, corpus
from osd_jax.data import batches as data_batches
from osd_jax.data.sources import TaskConfig
from osd_jax.data.vocabularies import Vocabulary
from osd_jax.serving import slots

DECODING = slots.DecodingConfig(
  rows=3,
  source_lengths=(tabular_pair.SOURCE_LENGTH,),
  target_length=tabular_pair.TARGET_LENGTH,
  record_top_k=tabular_pair.VOCAB_SIZE,
)


@pytest.fixture(scope="module")
def pair():
  return tabular_pair.make()


@pytest.fixture(scope="module")
def vocabulary():
  return Vocabulary.load(assets.resolve("shipped:demo_vocabulary.model"))


@pytest.fixture(scope="module")
def answers(pair):
  decoder = slots.Slots(DECODING, pair.target, pair.target_params)
  found = tabular_pair.prompts(7)
  return corpus.answer(decoder, found, slots.SamplingConfig(temperature=1.0))


def tasks_from_lines(folder, lines):
  path = folder / "lines.jsonl"
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  task = TaskConfig(name="lines", pattern=path.name, data_dir=str(folder))
  return data_batches.BatchConfig(tasks=(task,), reader="plain", target_length=4)


def test_prompts_come_once_whatever_is_asked_for(vocabulary, tmp_path):
  lines = [{"prompt": f"add {n} and 1", "reference": str(n + 1)} for n in range(9)]
  config = tasks_from_lines(tmp_path, lines)
  for count, expected in ((None, 9), (4, 4), (100, 9)):
    found = corpus.prompts(config, vocabulary, count)
    texts = [vocabulary.decode(prompt.tokens) for prompt in found]
    assert len(texts) == len(set(texts)) == expected
    assert set(texts) <= {line["prompt"] for line in lines}


def test_a_prompt_without_reference_has_an_empty_one(vocabulary, tmp_path):
  lines = [{"prompt": "one"}, {"prompt": "two", "reference": "2"}]
  found = corpus.prompts(tasks_from_lines(tmp_path, lines), vocabulary)
  lengths = {vocabulary.decode(p.tokens): len(p.reference) for p in found}
  assert lengths["one"] == 0
  assert lengths["two"] >= 2  # negative control: the text and end-of-sequence


def test_answers_come_in_the_order_of_the_prompts(pair):
  """Each equals the same prompt answered alone: rows mix nothing up."""
  found = tabular_pair.prompts(7)
  sampling = slots.SamplingConfig(temperature=1.0, seed=5)
  together = corpus.answer(
    slots.Slots(DECODING, pair.target, pair.target_params), found, sampling
  )
  single = slots.Slots(
    dataclasses.replace(DECODING, rows=1), pair.target, pair.target_params
  )
  for index, done in enumerate(together):
    own = dataclasses.replace(sampling, seed=5 + index)
    alone = single.run([slots.Request(found[index].tokens, own)])[0]
    np.testing.assert_array_equal(done.tokens, alone.tokens)
    assert done.request.tag == found[index].task_id
  assert len({done.tokens.tobytes() for done in together}) > 1


def test_answer_reports_each_prompt_as_it_finishes(pair):
  seen = []
  decoder = slots.Slots(DECODING, pair.target, pair.target_params)
  corpus.answer(decoder, tabular_pair.prompts(5), slots.SamplingConfig(), seen.append)
  assert len(seen) == 5


def test_reference_rows_hold_what_the_target_says_of_the_references(pair):
  found = tabular_pair.prompts(5)
  found[2] = dataclasses.replace(found[2], reference=np.zeros(0, np.int32))
  parts = list(
    corpus.reference_rows(pair.target, pair.target_params, found, DECODING, rows=4)
  )
  assert [len(part.weight) for part in parts] == [4, 4]
  whole = corpus.stack(parts)
  assert whole.weight.tolist() == [1, 1, 0, 1, 1, 0, 0, 0]
  mask = whole.source != base.PAD_ID
  logits = pair.target.score(pair.target_params, whole.source, mask, whole.target)
  expected = jax.nn.log_softmax(logits, axis=-1)
  kept = np.take_along_axis(
    np.asarray(expected), np.asarray(whole.records.ids, np.int64), axis=-1
  )
  where = np.asarray(whole.mask)
  np.testing.assert_allclose(
    np.asarray(whole.records.log_probs)[where], kept[where], rtol=1e-5
  )
  assert where.sum() == 3 * 4


def test_a_draft_equal_to_the_target_agrees_entirely(pair, answers):
  equal = corpus.mean_agreement(pair.target, pair.target_params, answers)
  other = corpus.mean_agreement(pair.draft, pair.draft_params, answers)
  assert equal.keys() == other.keys() == {0, 1}
  for task in (0, 1):
    assert equal[task]["distribution_overlap"] == pytest.approx(1, abs=1e-5)
    assert other[task]["distribution_overlap"] < 0.9  # negative control
  assert [equal[task]["requests"] for task in (0, 1)] == [4, 3]


def test_mean_agreement_does_not_depend_on_the_rows_of_a_pass(pair, answers):
  few = corpus.mean_agreement(pair.draft, pair.draft_params, answers, rows=3)
  many = corpus.mean_agreement(pair.draft, pair.draft_params, answers, rows=16)
  for task in few:
    assert few[task] == pytest.approx(many[task], abs=1e-6)


def test_mean_agreement_is_the_mean_over_requests_of_the_overlap(pair, answers):
  """Against the formula, written out in numpy."""
  overlaps = {0: [], 1: []}
  tables = [
    np.asarray(jax.nn.softmax(table, axis=-1), np.float64)
    for table in (pair.target_params, pair.draft_params)
  ]
  for done in answers:
    fed = [0, *done.tokens.tolist()[:-1]]
    before = [0, *fed[:-1]]
    overlap = np.minimum(tables[0][before, fed], tables[1][before, fed]).sum(-1)
    overlaps[done.request.tag].append(overlap.mean())
  found = corpus.mean_agreement(pair.draft, pair.draft_params, answers)
  for task, values in overlaps.items():
    assert found[task]["distribution_overlap"] == pytest.approx(
      np.mean(values), abs=1e-5
    )
