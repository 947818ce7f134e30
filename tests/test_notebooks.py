"""Notebooks run from top to bottom in a fresh kernel; stored outputs show plots."""

import json
import pathlib
import shutil
import subprocess

import nbclient
import nbformat
import pytest
from conftest import xla_flags
from nbformat.v4 import new_code_cell, new_notebook

from osd_jax import convert

# Smaller sizes for the tests: text of a cell and its replacement.
SMALLER = {
  "quick_start": {"LEARN = 24 ": "LEARN = 8 "},
  "adapting_draft": {
    "MATHS, SQL = 60, 100 ": "MATHS, SQL = 20, 60 ",
    "REQUESTS = 40 ": "REQUESTS = 12 ",
  },
  "only_a_target": {
    "REQUESTS = 120 ": "REQUESTS = 60 ",
    "shipped:demo_target.safetensors": "my_model",
  },
  "own_data_and_weights": {"REQUESTS = 48 ": "REQUESTS = 16 "},
  "decoder_only_pair": {
    "STEPS = 300 ": "STEPS = 40 ",
    "num_layers=4": "num_layers=2",
    "REQUESTS = 80": "REQUESTS = 30",
  },
  "paper_figure": {"REQUESTS = 80 ": "REQUESTS = 30 "},
}
PROGRESS = """
import sys
sys.modules["ipywidgets"] = None  # as if it were not installed
import rich.console, rich.progress
from osd_jax.report import progress
with {progress} as bar:
  task = bar.add_task("serve", total=2, figures="")
  bar.update(task, completed=2)
with progress.status(rich.console.Console(stderr=True), "timing"):
  pass
"""


class Kernel(nbclient.NotebookClient):
  """Runs a notebook, and counts how often a displayed figure was updated."""

  redrawn = 0

  def process_message(self, msg, cell, cell_index):
    self.redrawn += msg["msg_type"] == "update_display_data"
    return super().process_message(msg, cell, cell_index)

  def outputs(self, kind):
    """Yields what the cells printed ("stream") or displayed ("image/png"), in order."""
    for cell in self.nb.cells:
      for output in cell.get("outputs", []):
        data = {output.output_type: output.get("text"), **output.get("data", {})}
        if kind in data:
          yield data[kind]

  def text(self):
    return "".join([*self.outputs("stream"), *self.outputs("text/plain")])


