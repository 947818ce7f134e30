"""Corpus generation: which model writes each text, and what the target records."""

import dataclasses
from unittest import mock

import jax
import numpy as np
import pytest
import rich.progress
import tabular_pair
import tiny_online
import tiny_pair

from osd_jax import base, corpus, pairs, sharding
from osd_jax.data.batches import EncodedExample
from osd_jax.engine import engine
from osd_jax.engine.requests import DecodingConfig, SamplingConfig
from osd_jax.runs import corpus_rows

ONE_DEVICE = sharding.PartitionConfig()
DECODING = DecodingConfig(
  rows=3,
  source_lengths=(tabular_pair.SOURCE_LENGTH,),
  target_length=tabular_pair.TARGET_LENGTH,
  record_top_k=tabular_pair.VOCAB_SIZE,
)
COUNT = 12


@pytest.fixture(scope="module")
def pair():
  return tabular_pair.make()


@pytest.fixture(scope="module")
def plain(pair):
  """Greedy texts of target and draft, [N, T] each."""

  def tokens(model, params):
    prompts = tabular_pair.prompts(COUNT)
    answers = engine.Engine(DECODING, model, params).run(
      corpus.requests(prompts, SamplingConfig())
    )
    return np.stack([done.tokens for done in answers])

  target = tokens(pair.target, pair.target_params)
  draft = tokens(pair.draft, pair.draft_params)
  assert (target != draft).any(axis=1).all()
  return target, draft


def generated(pair, rows=3, temperature=0.0, **values):
  return corpus.generate(
    corpus.TextSource(**values),
    dataclasses.replace(DECODING, rows=rows),
    SamplingConfig(temperature=temperature),
    pair,
    ONE_DEVICE,
    tabular_pair.prompts(COUNT),
    rich.progress.Progress(rich.progress.TextColumn("{task.fields[figures]}")),
  )


def kept(pair, folder, take=lambda rows: None, **values):
  """Generates a corpus into a folder; returns its rows and the number of new ones."""
  bar = rich.progress.Progress(rich.progress.TextColumn("{task.fields[figures]}"))
  counted, add = [], corpus_rows.CorpusRows.add

  def count(self, index, row):
    add(self, index, row)
    counted.append(index)
    take(counted)

  with mock.patch.object(corpus_rows.CorpusRows, "add", count):
    found = corpus.generate(
      corpus.TextSource(**values),
      dataclasses.replace(DECODING, rows=3),
      SamplingConfig(temperature=1.0),
      pair,
      ONE_DEVICE,
      tabular_pair.prompts(COUNT),
      bar,
      str(folder),
    )
  return found, len(counted)


@pytest.mark.parametrize("source", ["teacher", "mix_request"])
def test_kept_rows_are_made_once_even_if_interrupted(
  source, pair, tmp_path, monkeypatch
):
  monkeypatch.setattr(corpus_rows, "PART", 3)
  whole = generated(pair, temperature=1.0, sample_source=source)

  def stop(counted):
    if len(counted) == COUNT - 2:
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    kept(pair, tmp_path / "rows", stop, sample_source=source)
  again, new = kept(pair, tmp_path / "rows", sample_source=source)
  assert new == 2
  # A file that was removed is made again, and no other one.
  next((tmp_path / "rows").glob("*.safetensors")).unlink()
  _, new = kept(pair, tmp_path / "rows", sample_source=source)
  assert 0 < new <= 3
  third, new = kept(pair, tmp_path / "rows", sample_source=source)
  assert new == 0
  for found in (again, third):
    for one, other in zip(*map(jax.tree.leaves, (whole, found)), strict=True):
      np.testing.assert_array_equal(one, other)
      assert one.dtype == other.dtype


def test_kept_rows_of_another_corpus_are_refused(pair, tmp_path):
  kept(pair, tmp_path / "rows")
  with pytest.raises(base.InputError, match=r"made with another models, texts;"):
    kept(pair, tmp_path / "rows", sample_source="student")
  doubled = jax.tree.map(lambda leaf: leaf * 2, pair.target_params)
  with pytest.raises(base.InputError, match=r"made with another models;"):
    kept(dataclasses.replace(pair, target_params=doubled), tmp_path / "rows")


