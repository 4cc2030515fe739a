"""The ``tensorferry`` command line. Modules here parse options and print results; other packages do the work."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_EXTRA = "'tensorferry[cli]'"
_PACKAGES = dict.fromkeys(("typer", "rich", "click", "psutil"), _EXTRA) | {"torch": "torch"}


def main() -> None:
    """Run the command line, or print which package is missing."""
    with reporting_missing_packages():
        from tensorferry.cli.app import run

        run()  # within the block, because each command imports further packages


@contextlib.contextmanager
def reporting_missing_packages() -> Iterator[None]:
    """Exit with the command that installs a package if an import fails."""
    try:
        yield
    except ModuleNotFoundError as missing:
        if missing.name not in _PACKAGES:
            raise
        sys.exit(
            f"tensorferry: the command needs {missing.name}; "
            f"install it with: pip install {_PACKAGES[missing.name]}"
        )
