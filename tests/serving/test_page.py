"""The live page shows the server's numbers, on a phone and in a dark scheme."""

import asyncio
import dataclasses
import itertools
import json
import re
import subprocess
import types

import browser
import pytest
from serving import running
from serving.running import TEXTS

from osd_serve import service


def test_page_has_no_external_asset(pair):
  with running.running(pair, learn=False) as server:
    page = server.client.get("/")
  assert page.headers["content-type"].startswith("text/html")
  links = re.findall(r"(?:src|href)=\"(\w+)|url\((.*?)\)", page.text)
  assert links == [("data", ""), ("metrics", "")]


def test_server_keeps_the_history_of_the_plots(pair, monkeypatch):
  with running.running(pair, learn=False) as server:
    server.wait_for(lambda service: service.history)
    points = server.client.get("/live", params={"history": ""}).json()
  assert set(points[0]) == set(service.PLOTTED)
  now = 0.0

  async def sleep(seconds):
    nonlocal now
    now += seconds
    if now > 1e5:
      raise asyncio.CancelledError

  monkeypatch.setattr(asyncio, "sleep", sleep)
  live = lambda: dict.fromkeys(service.PLOTTED, now)
  server = types.SimpleNamespace(history=[], live=live)
  with pytest.raises(asyncio.CancelledError):
    asyncio.run(service.Service.watch(server))
  times = [point["seconds"] for point in server.history]
  gaps = {after - before for before, after in itertools.pairwise(times)}
  assert len(times) <= service.HISTORY and times[0] == 0 and times[-1] > 0.99e5
  assert max(gaps) < 1e5 / 250 and times == sorted(times)


@pytest.mark.slow
@pytest.mark.skipif(browser.PROGRAM is None, reason="needs chromium")
def test_page_shows_live_numbers_in_a_browser(pair, tmp_path):
  with running.running(pair) as server:
    for text in TEXTS:
      server.text(text)
    size, budget = "--window-size=390,844", "--virtual-time-budget=4000"
    page = opened(tmp_path, size, budget, server.url)
  assert '<dd data-name="answers">6</dd>' in page
  assert "Serving and learning" in page
  plots = re.findall(r'<svg id="plot(\d)".*?</svg>', page, re.DOTALL)
  assert plots == ["0", "1", "2", "3"]
  classes = re.findall(r'<path class="(\w+)" d="M[^"]+L', page)
  assert classes.count("draft") == 4 and classes.count("floor") == 2
  for name in ("speed against plain", "seconds saved", "of these by the draft"):
    assert re.search(rf'<dd data-name="{name}">-?[\d.,]+', page), name
  # The traffic did not shift, and the server has no cache.
  assert not re.search(r'class="shift" d="M\d', page)
  assert 'data-name="of these by the cache"' not in page


def shown(server, changes, folder):
  """The page in a browser after some states of the server."""
  page, now = server.client.get("/").text, server.client.get("/live").json()
  states = "".join(f"show({json.dumps({**now, **change})});" for change in changes)
  file = folder / "page.html"
  file.write_text(page.replace("poll();\n</script>", f"{states}</script>"))
  return opened(folder, f"file://{file}")


def opened(folder, *words):
  command = [browser.PROGRAM, "--headless", "--no-sandbox", "--disable-gpu"]
  command += [f"--user-data-dir={folder}", "--dump-dom", *words]
  return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.slow
@pytest.mark.skipif(browser.PROGRAM is None, reason="needs chromium")
def test_page_marks_shifts_and_splits_tokens_by_source(pair, tmp_path):
  decoding = dataclasses.replace(running.DECODING, cache_tokens=1024)
  with running.running(pair, learn=False, decoding=decoding) as server:
    for _ in range(3):
      server.text(TEXTS[0])
    changes = [
      {"traffic_shifts": count, "seconds": 15 * i}
      for i, count in enumerate((0, 0, 1, 1, 2))
    ]
    changes[1] |= {"saved_seconds": -4.0, "speed": 0.5}  # drafting may lose time
    changes[4] |= {"saved_seconds": -0.04}
    page = shown(server, changes, tmp_path)
  places = re.findall(r'<path class="shift" d="M(\d+) 0V100"', page)
  assert places == ["50", "100"] * 4  # the third and fifth of five states
  for name in ("draft", "cache"):
    assert f'data-name="of these by the {name}"' in page
  assert '<p id="shifted">' in page
  assert '<dd data-name="seconds saved">0.0<' in page
  boxes = re.findall(r'<div title="(.*?)"><dt', page)
  assert len(boxes) == page.count("<dd ") and "undefined" not in boxes
  levels = re.findall(r'class="y" style="top:.*?%">(.*?)<', page)
  assert {"0", "1", "-4"} <= {*levels}
  ages = re.findall(r'class="x" style="left:([\d.]+)%">(.*?)<', page)
  assert ages == 4 * [("50", "−30 s"), ("0", "−60 s")]


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
