"""report.html is self-contained, shows all its input, escapes it, and fits a phone."""

import html.parser
import re
import sys

import browser
import pytest
from report import synthetic_run

from osd_jax import base
from osd_jax.report import page, plots
from osd_jax.report.tables import Fact, Summary
from osd_jax.runs import JsonLines, MetricsLog, RunDirectory

SVG = '<?xml version="1.0"?>\n<svg viewBox="0 0 1 1">'
SVG += '<path style="fill: #ffffff; stroke: #0072b2"/></svg>'
EVIL = "<script>alert('x')</script> & \"q\""
ANSWER = "def add(values):\n  total = 0\n  return total"


class _Page(html.parser.HTMLParser):
  """Collects tags, attributes and the text of table cells."""

  _VOID = ("meta", "!doctype")

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
    if {"td", "th"} & set(self.open):
      self.cells[-1] += data


@pytest.fixture
def run(tmp_path, monkeypatch):
  monkeypatch.setattr(sys, "argv", ["osd", EVIL])
  made = RunDirectory.start(tmp_path / "run", operative_config=f"# {EVIL}", seed=7)
  with JsonLines(made.outputs_path) as log:
    row = {
      "index": 0,
      "query": 0,
      "task": "sql",
      "prompt": EVIL,
      "text": f"text {EVIL}",
    }
    log.append(row | {"stop_reason": "EOS", "tokens": 3, "tokens_per_target_call": 1.5})
  return made


def _plots(run, count=1):
  drawn = []
  for number in range(count):
    path = run.path / f"plot_{number}.svg"
    path.write_text(SVG)
    drawn.append(plots.Plot(path, f"Caption {number} {EVIL}"))
  return drawn


def _report(run, count=1, **kwargs):
  found = Summary(
    "A title",
    [Fact(f"2x {EVIL}", f"Faster {EVIL}")],
    ["A sentence"],
    {
      f"Topics {EVIL}": [
        {"topic": EVIL, "overlap": 0.51234, "requests": 1200},
        {"topic": "sql", "overlap": None, "speed": "2.10x"},
      ],
      "None": [],
    },
    {"Prices": [{"call": "x", "ms": 1234.5}]},
    ["In detail"],
  )
  path = page.write_report(run, found, _plots(run, count), **kwargs)
  assert path == run.report_path
  return path.read_text(encoding="utf-8")


def test_report_shows_and_escapes_all_input(run):
  shown = _Page(_report(run, note="A note"))
  assert shown.open == []
  words = ("A title", "A note", f"Faster {EVIL}", "seed 7", "git_sha", f"# {EVIL}")
  words += (f"2x {EVIL}", "A sentence", "In detail", f"Caption 0 {EVIL}")
  assert [text for text in words if text not in shown.text] == []
  # fmt: off
  assert shown.cells == [
    "topic", "overlap", "requests", "speed",
    EVIL, "0.512", "1,200", "–",
    "sql", "–", "–", "2.10x",
    "topic", "request", "prompt", "output", "ended by", "tokens per target call",
    "sql", "0", EVIL, f"text {EVIL}", "EOS", "1.50",
    "call", "ms", "x", "1,234.5",
  ]
  # fmt: on


def test_report_loads_and_runs_nothing(run):
  text = _report(run)
  shown = _Page(text)
  assert not {"script", "link", "iframe", "object", "img"} & set(shown.tags)
  names = ("src", "href", "xlink:href")
  sources = [value for name, value in shown.attributes if name in names]
  assert sources and all(source.startswith("#") for source in sources)
  assert not [name for name, _ in shown.attributes if name.startswith("on")]
  assert "url(" not in text and "@import" not in text


def test_headline_plots_tables_and_details_come_in_this_order(run):
  text = _report(run, count=6)
  order = ["Faster", "Caption 0", "Caption 3", "Topics", "What was served", "<details>"]
  order += ["Prices", "More plots", "Caption 4", "Caption 5", "Provenance", "Terms"]
  places = [text.index(word) for word in order]
  assert places == sorted(places)


def test_headings_link_to_terms_that_the_page_explains(run):
  shown = _Page(_report(run))
  ids = {value for name, value in shown.attributes if name == "id"}
  links = {value[1:] for name, value in shown.attributes if name == "href"}
  assert links == ids == {"overlap", "tokens-per-target-call", "ended-by"}


