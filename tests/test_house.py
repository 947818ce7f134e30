"""Limits of the code base; to raise one, say in docs/decisions.md what that buys."""

import ast
import csv
import functools
import pathlib
import re
import subprocess
import sys

import pytest
from conftest import DURATIONS, ROOT

ALL = "osd_jax osd_serve osd_tools"
LIMITS = {  # (folders, measure) -> most
  ("osd_jax", "lines"): 30030,
  ("osd_serve osd_tools", "lines"): 7055,
  ("tests", "lines"): 35400,
  ("osd_jax", "files"): 100,
  ("osd_jax", "longest import chain"): 13,
  ("osd_jax", "lines loaded by Server"): 20795,
  ("osd_jax", "config fields"): 212,
  (ALL, "function lines"): 60,
  (ALL, "parameters"): 8,
  (ALL, "participle names, %"): 1,
  (ALL, "odd summaries of a folder, %"): 1.3,
}
PARTICIPLES = set(  # say what was done to a value instead of what it holds
  """asked bound built chosen counted done drawn fed found given held kept known left
  listed made measured merged moved named noted opened own padded picked read_again seen
  sent shown sized split_off spoken stated stored taken told tried used wanted written
  said""".split()
)
ODD = re.compile(  # what engineers of this field hardly write
  r"""\b(beside|anew|whoever|whatever\ it|dearest|by\ turns|so\ many|as\ many|hears?\ of
  |(is|are)\ told|lies\ there|stands?\ (in|at|on|by|for|again|still)|comes?\ back
  |(is|are)\ no\ (?!longer|more|op)|ha(s|ve)\ none|takes?\ in|gives?\ way|in\ place\ of
  |what\ (is|are|was|were|it|he|they|has|have|does|remains|follows|lies|comes)\b
  |of\ (it|them|which|these|those|whom)\b|nothing\ (is|was|waits|comes|of)|none\ of
  |one\ of\ (ours|its)|there\ (is|are)\ no|behind\ (it|them|its|the\ last)|mostly\ all
  |as\ it\ (is|was|stands|lies|comes)|how\ (many|much|long)\ (of|else)|at\ hand
  |else,?$|and\ (what|who|where|how|no\ more))""",
  re.IGNORECASE | re.VERBOSE,
)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@functools.cache
def texts(folders: str) -> dict[pathlib.Path, str]:
  paths = (path for name in folders.split() for path in (ROOT / name).rglob("*.py"))
  return {path: path.read_text() for path in paths}


@functools.cache
def nodes(folders: str) -> dict[pathlib.Path, list]:
  """Returns every node of the syntax tree of each file; the first is the module."""
  return {p: list(ast.walk(ast.parse(text))) for p, text in texts(folders).items()}


def of_kind(folders: str, *kinds: type) -> list:
  return [x for file in nodes(folders).values() for x in file if isinstance(x, kinds)]


def import_chain(folders: str) -> int:
  parts = {p: p.relative_to(ROOT).with_suffix("").parts for p in texts(folders)}
  names = {p: ".".join(x).removesuffix(".__init__") for p, x in parts.items()}
  bodies = {names[path]: file[0].body for path, file in nodes(folders).items()}

  @functools.cache
  def length(module: str) -> int:
    imports = set()
    for node in bodies[module]:
      if isinstance(node, ast.Import):
        imports |= {alias.name for alias in node.names}
      elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        imports |= {node.module, *(f"{node.module}.{x.name}" for x in node.names)}
    # The packages around a module are imported before it.
    below = [x for x in imports & bodies.keys() if not f"{module}.".startswith(f"{x}.")]
    return 1 + max(map(length, below), default=0)

  return max(map(length, bodies))


def loaded_lines(folders: str) -> int:
  program = "from osd_jax import Server; import sys; print(sys.modules.values())"
  files = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True)
  loaded = set(re.findall(r" from '(.+?)'>", files))
  return sum(t.count("\n") for p, t in texts(folders).items() if str(p) in loaded)


def config_fields(folders: str) -> int:
  configs = (x for x in of_kind(folders, ast.ClassDef) if x.name.endswith("Config"))
  return sum(isinstance(x, ast.AnnAssign) for config in configs for x in config.body)


def largest_function(folders: str) -> tuple[int, int]:
  """Returns the most lines of a body without its docstring, and the most parameters."""
  lines = parameters = 0
  for node in of_kind(folders, *FUNCTIONS):
    if body := node.body[ast.get_docstring(node) is not None :]:
      lines = max(lines, body[-1].end_lineno - body[0].lineno + 1)
    arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
    parameters = max(parameters, sum(x.arg not in ("self", "cls") for x in arguments))
  return lines, parameters


def participle_share(folders: str) -> float:
  """Returns the % of the names assigned in functions that are participles."""
  trees = [list(ast.walk(x)) for x in of_kind(folders, *FUNCTIONS)]
  names = ([x for x in tree if isinstance(x, ast.Name)] for tree in trees)
  local = [{x.id for x in some if isinstance(x.ctx, ast.Store)} for some in names]
  return 100 * sum(len(x & PARTICIPLES) for x in local) / sum(map(len, local))


def odd_share(folders: str) -> float:
  """Returns the largest % over the folders of docstrings with an odd summary."""
  odd: dict[pathlib.Path, list[bool]] = {}
  for path, file in nodes(folders).items():
    owners = (x for x in file if isinstance(x, (ast.Module, ast.ClassDef, *FUNCTIONS)))
    for text in filter(None, map(ast.get_docstring, owners)):
      odd.setdefault(path.parent, []).append(bool(ODD.search(text.split("\n\n")[0])))
  return max(100 * sum(some) / max(len(some), 10) for some in odd.values())


MEASURES = {
  "lines": lambda folders: sum(x.count("\n") for x in texts(folders).values()),
  "files": lambda folders: len(texts(folders)),
  "longest import chain": import_chain,
  "lines loaded by Server": loaded_lines,
  "config fields": config_fields,
  "function lines": lambda folders: largest_function(folders)[0],
  "parameters": lambda folders: largest_function(folders)[1],
  "participle names, %": participle_share,
  "odd summaries of a folder, %": odd_share,
}


@pytest.mark.parametrize(("folders", "measure"), LIMITS)
def test_measure_is_within_its_limit(folders, measure):
  assert MEASURES[measure](folders) <= LIMITS[folders, measure]


def test_durations_name_exactly_the_test_files():
  rows = csv.DictReader(DURATIONS.read_text().splitlines())
  paths = (ROOT / "tests").rglob("test_*.py")
  assert {row["file"] for row in rows} == {str(p.relative_to(ROOT)) for p in paths}, (
    "tests/durations.csv: run the suites and then `make durations`, or add a row"
    " quick,FILE,SECONDS for a new file and delete the rows of a removed one"
  )
