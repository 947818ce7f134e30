"""One tiny pair for all tests of this folder, so that its calls are compiled once."""

import pytest
import tiny_online
from serving import running

from osd_jax import pairs
from osd_jax.engine.server import Server


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
  return pairs.load_pair(tiny_online.save_lively_pair(tmp_path_factory.mktemp("pair")))


@pytest.fixture(scope="session")
def plain(pair):
  """Greedy answers of the target alone to TEXTS."""
  with Server(pair.plain(), running.DECODING) as alone:
    return [answer.text for answer in alone.generate(running.TEXTS, ordered=True)]
