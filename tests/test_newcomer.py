"""A newcomer succeeds with the wheel only: see newcomer.py, and newcomer.sh for a run
with an environment of its own."""

import pathlib
import sys
import time

import pytest
from test_package import in_clean_place, installed  # noqa: F401  a fixture

pytestmark = pytest.mark.slow


def test_newcomer_serves_own_models_and_reads_the_reports(
  installed: pathlib.Path,  # noqa: F811
  tmp_path: pathlib.Path,
):
  script = pathlib.Path(__file__).with_name("newcomer.py")
  words = [sys.executable, str(script), str(time.time())]
  printed = in_clean_place(installed, tmp_path, words)
  assert "from the installation to the first answer" in printed
