"""Where commands print tables."""

from __future__ import annotations

from rich.console import Console

_PIPED_WIDTH = 140


def make_console() -> Console:
    """Return a console on stdout; on a pipe one of a fixed width, without control codes."""
    console = Console()
    return console if console.is_terminal else Console(width=_PIPED_WIDTH)