def test_a_damaged_file_of_kept_rows_is_named(pair, tmp_path):
  kept(pair, tmp_path / "rows")
  (path,) = (tmp_path / "rows").glob("*.safetensors")
  whole = path.read_bytes()
  path.write_bytes(whole[:-9])
  named = rf"{path.name}: it cannot be read .*remove"
  with pytest.raises(base.InputError, match=named):
    kept(pair, tmp_path / "rows")
  path.write_bytes(whole)
  (tmp_path / "rows" / "made_from.json").write_text("{")
  with pytest.raises(base.InputError, match=r"made_from\.json: it cannot be read"):
    kept(pair, tmp_path / "rows")


def test_a_full_disk_is_reported_in_one_line(pair, tmp_path, monkeypatch):
  full = mock.Mock(side_effect=OSError(28, "No space left on device"))
  monkeypatch.setattr(corpus_rows.safetensors.flax, "save_file", full)
  with pytest.raises(base.DiskError, match=r"cannot be written \(.*No space left"):
    kept(pair, tmp_path / "rows")


@pytest.mark.slow
@pytest.mark.parametrize("reads", ["prompt", "tokens"])
def test_states_of_prompts_are_kept_if_they_fit(reads, tmp_path, monkeypatch):
  """An attached draft learns the same from stored states and from computed ones."""
  config = tiny_online.attached(tiny_pair.save_tiny_pair(tmp_path, "t5"))
  shape = dataclasses.replace(config.attached, reads=reads)
  pair = pairs.load_pair(dataclasses.replace(config, attached=shape))
  decoding = DecodingConfig(rows=2, source_lengths=(8,), target_length=6)
  examples = [EncodedExample(np.arange(3, 9), 0, np.arange(0)) for _ in range(3)]

  def rows(limit):
    monkeypatch.setattr(corpus, "STATES_BYTES", limit)
    bar = rich.progress.Progress(rich.progress.TextColumn("{task.fields[figures]}"))
    given = (corpus.TextSource(), decoding, SamplingConfig(), pair, ONE_DEVICE)
    return corpus.generate(*given, examples, bar)

  width = pair.draft.state_width
  kept, dropped = rows(3 * 8 * width * 2), rows(3 * 8 * width * 2 - 1)
  assert kept.target_states.shape == (3, 8, width) and dropped.target_states is None
  assert (kept.token_states is not None) == (reads == "tokens")
  score = lambda batch: pair.draft.score(
    pair.draft_params,
    batch.source,
    pair.draft.mask(batch.source),
    batch.target,
    **pair.draft.score_inputs(batch),
  )
  np.testing.assert_allclose(score(kept), score(dropped), rtol=1e-5, atol=1e-5)


def test_reference_rows_hold_the_targets_distributions(pair):
  found = tabular_pair.prompts(5)
  found[2] = dataclasses.replace(found[2], reference=np.zeros(0, np.int32))
  parts = list(corpus.reference_rows(pair, found, DECODING, rows=4))
  assert [len(part.weight) for part in parts] == [4, 4]
  whole = corpus.stack(parts)
  # The third reference is empty, and three rows fill up the last part.
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
  assert where.sum() == 3 * 4  # four references of three tokens


@pytest.mark.parametrize("source", corpus.SAMPLE_SOURCES)
def test_target_scores_texts_of_every_source(pair, source):
  rows = generated(pair, sample_source=source)
  logits = pair.target.score(pair.target_params, rows.source, None, rows.target)
  expected = np.asarray(jax.nn.log_softmax(logits, axis=-1))
  found = np.zeros_like(expected)
  ids = rows.records.ids.astype(np.int64)
  np.put_along_axis(found, ids, rows.records.log_probs, axis=-1)
  possible = expected > -1e6  # these tables exclude end-of-sequence and padding
  np.testing.assert_allclose(found[possible], expected[possible], rtol=1e-4, atol=1e-5)
  assert rows.weight.tolist() == [1] * COUNT
  assert (rows.target[~rows.mask] == base.PAD_ID).all()
  assert rows.mask.all()  # these models never end before the limit


@pytest.mark.parametrize(
  ("values", "writer"),
  [
    ({"sample_source": "teacher"}, 0),
    ({"sample_source": "student"}, 1),
    ({"sample_source": "mix_request", "mix_share": 0.0}, 0),
    ({"sample_source": "mix_request", "mix_share": 1.0}, 1),
    ({"sample_source": "mix_token", "mix_share": 0.0}, 0),
    ({"sample_source": "mix_token", "mix_share": 1.0}, 1),
  ],
)
def test_texts_of_one_writer_are_its_greedy_texts(pair, plain, values, writer):
  np.testing.assert_array_equal(generated(pair, **values).target, plain[writer])
