"""For mkdocs: links from a page to files outside of docs/ lead to the repository."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: object) -> str:
    """Return a page with such links."""
    if "/" in page.file.src_uri:  # what is above it is in docs/
        return markdown
    return re.sub(r"\]\(\.\./([^)]+)\)", rf"]({config.repo_url}/blob/main/\1)", markdown)
