"""Published weights, where `../models` next to the repository has the file."""

import numpy as np
import pytest
from models import tiny

from osd_jax.data.vocabulary import Vocabulary, tokenizer_files
from osd_jax.models.convert import hugging_face

pytestmark = [pytest.mark.hf, pytest.mark.slow]

COUNT = 12


def test_gemma_3_270m_from_gguf_equals_transformers(repository, tmp_path):
  """The second prompt is longer than the window of 512 tokens and than a chunk."""
  path = repository.parent / "models" / "gemma270.gguf"
  if not path.exists():
    pytest.skip("no ../models/gemma270.gguf next to the repository")
  torch, transformers = map(pytest.importorskip, ("torch", "transformers"))
  held, vocabulary = hugging_face.load(path), Vocabulary.load(path)
  folder = hugging_face.write(tmp_path / "folder", held, tokenizer_files(vocabulary))
  theirs = transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32, attn_implementation="eager"
  )
  long = vocabulary.encode_prompt((repository / "README.md").read_text())[:700]
  for prompt in (vocabulary.encode_prompt("The capital of France is"), long):
    given = torch.tensor(prompt[None].astype(np.int64))
    with torch.no_grad():
      expected = theirs.generate(given, max_new_tokens=COUNT, do_sample=False)
    written = expected[0, len(prompt) :].tolist()
    found = tiny.greedy(held, prompt[None], COUNT)[0]
    assert found[: len(written)].tolist() == written
    text = np.asarray([written], np.int32)
    with torch.no_grad():
      logits = theirs(expected).logits[0, len(prompt) - 1 : -1].numpy()
    model, source = held.model, prompt[None]
    found = model.score(held.params, source, model.mask(source), text)
    np.testing.assert_allclose(found[0], logits, atol=1e-3)
