"""``tensorferry convert``: from one format of checkpoints to another."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from tensorferry.cli.checkpoint_arguments import TrustPickle, looking_at_checkpoints
from tensorferry.cli.consoles import bytes_bar, make_console, print_json, say
from tensorferry.cli.leaving import FAILED, UNUSABLE, LeavingError, printable

if TYPE_CHECKING:
    from collections.abc import Iterator

# What the function's parameters are called here.
_NAMES = {"to": "--to", "max_shard_nbytes": "--max-shard", "target": "TARGET"}


def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A checkpoint's folder, a file of torch.save's, or a safetensors file or folder.",
        ),
    ],
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="The new folder; or the new file, if the name ends in .safetensors.",
        ),
    ],
    to: Annotated[
        str,
        typer.Option(
            metavar="auto|dcp|safetensors",
            help="What the folder gets; auto: dcp of safetensors, and safetensors else.",
        ),
    ] = "auto",
    max_shard: Annotated[
        str,
        typer.Option(
            metavar="BYTES",
            help="The most that one safetensors file of a folder has (GB of 10^9).",
        ),
    ] = "5GB",
    tensors_only: Annotated[
        bool, typer.Option("--tensors-only", help="Leave out what is no tensor.")
    ] = False,
    trust_pickle: TrustPickle = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what was moved as JSON, and nothing else.")
    ] = False,
) -> None:
    """Convert a checkpoint of torch.distributed.checkpoint to safetensors or back, or a file of torch.save's to either.

    Takes about 100 MB of memory, whatever the size. What is at the target is replaced when all is written. Exit codes:
    0 done, 1 something is damaged, cannot be written, or cannot be held by the new format, 2 there is nothing to
    convert, or a bad argument.
    """
    with (
        _leaving_for_arguments(),
        looking_at_checkpoints("SOURCE"),
        _leaving_for_target(target),
        bytes_bar("converting") as progress,
    ):
        from tensorferry.checkpoint.tools.convert import convert

        moved = convert(
            source,
            target,
            to=cast("Any", to),  # looked at there
            max_shard_nbytes=max_shard,
            tensors_only=tensors_only,
            trust_pickle=trust_pickle,
            progress=progress,
        )
    if as_json:
        print_json({"target": target, "nbytes": moved.nbytes, "seconds": moved.seconds})
        return
    words = f"{moved.nbytes:,} bytes of tensors, {moved.gb_per_second:.2f} GB/s"
    say(make_console(), printable(f"{target}: {words}"))


@contextlib.contextmanager
def _leaving_for_target(target: str) -> Iterator[None]:
    """End with 1 where nothing can be made at the target."""
    try:
        yield
    except OSError as error:
        if isinstance(error, NotADirectoryError) and error.filename is None:  # our own words
            raise LeavingError(FAILED, [f"TARGET: {error}"]) from None
        place, found = Path(target).absolute(), Path(os.fsdecode(error.filename or "")).absolute()
        if error.filename is None or not (found in place.parents or found.is_relative_to(place)):
            raise
        raise LeavingError(FAILED, [f"TARGET: {error.strerror}: {target!r}"]) from None


@contextlib.contextmanager
def _leaving_for_arguments() -> Iterator[None]:
    """End with 2 where an argument is none that can be."""
    try:
        yield
    except ValueError as error:
        name, colon, problem = str(error).partition(": ")
        raise LeavingError(UNUSABLE, [_NAMES.get(name, name) + colon + problem]) from None
