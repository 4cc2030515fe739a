"""A hook for mkdocs that turns links to files outside of docs/ into links to the repository."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: object) -> str:
    """Return the page with links to files outside of docs/ replaced."""
    if "/" in page.file.src_uri:  # for a page in a subfolder, ../ is still in docs/
        return markdown
    return re.sub(r"\]\(\.\./([^)]+)\)", rf"]({config.repo_url}/blob/main/\1)", markdown)
