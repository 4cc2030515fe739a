"""The ``tensorferry`` command. Commands parse and print; what they do is done elsewhere, and imported when it is."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, or say what it needs."""
    try:
        from tensorferry.cli.app import run

        run()  # and imports what a command needs
    except ModuleNotFoundError as missing:
        extra = "'tensorferry[cli]'"
        packages = {"typer": extra, "rich": extra, "click": extra, "torch": "torch"}
        if missing.name not in packages:
            raise
        sys.exit(
            f"tensorferry: the command needs {missing.name}; "
            f"install it with: pip install {packages[missing.name]}"
        )
