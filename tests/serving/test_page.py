"""The live page shows the server's numbers, on a phone and in a dark scheme."""

import dataclasses
import json
import re
import subprocess

import browser
import pytest
from serving import running
from serving.running import TEXTS


def test_page_has_no_external_asset(pair):
  with running.running(pair, learn=False) as server:
    page = server.client.get("/")
  assert page.headers["content-type"].startswith("text/html")
  assert re.findall(r"(?:src|href)=\"(.*?)\"|url\((.*?)\)", page.text) == [
    ("metrics", "")
  ]


@pytest.mark.slow
@pytest.mark.skipif(browser.PROGRAM is None, reason="needs chromium")
def test_page_shows_live_numbers_in_a_browser(pair, tmp_path):
  with running.running(pair) as server:
    for text in TEXTS:
      server.text(text)
    command = [browser.PROGRAM, "--headless", "--no-sandbox", "--disable-gpu"]
    command += ["--window-size=390,844", f"--user-data-dir={tmp_path}", "--dump-dom"]
    command += ["--virtual-time-budget=4000", server.url]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
  assert '<dd data-name="answers">6</dd>' in result.stdout
  assert "Serving and learning" in result.stdout
  plots = re.findall(r'<svg id="plot(\d)".*?</svg>', result.stdout, re.DOTALL)
  assert plots == ["0", "1", "2", "3"]
  classes = re.findall(r'<path class="(\w+)" d="M[^"]+L', result.stdout)
  assert classes.count("draft") == 4 and classes.count("floor") == 2
  for name in ("speed against plain", "seconds saved", "of these by the draft"):
    assert re.search(rf'<dd data-name="{name}">-?[\d.,]+', result.stdout), name
  # The traffic did not shift, and the server has no cache.
  assert not re.search(r'class="shift" d="M\d', result.stdout)
  assert 'data-name="of these by the cache"' not in result.stdout


def shown(server, changes, folder):
  """The page in a browser after some states of the server."""
  page, now = server.client.get("/").text, server.client.get("/live").json()
  states = "".join(f"show({json.dumps({**now, **change})});" for change in changes)
  file = folder / "page.html"
  file.write_text(page.replace("poll();\n</script>", f"{states}</script>"))
  command = [browser.PROGRAM, "--headless", "--no-sandbox", "--disable-gpu"]
  command += [f"--user-data-dir={folder}", "--dump-dom", f"file://{file}"]
  result = subprocess.run(command, capture_output=True, text=True, timeout=120)
  return result.stdout


@pytest.mark.slow
@pytest.mark.skipif(browser.PROGRAM is None, reason="needs chromium")
def test_page_marks_shifts_and_splits_tokens_by_source(pair, tmp_path):
  decoding = dataclasses.replace(running.DECODING, cache_tokens=1024)
  with running.running(pair, learn=False, decoding=decoding) as server:
    for _ in range(3):
      server.text(TEXTS[0])
    changes = [{"traffic_shifts": count} for count in (0, 0, 1, 1, 2)]
    changes[1] |= {"saved_seconds": -4.0, "speed": 0.5}  # drafting may lose time
    page = shown(server, changes, tmp_path)
  places = re.findall(r'<path class="shift" d="M(\d+) 0V100"', page)
  assert places == ["50", "100"] * 4  # the third and fifth of five states
  for name in ("draft", "cache"):
    assert f'data-name="of these by the {name}"' in page
  assert '<p id="shifted">' in page


@pytest.mark.slow
@pytest.mark.skipif(browser.PROGRAM is None, reason="needs chromium")
@pytest.mark.parametrize("dark", [False, True])
def test_page_fits_a_phone_in_both_schemes(pair, tmp_path, dark):
  with running.running(pair, learn=False) as server:
    server.text(TEXTS[0])
    page, now = server.client.get("/").text, server.client.get("/live").json()
  # The frame has no server, so the numbers are put into the page.
  page = page.replace("poll();\n</script>", f"show({json.dumps(now)});</script>")
  sizes = browser.measured([(page, 390), (page, 1200)], tmp_path, dark)
  assert [one["cut"] for one in sizes] == [[], []]
  ground = "rgb(18, 24, 31)" if dark else "rgb(255, 255, 255)"
  assert {one["ground"] for one in sizes} == {ground}
