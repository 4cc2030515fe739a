"""What the commands that look at checkpoints take."""

from __future__ import annotations

from typing import Annotated

import typer

CheckpointPath = Annotated[str, typer.Argument(help="The checkpoint's folder.")]
TrustPickle = Annotated[
    bool,
    typer.Option(
        "--trust-pickle",
        help="Let .metadata hold any object, which may run any code: only for checkpoints of those you trust.",
    ),
]

NO_CHECKPOINT = 2
"""The exit code where there is none."""


def printable(text: str) -> str:
    """Return text with what would not be shown, or would move a terminal's cursor, as an escape sequence."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )
