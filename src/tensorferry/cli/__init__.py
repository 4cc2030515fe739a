"""The ``tensorferry`` command. Commands parse and print; what they do is done in ``tensorferry.tuning``."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, or say what it needs."""
    try:
        from tensorferry.cli.app import app
    except ModuleNotFoundError as missing:
        if missing.name not in ("typer", "rich", "click"):
            raise
        sys.exit(
            f"The tensorferry command needs {missing.name}; install it with: pip install 'tensorferry[cli]'"
        )
    app()
