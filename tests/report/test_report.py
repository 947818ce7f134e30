"""report.html is self-contained, shows all its input, and escapes it."""

import html.parser

import pytest

from osd_jax.report.page import _samples, write_report
from osd_jax.report.tables import Summary
from osd_jax.runs import Output, OutputsLog, RunDirectory

# Only the signature of a plot is checked.
PNG = b"\x89PNG\r\n\x1a\n" + b"\x00" * 40
EVIL = "<script>alert('x')</script> & \"q\""


class _Page(html.parser.HTMLParser):
  """Collects tags, attributes and the text of table cells."""

  _VOID = ("meta", "img", "!doctype")

  def __init__(self, text: str):
    super().__init__()
    self.tags, self.attributes, self.cells, self.open = [], [], [], []
    self.text = ""
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    self.attributes += attrs
    if tag not in self._VOID:
      self.open.append(tag)
    if tag in ("td", "th"):
      self.cells.append("")

  def handle_endtag(self, tag):
    assert self.open.pop() == tag  # tags are closed in the right order

  def handle_data(self, data):
    self.text += data
    if self.open and self.open[-1] in ("td", "th"):
      self.cells[-1] += data


@pytest.fixture
def run(tmp_path):
  made = RunDirectory.start(
    tmp_path / "run", operative_config=f"# {EVIL}", seed=7, argv=["osd", EVIL]
  )
  with OutputsLog(made.outputs_path) as log:
    log.write(Output(0, 0, "sql", EVIL, f"text {EVIL}", "EOS", 3, 1.5))
  return made


def _report(run, title="A title", **kwargs):
  plot = run.path / "distribution_overlap.png"
  plot.write_bytes(PNG)
  tables = {
    f"Topics {EVIL}": [
      {"topic": EVIL, "overlap": 0.51234, "requests": 1200},
      {"topic": "sql", "overlap": None, "speed": "2.10x"},
    ],
    "None": [],
  }
  found = Summary(title, [f"Faster {EVIL}"], tables)
  path = write_report(run, found, [plot], **kwargs)
  assert path == run.report_path
  return path.read_text(encoding="utf-8")


def test_report_shows_and_escapes_all_input(run):
  page = _Page(_report(run, note="A note"))
  assert page.open == []
  shown = ("A title", "A note", f"Faster {EVIL}", "seed 7", "git_sha", f"# {EVIL}")
  assert [words for words in shown if words not in page.text] == []
  assert page.cells == [
    "topic",
    "overlap",
    "requests",
    "speed",
    EVIL,
    "0.512",
    "1,200",
    "–",
    "sql",
    "–",
    "–",
    "2.10x",
    "topic",
    "request",
    "prompt",
    "output",
    "ended by",
    "tokens per target call",
    "sql",
    "0",
    EVIL,
    f"text {EVIL}",
    "EOS",
    "1.500",
  ]


def test_report_loads_and_runs_nothing(run):
  page = _Page(_report(run))
  assert not {"script", "link", "iframe", "object", "a"} & set(page.tags)
  sources = [value for name, value in page.attributes if name in ("src", "href")]
  assert len(sources) == 1 and sources[0].startswith("data:image/png;base64,")
  assert not [name for name, _ in page.attributes if name.startswith("on")]
  assert "url(" not in _report(run) and "@import" not in _report(run)


def test_report_can_be_written_without_plots_and_outputs(run):
  run.outputs_path.unlink()
  note = "Plots were left out: no matplotlib"
  page = _Page(write_report(run, Summary("t", [], {}), [], note).read_text())
  assert "Plots were left out" in page.text and "img" not in page.tags
  assert "What was served" not in page.text


def test_unfinished_run_is_marked(run):
  assert "not finished" in _Page(_report(run)).text
  run.finish()
  assert "not finished" not in _Page(_report(run)).text


@pytest.mark.parametrize("content", [None, b"GIF89a"])
def test_plot_that_is_not_a_png_is_refused_by_name(run, content):
  plot = run.path / "odd.png"
  if content is not None:
    plot.write_bytes(content)
  with pytest.raises(ValueError, match=r"odd\.png as a plot, expected a PNG"):
    write_report(run, Summary("t", [], {}), [plot])


def test_samples_are_the_first_middle_and_last_output_of_every_task():
  row = {"text": "t", "stop_reason": "EOS", "tokens_per_target_call": 1.5}
  rows = [
    {"query": i + 1, "task": "a" if i < 7 else "b", "prompt": "p", **row}
    for i in range(8)
  ]
  rows[0]["prompt"] = "long " * 200
  found = _samples(rows)
  assert [(row["topic"], row["request"]) for row in found] == [
    ("a", 1),
    ("a", 4),
    ("a", 7),
    ("b", 8),
  ]
  assert len(found[0]["prompt"]) < 410  # long prompts are shortened