def test_colours_follow_the_scheme_of_the_page(run):
  text = _report(run)
  assert "fill: var(--page); stroke: var(--online)" in text
  assert "<?xml" not in text and "prefers-color-scheme: dark" in text
  style = text[: text.index("</style>")]
  light, dark = (
    set(re.findall(r"(--\w+):", part)) for part in style.split("@media (prefers")
  )
  assert light == dark == set(page._THEMED.values()) | {"--card"}


def test_outputs_that_are_not_exact_stand_out(run):
  found = Summary("t", notes=["All equal.", "NOT EXACT, please report this."])
  text = page.write_report(run, found, []).read_text()
  assert '<p class="faint">All equal.' in text and '<p class="alert">NOT' in text


def test_unfinished_run_is_marked(run):
  assert "not finished" in _Page(_report(run)).text
  run.stop()  # as a server does, which can go on
  text = _Page(_report(run)).text
  assert "stopped in order 20" in text and "not finished" not in text
  run.finish()
  assert not re.search("not finished|stopped", _Page(_report(run)).text)


@pytest.mark.parametrize("content", [None, "GIF89a"])
def test_plot_that_is_not_an_svg_is_refused_by_name(run, content):
  plot = plots.Plot(run.path / "odd.svg")
  if content is not None:
    plot.path.write_text(content)
  with pytest.raises(base.InputError, match=r"odd\.svg as a plot, expected an SVG"):
    page.write_report(run, Summary("t"), [plot])


def test_samples_are_the_first_middle_and_last_output_of_every_task():
  row = {"text": "t", "stop_reason": "EOS", "tokens_per_target_call": 1.5}
  rows = [
    {"query": i + 1, "task": "a" if i < 7 else "b", "prompt": "p", **row}
    for i in range(8)
  ]
  rows[0]["prompt"] = "long " * 200
  rows.append({"query": 9, "task": "a", "stop_reason": "EOS"})  # keeps no texts
  found = page._samples(rows)
  places = [(row["topic"], row["request"]) for row in found]
  assert places == [("a", 1), ("a", 4), ("a", 7), ("b", 8)]
  assert len(found[0]["prompt"]) < 410  # long prompts are shortened


def test_columns_have_the_same_number_of_decimals(tmp_path):
  table = [{"share": 0.5, "ms": 3.14159}, {"share": 1.0, "ms": 12.0}]
  path = page.write_page(tmp_path / "page.html", Summary("t", tables={"T": table}), [])
  assert _Page(path.read_text()).cells[2:] == ["0.500", "3.14", "1.000", "12.00"]


# --- In a browser ---------------------------------------------------------------------

# Measures pages in frames as wide as screens. Listed are elements that end to the right
# of their frame, or in which a part is hidden until it is scrolled.


@pytest.fixture
def served(tmp_path):
  """The report of a run, and of two compared runs."""
  pytest.importorskip("matplotlib", reason="the extra [plots] is not installed")
  paths = [tmp_path / name for name in ("a_run_with_a_long_name", "another_run")]
  for seed, path in enumerate(paths):
    run = RunDirectory.start(path)
    with MetricsLog(run.metrics_path) as log:
      for row in synthetic_run.rows(160, seed):
        log.write(row)
    with JsonLines(run.outputs_path) as log:
      row = {"index": 0, "query": 0, "task": "python", "prompt": "x" * 300}
      row |= {"text": ANSWER, "stop_reason": "EOS", "tokens": 30}
      log.append(row | {"tokens_per_target_call": 3.12})
    run.finish()
    run.close()
  one = page.redraw(paths[0])
  return [path.read_text() for path in (one, page.compare(paths, tmp_path / "both"))]


@pytest.mark.skipif(not browser.PROGRAM, reason="no Chromium on this machine")
def test_nothing_is_cut_on_a_desk_or_a_phone(served, tmp_path):
  frames = [(text, width) for text in served for width in (400, 900, 1400)]
  # Negative control: without the style for narrow screens, tables are cut.
  control = (served[0].replace("max-width: 52rem", "max-width: 1rem"), 400)
  *found, cut = browser.measured([*frames, control], tmp_path)
  assert [page["cut"] for page in found] == [[]] * 6 and "TABLE" in cut["cut"]
  assert min(page["label"] for page in found) > 8.5  # pixels, in plots
  assert [page["space"] for page in found] == ["pre-wrap"] * 3 + [""] * 3
  (dark,) = browser.measured(frames[:1], tmp_path, dark=True)
  grounds = [found[0]["ground"], dark["ground"]]
  assert grounds == ["rgb(255, 255, 255)", "rgb(21, 24, 28)"]
