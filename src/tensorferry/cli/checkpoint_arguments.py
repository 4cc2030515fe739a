"""What the commands that look at checkpoints take, and how they end where there is none."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated

import typer

from tensorferry.cli.leaving import FAILED, UNUSABLE, leaving_with

if TYPE_CHECKING:
    from collections.abc import Iterator

CheckpointPath = Annotated[
    str,
    typer.Argument(
        metavar="PATH",
        help="The checkpoint's folder, a file of torch.save's, or safetensors: a file, an index, or their folder.",
    ),
]
TrustPickle = Annotated[
    bool,
    typer.Option(
        "--trust-pickle",
        help="Let .metadata hold any object, which may run any code: only for checkpoints of those you trust.",
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print all that was found as JSON, and nothing else.")
]


@contextlib.contextmanager
def looking_at_checkpoints(name: str = "PATH") -> Iterator[None]:
    """End with 2 where an argument is no checkpoint, or a file of another kind, and with 1 where it is damaged."""
    from tensorferry.checkpoint.errors import CheckpointError, NotACheckpointError
    from tensorferry.safetensors.errors import SafetensorError

    with (
        leaving_with(FAILED, CheckpointError, SafetensorError),
        leaving_with(
            UNUSABLE, FileNotFoundError, NotADirectoryError, NotACheckpointError, name=name
        ),
    ):
        yield
