"""The pages of docs/: the strict build, and every code block run as a reader would."""

import dataclasses
import os
import pathlib
import re
import subprocess
import sys

import pages
import pytest
from conftest import xla_flags

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
# This page has its own test, which provides the names that the page assumes.
ELSEWHERE = {"how_to/extend.md": "test_extending.py"}
WRITTEN = sorted(
  str(path.relative_to(DOCS))
  for path in DOCS.rglob("*.md")
  if str(path.relative_to(DOCS)) not in ELSEWHERE
)
WITH_BLOCKS = [
  page
  for page in WRITTEN
  if any(
    block.compared or (block.language in pages.RUN and not block.not_run)
    for block in pages.blocks((DOCS / page).read_text())
  )
]

# A line of the map: names of modules, then at least two spaces and a description.
MAPPED = re.compile(r"^ {4}(\w.*?)(?: {2,}|$)", flags=re.MULTILINE)


def run_page(page: pathlib.Path, folder: pathlib.Path) -> subprocess.CompletedProcess:
  """Runs a page in its own process, with one device, as a reader does."""
  environment = os.environ | {
    "XLA_FLAGS": xla_flags(1),
    "PYTHONPATH": str(ROOT),
    "MPLBACKEND": "agg",
  }
  command = [sys.executable, pages.__file__, str(page)]
  return subprocess.run(
    command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900
  )


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_BLOCKS)
def test_every_block_of_a_page_runs(page, tmp_path):
  done = run_page(DOCS / page, tmp_path)
  assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"


@pytest.mark.parametrize(
  "block, message",
  [
    ("```python\nassert 1 == 2, 'unequal'\n```", "unequal"),
    ("```sh\nfalse\ntrue\n```", "returned non-zero"),
    ("```gin\nPairConfig.targett = 'a'\n```", "PairConfig.targett is not a field"),
    ("<!-- compared -->\n```console\n$ echo one\ntwo\n```", "echo one prints"),
    ("```c\nint i;\n```", "neither run nor shown"),
    ("    ```python\n    raise OSError('indented')\n    ```", "indented"),
  ],
)
def test_wrong_block_fails(block, message, tmp_path):
  page = tmp_path / "page.md"
  page.write_text(f"A line.\n\n{block}\n")
  done = run_page(page, tmp_path)
  assert done.returncode != 0 and message in done.stderr


def test_blocks_share_names_and_files(tmp_path):
  page = tmp_path / "page.md"
  page.write_text(
    '```text title="in/data.txt"\nfive\n```\n'
    "```python\nword = open('in/data.txt').read().strip()\n```\n"
    "```sh\ncp in/data.txt out.txt\n```\n"
    "```python\nassert word == open('out.txt').read().strip() == 'five'\n```\n"
    "<!-- not run: needs a TPU -->\n```sh\nfalse\n```\n"
    "<!-- compared -->\n```console\n$ cat out.txt\nfive\n```\n"
    "```gin\nPairConfig.draft = @a/PairConfig()\na/PairConfig.target = %T\n```\n"
  )
  done = run_page(page, tmp_path)
  assert done.returncode == 0, done.stderr


def test_few_blocks_are_not_run_and_each_gives_a_reason():
  found = [
    (page, block)
    for page in WRITTEN
    for block in pages.blocks((DOCS / page).read_text())
  ]
  kept = [(page, block) for page, block in found if block.not_run]
  assert all(len(block.not_run.split()) >= 2 for _, block in kept)
  run = [block for _, block in found if block.language in pages.RUN]
  assert len(kept) <= len(run) / 3, [(page, block.line) for page, block in kept]


def test_every_field_of_every_config_is_in_the_reference():
  from osd_jax import base

  shown = set(
    re.findall(r"^::: (\S+)", (DOCS / "reference" / "configs.md").read_text(), re.M)
  )
  # Gin cannot construct them.
  made_in_python = {"Pair", "Model", "Vocabulary", "Identity"}
  # A config that inherits fields shows its own; the page shows the class above, too.
  assert shown == {
    f"{config.__module__}.{config.__name__}"
    for made in pages.configs()
    for config in made.__mro__[: made.__mro__.index(object)]
    if config is not base.Config and config.__name__ not in made_in_python
  }


def unknown_settings(text: str) -> list[str]:
  """Settings that a text names, such as `StreamConfig.seed`, and that do not exist."""
  known = {made.__name__: made for made in pages.configs()}
  return [
    f"{config}.{field}"
    for config, field in re.findall(r"\b([A-Z]\w*Config)\.([a-z_0-9]+)", text)
    if config in known
    and field not in {own.name for own in dataclasses.fields(known[config])}
    and not hasattr(known[config], field)
  ]


def test_every_setting_that_is_named_exists():
  written = [ROOT / "README.md"]
  for folder in ("docs", "experiments", "gin_configs", "notebooks", "osd_jax"):
    written += [
      path
      for path in (ROOT / folder).rglob("*")
      if path.suffix in {".md", ".gin", ".ipynb", ".py"}
    ]
  found = {path: unknown_settings(path.read_text()) for path in written}
  assert {path: names for path, names in found.items() if names} == {}
  # The negative control.
  text = "`GateConfig.follow` and GateConfig.cap"
  assert unknown_settings(text) == ["GateConfig.follow"]


def test_every_public_name_is_in_the_reference():
  import osd_jax

  text = (DOCS / "reference" / "api.md").read_text()
  assert [name for name in osd_jax.__all__ if f"`{name}`" not in text] == []


@pytest.mark.slow
def test_site_builds_without_warnings(tmp_path):
  command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr[-4000:]
  page = (tmp_path / "reference" / "configs" / "index.html").read_text()
  assert "num_draft_tokens" in page and "recency_half_life" in page
  assert (tmp_path / "notebooks" / "quick_start" / "index.html").exists()


def test_map_in_contributing_lists_every_module():
  """Compares the first column of the map in CONTRIBUTING.md with the tree."""
  text = (ROOT / "CONTRIBUTING.md").read_text().split("## Where things are")[1]
  mapped = set(re.findall(r"\b\w+\b", " ".join(MAPPED.findall(text.split("##")[0]))))
  here = {path.stem for path in (ROOT / "osd_jax").glob("*.py")} | {
    path.parent.name for path in (ROOT / "osd_jax").glob("*/__init__.py")
  }
  assert mapped == here - {"__init__"}
