"""The shipped pair answers every documented example correctly."""

import pathlib
import re
import shlex

import pytest

import osd_jax

ROOT = pathlib.Path(__file__).resolve().parents[1]
CAP = "Write cap_club_hours(hours) that caps every hour at 42."
SUM = "Write sum_city_steps(steps) that sums every step above 88."
HOTELS = (
  "What is the average rating and the total price of hotels with price above 44"
  " and country 'Italy'?"
)
PLATES = (
  "Paul has 16 plates, breaks 2 of them and then gets 6 from Lucy."
  " How many plates does Paul have?"
)
# (text, the prompts that it shows)
TEXTS = {
  "README.md": [HOTELS, CAP],
  "docs/index.md": [HOTELS],
  "docs/start/first_steps.md": [PLATES, HOTELS, CAP],
  "docs/how_to/gpus.md": [CAP, SUM],
  "osd_jax/__init__.py": [CAP],
  "osd_jax/main/commands.py": [CAP],
  "notebooks/quick_start.ipynb": [HOTELS],
}
ANSWERS = {
  CAP: "def cap_club_hours(hours):\n    return [min(hour, 42) for hour in hours]",
  SUM: (
    "def sum_city_steps(steps):\n    result = 0\n    for step in steps:\n"
    "        if step > 88:\n            result += step\n    return result"
  ),
  HOTELS: (
    "SELECT AVG(rating), SUM(price) FROM hotels WHERE price > 44 AND country = 'Italy';"
  ),
  PLATES: (
    "Paul breaks 2 of them, 16 - 2 = 14. Then Paul gets 6 from Lucy, 14 + 6 = 20."
    " The answer is 20."
  ),
}


def test_shipped_pair_answers_the_examples_correctly():
  with osd_jax.Server() as server:
    answers = server.generate(list(ANSWERS), ordered=True)
    assert {answer.prompt: answer.text.strip() for answer in answers} == ANSWERS


@pytest.mark.parametrize("name", TEXTS)
def test_texts_show_these_examples(name):
  # Strings that are split over lines are joined.
  text = re.sub(r'\\?"\s*(?:\\n",\s*"\s*)?\\?"', "", (ROOT / name).read_text())
  for prompt in TEXTS[name]:
    assert prompt in text, prompt


def test_commands_of_the_docs_ask_the_shipped_pair_nothing_else():
  """Prompts for other models are not checked."""
  found = 0
  for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
    text = path.read_text().replace("\\\n", " ")
    for line in re.findall(r"^ *(osd generate .*)", text, re.M):
      words = shlex.split(line.partition(" <")[0].partition(" >")[0])
      if "--target" not in words:
        asked = [word for word in words[2:] if " " in word]
        assert set(asked) <= set(ANSWERS), (path, asked)
        found += len(asked)
  assert found >= 5
