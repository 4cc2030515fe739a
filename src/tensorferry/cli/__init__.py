"""The ``tensorferry`` command. Commands parse and print; what they do is done elsewhere, and imported when it is."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_EXTRA = "'tensorferry[cli]'"
_PACKAGES = dict.fromkeys(("typer", "rich", "click", "psutil"), _EXTRA) | {"torch": "torch"}


def main() -> None:
    """Run the command line, or say what it needs."""
    with without_libraries():
        from tensorferry.cli.app import run

        run()  # and imports what a command needs


@contextlib.contextmanager
def without_libraries() -> Iterator[None]:
    """Say what to install where something is missing, and leave."""
    try:
        yield
    except ModuleNotFoundError as missing:
        if missing.name not in _PACKAGES:
            raise
        sys.exit(
            f"tensorferry: the command needs {missing.name}; "
            f"install it with: pip install {_PACKAGES[missing.name]}"
        )
