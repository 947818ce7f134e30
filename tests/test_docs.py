"""The pages of docs/: the strict build, and every code block run as a reader would."""

import dataclasses
import functools
import importlib
import json
import os
import pathlib
import re
import subprocess
import sys
import traceback

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

# The demo with less to compile and to score before the first request. Only the page
# about costs times rounds and updates.
SMALL = """include "runs/demo.gin"
warm_start/BatchConfig.limit_rows = 1
DecodingConfig.source_lengths = (32,)
"""
UNTIMED, TIMED = "OnlineConfig.measure_costs = False\n", "how_it_works/ledger.md"
SMALLER = {
  "=runs/demo.gin --gin.": "=small.gin --gin.",
  'include "runs/demo.gin"\n': 'include "small.gin"\n',
}

# A line of the map: names of modules, then at least two spaces and a description.
MAPPED = re.compile(r"^ {4}(\w.*?)(?: {2,}|$)", flags=re.MULTILINE)
# All pages that name files, the docs included.
READMES = (
  "README.md",
  "CONTRIBUTING.md",
  "experiments/README.md",
  "benchmarks/README.md",
)
FILE = re.compile(r"[\w./-]*\w\.(?:py|gin|md|ipynb|cc|csv|sh|yaml|svg|toml)(?!\w)")
# Files of the reader and of runs, and placeholders such as NAME.py.
NOT_OURS = re.compile(r"^my[._]|operative_config|[A-Z]{4}(?!.*\.md)")


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_BLOCKS)
def test_every_block_of_a_page_runs(page, tmp_path):
  """In its own process, with one device, as a reader does, but with `SMALL` runs."""
  text, smaller = (DOCS / page).read_text(), tmp_path / pathlib.Path(page).name
  for whole, part in SMALLER.items():
    text = text.replace(whole, part)
  smaller.write_text(text)
  (tmp_path / "small.gin").write_text(SMALL + UNTIMED * (page != TIMED))
  env = {"XLA_FLAGS": xla_flags(1), "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
  command, env = [sys.executable, pages.__file__, str(smaller)], os.environ | env
  result = subprocess.run(
    command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=900
  )
  assert result.returncode == 0, f"{result.stdout[-2000:]}\n{result.stderr[-6000:]}"


@pytest.mark.parametrize(
  "block, message",
  [
    ("```python\nassert 1 == 2, 'unequal'\n```", "unequal"),
    ("```sh\nfalse\ntrue\n```", "returned non-zero"),
    ("```gin\nPairConfig.targett = 'a'\n```", "PairConfig.targett is not a field"),
    ("<!-- compared -->\n```console\n$ echo one\ntwo\n```", "echo one prints"),
    ("```c\nint i;\n```", "neither run nor shown"),
    ("    ```python\n    raise OSError('indented')\n    ```", "indented"),
    (
      "```python\nint('5')  # raises ValueError\n```",
      "raises nothing, expected ValueErr",
    ),
    ("```python\nint([])  # raises ValueError\n```", "TypeError"),
    ("```sh\ntrue  # exit code 2\n```", "exit code 0, expected 2"),
  ],
)
def test_wrong_block_fails(block, message, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  page = tmp_path / "page.md"
  page.write_text(f"A line.\n\n{block}\n")
  with pytest.raises(Exception) as caught:
    pages.run(page)
  assert message in "".join(traceback.format_exception(caught.value))


def test_blocks_share_names_and_files(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  page = tmp_path / "page.md"
  page.write_text(
    '```text title="in/data.txt"\nfive\n```\n'
    "```python\nword = open('in/data.txt').read().strip()\n```\n"
    "```sh\ncp in/data.txt out.txt\n```\n"
    "```python\nassert word == open('out.txt').read().strip() == 'five'\n```\n"
    "<!-- not run: needs a TPU -->\n```sh\nfalse\n```\n"
    "<!-- compared -->\n```console\n$ cat out.txt\nfive\n```\n"
    "```python\nint(word)  # raises ValueError\n```\n"
    "```sh\n(exit 3)  # exit code 3\n```\n"
    "```gin\nPairConfig.draft = @a/PairConfig()\na/PairConfig.target = %T\n```\n"
  )
  pages.run(page)


def test_few_blocks_are_not_run_and_each_gives_a_reason():
  blocks = [
    (page, block)
    for page in WRITTEN
    for block in pages.blocks((DOCS / page).read_text())
  ]
  not_run = [(page, block) for page, block in blocks if block.not_run]
  assert all(any(whole in block.text for _, block in blocks) for whole in SMALLER)
  assert all(len(block.not_run.split()) >= 2 for _, block in not_run)
  programs = [block for _, block in blocks if block.language in pages.RUN]
  assert len(not_run) <= len(programs) / 3, [(page, x.line) for page, x in not_run]
  # An example that fails says so with `# raises`, which is checked.
  assert not [page for page, block in blocks if "except osd_jax" in block.text]


def test_every_field_of_every_config_is_in_the_reference():
  from osd_jax import base

  names = set(
    re.findall(r"^::: (\S+)", (DOCS / "reference" / "configs.md").read_text(), re.M)
  )
  # Gin cannot construct them.
  python_only = {"Pair", "Model", "Vocabulary", "Identity"}
  # A config that inherits fields shows its own; the page shows the class above, too.
  assert names == {
    f"{config.__module__}.{config.__name__}"
    for leaf in pages.configs()
    for config in leaf.__mro__[: leaf.__mro__.index(object)]
    if config is not base.Config and config.__name__ not in python_only
  }


def unknown_settings(text: str) -> list[str]:
  """Settings that a text names, such as `StreamConfig.seed`, and that do not exist."""
  configs = {config.__name__: config for config in pages.configs()}
  return [
    f"{config}.{field}"
    for config, field in re.findall(r"\b([A-Z]\w*Config)\.([a-z_0-9]+)", text)
    if config in configs
    and field not in {own.name for own in dataclasses.fields(configs[config])}
    and not hasattr(configs[config], field)
  ]


def test_every_setting_that_is_named_exists():
  files = [ROOT / "README.md"]
  folders = ("docs", "experiments", "gin_configs", "notebooks", "osd_jax", "osd_serve")
  for folder in folders:
    files += [
      path
      for path in (ROOT / folder).rglob("*")
      if path.suffix in {".md", ".gin", ".ipynb", ".py"}
    ]
  unknown = {path: unknown_settings(path.read_text()) for path in files}
  assert {path: names for path, names in unknown.items() if names} == {}
  # The negative control.
  text = "`GateConfig.follow` and GateConfig.error_rate"
  assert unknown_settings(text) == ["GateConfig.follow"]


def test_api_page_lists_exactly_the_public_names():
  import osd_jax

  table = re.findall(
    r"^\| (`.*?) \|", (DOCS / "reference" / "api.md").read_text(), re.M
  )
  assert set(re.findall(r"`(\w+)`", " ".join(table))) == set(osd_jax.__all__)


def documents() -> dict[pathlib.Path, str]:
  """Returns all pages with their text, without addresses of other sites."""
  files = [ROOT / name for name in READMES] + [DOCS / page for page in WRITTEN]
  files.append(DOCS / "how_to" / "extend.md")
  return {path: re.sub(r"\w+://[^\s)>]+", "", path.read_text()) for path in files}


def missing_names(text: str) -> list[str]:
  """Dotted names of our packages in a text that cannot be imported."""
  names = re.findall(r"(?:^::: |`)(osd_(?:jax|serve|tools)(?:\.\w+)+)", text, re.M)
  return [name for name in names if not _can_be_imported(name)]


def _can_be_imported(name: str) -> bool:
  parts = name.split(".")
  for end in range(len(parts), 0, -1):
    try:
      module = importlib.import_module(".".join(parts[:end]))
    except ModuleNotFoundError:
      continue
    return (
      functools.reduce(
        lambda value, part: getattr(value, part, None), parts[end:], module
      )
      is not None
    )
  return False


def test_every_dotted_name_can_be_imported():
  missing = {path: missing_names(text) for path, text in documents().items()}
  assert {path: names for path, names in missing.items() if names} == {}
  # The negative control.
  assert missing_names("`osd_jax.certify` and `osd_jax.online.run(config)`") == [
    "osd_jax.certify"
  ]


def missing_files(text: str, folder: pathlib.Path) -> list[str]:
  """Files that a text names or links to, but that neither exist nor are its blocks."""
  titles = {block.title for block in pages.blocks(text)}
  roots = (folder, ROOT, ROOT / "osd_jax", ROOT / "gin_configs")
  missing = []
  for name in sorted(set(FILE.findall(text)) - titles):
    if NOT_OURS.search(name):
      continue
    if not any((root / name).exists() for root in roots) and name not in basenames():
      missing.append(name)
  return missing


def dead_links(path: pathlib.Path) -> list[str]:
  """Links of a page or notebook to files or headings that do not exist."""

  def slugs(text: str) -> set[str]:
    titles = re.findall(r"^#+ +(.*)", text, re.M)
    words = (re.sub(r"[^\w\s-]", "", title).strip().lower() for title in titles)
    return {re.sub(r"[-\s]+", "-", title) for title in words}

  def read(page: pathlib.Path) -> str:
    text = page.read_text()
    if page.suffix == ".ipynb":
      cells = json.loads(text)["cells"]
      written = [cell for cell in cells if cell["cell_type"] == "markdown"]
      return "\n".join("".join(cell["source"]) for cell in written)
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)

  dead = []
  for link in re.findall(r"\]\(([^)\s]+)\)", read(path)):
    name, _, heading = link.partition("#")
    other = path.parent / name if name else path
    # The site knows a notebook by its name alone, see docs/hooks.py.
    is_near = path.suffix != ".ipynb" or re.fullmatch(r"(\w+\.ipynb)?", name)
    if ":" not in link and not (other.exists() and is_near):
      dead.append(link)
    elif heading and other.suffix == ".md" and heading not in slugs(read(other)):
      dead.append(link)
  return dead


def test_every_link_leads_to_a_file_and_a_heading(tmp_path):
  pages = [*documents(), *(ROOT / "notebooks").glob("*.ipynb")]
  found = {path: dead_links(path) for path in pages}
  assert {path: links for path, links in found.items() if links} == {}
  # The negative control.
  (tmp_path / "a.md").write_text("# One two\n[x](#one-two) [y](#three) [z](b.md)")
  cell = {"cell_type": "markdown", "source": ["[x](a.md) [y](n.ipynb) [z](m.ipynb)"]}
  (tmp_path / "n.ipynb").write_text(json.dumps({"cells": [cell]}))
  assert dead_links(tmp_path / "a.md") == ["#three", "b.md"]
  assert dead_links(tmp_path / "n.ipynb") == ["a.md", "m.ipynb"]


@functools.cache
def basenames() -> frozenset[str]:
  """Names of all files of the repository, without their folders."""
  folders = ("osd_jax", "osd_serve", "osd_tools", "tests", "benchmarks", "experiments")
  paths = (path for folder in folders for path in (ROOT / folder).rglob("*.*"))
  return frozenset(path.name for path in paths)


def test_every_file_that_is_named_exists():
  missing = {
    path: missing_files(text, path.parent) for path, text in documents().items()
  }
  assert {path: names for path, names in missing.items() if names} == {}
  # The negative control.
  text = "`tests/test_compilers.py`, [this](nothing.md), `accept.py`, `models/NAME.py`"
  assert missing_files(text, DOCS) == ["nothing.md", "tests/test_compilers.py"]


def test_install_page_states_the_size_of_the_weights():
  weights = (ROOT / "osd_jax" / "assets").glob("*.safetensors")
  size = sum(path.stat().st_size for path in weights) / 2**20
  assert f"{size:.0f} MiB of trained weights" in (DOCS / "start/install.md").read_text()


@pytest.mark.slow
def test_site_builds_without_warnings(tmp_path):
  command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
  result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert result.returncode == 0, result.stderr[-4000:]
  page = (tmp_path / "reference" / "configs" / "index.html").read_text()
  assert "num_draft_tokens" in page and "recency_half_life" in page
  books = [path.read_text() for path in (tmp_path / "notebooks").rglob("index.html")]
  assert len(books) >= 6 and not re.findall(r'href="\w+\.ipynb', "".join(books))
  assert 'href="../adapting_draft/"' in "".join(books)


def test_map_in_contributing_lists_every_module():
  """Compares the first column of the map in CONTRIBUTING.md with osd_jax/."""
  text = (ROOT / "CONTRIBUTING.md").read_text().split("## Where things are")[1]
  names = set(re.findall(r"\b\w+\b", " ".join(MAPPED.findall(text.split("##")[0]))))
  modules = {path.stem for path in (ROOT / "osd_jax").glob("*.py")} | {
    path.parent.name for path in (ROOT / "osd_jax").glob("*/__init__.py")
  }
  assert names == modules - {"__init__"}
