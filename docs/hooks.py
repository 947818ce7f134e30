"""Called by mkdocs: see `hooks` in mkdocs.yml."""

import re
from typing import Any


def on_page_content(html: str, page: Any, **_: Any) -> str:
  """Links from notebook to notebook, which GitHub needs by file, lead to its page."""
  if not page.file.src_path.endswith(".ipynb"):
    return html
  return re.sub(r'href="(\w+)\.ipynb', r'href="../\1/', html)
