"""Measures HTML pages in headless Chromium, if it is installed."""

import html
import json
import re
import shutil
import subprocess

PROGRAM = shutil.which("chromium") or shutil.which("google-chrome")

FRAME = '<iframe style="border:0;width:%dpx;height:900px" srcdoc="%s"></iframe>'
MEASURE = """<!DOCTYPE html><pre id="found"></pre>FRAMES<script>onload = () => {
  const measured = [];
  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.contentDocument, cut = [];
    const all = (names) => [...page.querySelectorAll(names)];
    for (const fold of all("details")) fold.open = true;
    for (const part of all("body, body *:not(svg *)")) {
      const right = part.getBoundingClientRect().right > frame.clientWidth + 1;
      const style = getComputedStyle(part);
      if (right || style.display != "inline" && part.clientWidth
          && part.scrollWidth > part.clientWidth + 1) cut.push(part.tagName);
    }
    const answer = all("td").find((cell) => cell.textContent.includes("total = 0"));
    measured.push({cut: cut, ground: getComputedStyle(page.body).backgroundColor,
      space: answer ? getComputedStyle(answer).whiteSpace : "", label: Math.min(
        ...all("svg text").map((text) => parseFloat(getComputedStyle(text).fontSize)
        * text.getScreenCTM().a))});
  }
  document.querySelectorAll("iframe").forEach((frame) => frame.remove());
  document.getElementById("found").textContent = JSON.stringify(measured);
}</script>"""


def measured(frames, folder, dark=False):
  """Opens pages in headless Chromium and measures them.

  Args:
    frames: (HTML text, width in pixels) of each page.
    folder: an absolute path for the files of the browser.
    dark: whether the user prefers a dark scheme.

  Returns:
    What `MEASURE` finds for each page: `cut`, the elements that are wider than the
    page or than themselves; `ground`, the colour of the page; and so on.
  """
  shown = "".join(FRAME % (width, html.escape(text)) for text, width in frames)
  (folder / "framed.html").write_text(MEASURE.replace("FRAMES", shown))
  flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run"
  flags += " --disable-background-networking --disable-component-update --disable-sync"
  flags += f" --blink-settings=preferredColorScheme={0 if dark else 1}"
  command = [PROGRAM, *flags.split(), f"--user-data-dir={folder / 'browser'}"]
  command += ["--window-size=1500,1000", "--dump-dom", f"file://{folder}/framed.html"]
  done = subprocess.run(command, capture_output=True, text=True, timeout=120)
  (found,) = re.findall(r'id="found">(.*?)</pre>', done.stdout)
  return json.loads(html.unescape(found))
