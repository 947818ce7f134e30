"""The live page shows the server's numbers, on a phone and in a dark scheme."""

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
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
  assert '<dd data-name="answers">6</dd>' in done.stdout
  assert "Serving and learning" in done.stdout
  assert len(re.findall(r'<path class="draft" d="M[^"]+L', done.stdout)) >= 1


@pytest.mark.slow
@pytest.mark.skipif(browser.PROGRAM is None, reason="needs chromium")
@pytest.mark.parametrize("dark", [False, True])
def test_page_fits_a_phone_in_both_schemes(pair, tmp_path, dark):
  with running.running(pair, learn=False) as server:
    server.text(TEXTS[0])
    page, now = server.client.get("/").text, server.client.get("/live").json()
  # The frame has no server, so the numbers are put into the page.
  page = page.replace("poll();\n</script>", f"show({json.dumps(now)});</script>")
  found = browser.measured([(page, 390), (page, 1200)], tmp_path, dark)
  assert [one["cut"] for one in found] == [[], []]
  ground = "rgb(18, 24, 31)" if dark else "rgb(255, 255, 255)"
  assert {one["ground"] for one in found} == {ground}