@pytest.fixture
def execute(repository, tmp_path, monkeypatch):
  """Executes a notebook in `tmp_path`, with this checkout and default settings."""
  for name in ("JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
    monkeypatch.setenv(name, str(tmp_path / name.lower()))
  monkeypatch.setenv("PYTHONPATH", str(repository))
  monkeypatch.setenv("XLA_FLAGS", xla_flags(1))  # one device, as a reader has
  monkeypatch.delenv("MPLBACKEND", raising=False)

  def executed(book):
    resources = {"metadata": {"path": str(tmp_path)}}
    kernel = Kernel(book, timeout=600, kernel_name="python3", resources=resources)
    kernel.execute()
    return kernel

  return executed


@pytest.fixture(params=SMALLER)
def path(request, repository) -> pathlib.Path:
  return repository / "notebooks" / f"{request.param}.ipynb"


def test_stored_outputs_are_small_and_show_a_plot(path, repository):
  """GitHub shows stored outputs; notebooks that take long are stored without them."""
  book = nbformat.read(path, as_version=nbformat.NO_CONVERT)
  nbformat.validate(book)
  assert book.nbformat == 4
  code = [cell for cell in book.cells if cell.cell_type == "code"]
  assert "%pip install" in code[0].source and "find_spec" in code[0].source
  outputs = [output for cell in code for output in cell.outputs]
  text = json.dumps(outputs)
  assert not outputs or "image/png" in text
  assert len(text) < 300_000 and str(repository.parent) not in text
  assert not {"error"} & {output.output_type for output in outputs}
  assert not [word for word in ("Warning", "ipywidgets", "<iframe") if word in text]


def test_make_fork_writes_one_repository_into_every_notebook(repository, tmp_path):
  shutil.copytree(repository / "notebooks", tmp_path / "notebooks")
  shutil.copy(repository / "Makefile", tmp_path)
  for name in ("me/my.fork", "OWNER/osd_jax"):
    command = ["make", "fork", f"REPOSITORY={name}"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    for path in (tmp_path / "notebooks").iterdir():
      text = path.read_text()
      link = f"colab.research.google.com/github/{name}/blob/main/notebooks/{path.name})"
      assert link in text and f'REPOSITORY = \\"{name}\\"' in text
  # The second name is the one that is stored.
  for path in (repository / "notebooks").glob("*.ipynb"):
    assert path.read_text() == (tmp_path / "notebooks" / path.name).read_text()
  command = ["make", "fork", "REPOSITORY=https://example.org/x"]
  assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode


def test_all_notebooks_are_executed(repository):
  folder = repository / "notebooks"
  assert {path.stem for path in folder.glob("*.ipynb")} == set(SMALLER)


def smaller(repository, name, ask):
  """A notebook with fewer requests, and a last cell that prints `ask` as JSON."""
  text = (repository / "notebooks" / f"{name}.ipynb").read_text()
  for whole, part in SMALLER[name].items():
    assert text.count(whole) == 1, f"{name}.ipynb does not contain {whole!r}"
    text = text.replace(whole, part)
  book = nbformat.reads(text, as_version=4)
  book.cells.append(new_code_cell(f"import json\nprint(json.dumps({ask}))"))
  return book


def answer(kernel):
  return json.loads(kernel.nb.cells[-1].outputs[0].text)


@pytest.mark.slow
def test_quick_start_speeds_up_and_keeps_texts(repository, execute, tmp_path):
  ask = """{
    "texts": [[a.text for a in by] for by in (answers, again, alone)],
    "target_calls": [[a.target_calls for a in by] for by in (answers, alone)],
    "updates": server.statistics.updates,
    "version": again[0].draft_version,
  }"""
  kernel = execute(smaller(repository, "quick_start", ask))
  result = answer(kernel)
  shipped, adapted, plain = result["texts"]
  assert shipped == adapted == plain and len(set(plain)) == 4
  drafted, undrafted = map(sum, result["target_calls"])
  assert drafted < undrafted / 2  # so the draft was used
  assert len(list(kernel.outputs("image/png"))) == 1
  assert result["updates"] >= 1 and result["version"] >= 1
  assert (tmp_path / "runs" / "adapted_draft.safetensors").is_file()
  assert "Warning" not in kernel.text()


@pytest.mark.slow
def test_adapting_draft_raises_acceptance_and_stays_exact(
  repository, execute, tmp_path
):
  ask = "[latest, result.exact, str(result.path), len(served['online'])]"
  kernel = execute(smaller(repository, "adapting_draft", ask))
  latest, exact, run, served = answer(kernel)
  assert latest["online"] > latest["frozen"] + 0.1
  assert exact and served == 80
  assert (tmp_path / run / "report.html").is_file()
  assert kernel.redrawn == 20  # the plot was redrawn as it grew
  assert len(list(kernel.outputs("image/png"))) == 1  # this plot
  assert len(list(kernel.outputs("image/svg+xml"))) == 1  # that of the run
  assert any(page.startswith("<iframe") for page in kernel.outputs("text/html"))
  text = kernel.text()
  assert "serve 24/24" in text  # progress without ipywidgets
  assert "Warning" not in text and "ipywidgets" not in text


@pytest.mark.slow
def test_only_a_target_learns_a_draft_from_nothing(repository, execute, tmp_path):
  """With a folder of transformers, as a published model is."""
  convert.run(
    convert.ConvertConfig(
      source="shipped:demo_target.safetensors",
      output=str(tmp_path / "my_model"),
      output_kind="hugging_face",
      vocabulary="shipped:demo_vocabulary.model",
    )
  )
  ask = "[counts, texts[:20] == alone, server.statistics.updates]"
  kernel = execute(smaller(repository, "only_a_target", ask))
  counts, exact, updates = answer(kernel)
  assert exact and updates >= 3 and len(counts) == 60
  mean = lambda part: sum(part) / len(part)
  assert mean(counts[:5]) < 1.3  # the draft starts untrained
  assert mean(counts[-10:]) > mean(counts[:5]) + 0.5
  assert kernel.redrawn == 15  # the plot was redrawn as it grew
  assert "Warning" not in kernel.text()


@pytest.mark.release
def test_own_data_and_weights_run_and_convert(repository, execute, tmp_path):
  ask = "[result.exact, len(requests), data['tasks'], answer.text, last]"
  kernel = execute(smaller(repository, "own_data_and_weights", ask))
  exact, served, tasks, text, last = answer(kernel)
  assert exact and served == 32 and text and last > 1
  assert tasks["finance"]["skipped"] == 1 and tasks["sql"]["skipped"] == 0
  assert (tmp_path / "my_target" / "config.json").is_file()
  assert any(page.startswith("<iframe") for page in kernel.outputs("text/html"))
  assert "Warning" not in kernel.text()


@pytest.mark.release
def test_decoder_only_pair_improves_during_serving(repository, execute):
  ask = "[counts, server.statistics.updates, len(alone)]"
  kernel = execute(smaller(repository, "decoder_only_pair", ask))
  counts, updates, alone = answer(kernel)
  assert len(counts) == 30 and alone == 20 and updates >= 3
  assert sum(counts[-10:]) > sum(counts[:10])
  assert len(list(kernel.outputs("image/png"))) == 1
  assert "Warning" not in kernel.text()


@pytest.mark.release
def test_paper_figure_shows_a_gain_over_the_static_draft(repository, execute):
  kernel = execute(smaller(repository, "paper_figure", "[means, result.exact]"))
  means, exact = answer(kernel)
  assert exact and set(means) == {"sql", "python", "finance"}
  static, online = means["sql"]
  assert online > static + 0.05
  assert len(list(kernel.outputs("image/png"))) == 2
  assert "Warning" not in kernel.text()


def test_failing_cell_raises_an_error(execute):
  with pytest.raises(nbclient.exceptions.CellExecutionError, match="not equal"):
    execute(new_notebook(cells=[new_code_cell("assert 'a' == 'b', 'not equal'")]))


def test_progress_in_a_kernel_needs_no_ipywidgets(execute):
  ours = "progress.bar(rich.console.Console(stderr=True))"
  cells = [new_code_cell(PROGRESS.format(progress=ours))]
  text = execute(new_notebook(cells=cells)).text()
  assert "serve 2/2" in text and "timing ..." in text
  assert "ipywidgets" not in text and "Warning" not in text

  # Control: Rich's own progress bar asks for ipywidgets in a kernel.
  cells = [new_code_cell(PROGRESS.format(progress="rich.progress.Progress()"))]
  assert "ipywidgets" in execute(new_notebook(cells=cells)).text()
