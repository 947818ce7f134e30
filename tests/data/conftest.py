"""The shipped vocabulary."""

import pytest

from osd_jax.data.vocabulary import Vocabulary


@pytest.fixture(scope="session")
def vocabulary(repository) -> Vocabulary:
  return Vocabulary.load(repository / "osd_jax/assets/demo_vocabulary.model")
