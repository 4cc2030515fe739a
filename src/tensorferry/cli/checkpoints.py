"""``tensorferry ls``, ``verify`` and ``convert``: what a checkpoint has, whether it is sound, and other formats."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.filesize import decimal
from rich.text import Text

from tensorferry.cli.consoles import (
    AsJson,
    bytes_bar,
    counted,
    make_console,
    make_table,
    print_json,
    say,
    show,
)
from tensorferry.cli.leaving import FAILED, UNUSABLE, LeavingError, leaving_with, printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tensorferry.checkpoint.tools.findings import Entry, Report, Shard

_SHOWN = 50
# What the function's parameters are called here.
_NAMES = {"to": "--to", "max_shard_nbytes": "--max-shard", "target": "TARGET"}

CheckpointPath = Annotated[
    str,
    typer.Argument(
        metavar="PATH",
        help="A checkpoint's folder, a file of torch.save's or NumPy's, or safetensors: a file, an index, a folder.",
    ),
]
TrustPickle = Annotated[
    bool,
    typer.Option(
        "--trust-pickle",
        help="Let .metadata hold any object, which may run any code: only for checkpoints of those you trust.",
    ),
]


def ls(
    path: CheckpointPath,
    shards: Annotated[bool, typer.Option("--shards", help="Show where each part lies.")] = False,
    as_json: AsJson = False,
    trust_pickle: TrustPickle = False,
) -> None:
    """List the tensors of a checkpoint, or of files of torch.save's, NumPy's or safetensors: shapes, dtypes, sizes.

    Reads metadata alone. Exit codes: 0 done, 1 it is damaged or unreadable, 2 there is no checkpoint, or a file of
    another kind.
    """
    with looking_at_checkpoints():
        from tensorferry.checkpoint import tools

        entries = tools.entries(path, trust_pickle=trust_pickle)
    if as_json:
        print_json([dataclasses.asdict(entry) for entry in entries])
    else:
        _show_entries(entries, shards)


def verify(
    path: CheckpointPath,
    as_json: AsJson = False,
    trust_pickle: TrustPickle = False,
    write: Annotated[
        bool,
        typer.Option("--write", help="Keep checksums beside safetensors files that have none."),
    ] = False,
) -> None:
    """Read all of a checkpoint, or of a file of torch.save's or NumPy's, and compare it with its checksums.

    Works for what tensorferry has written and what torch has; what has no checksum is named. Of safetensors files (one,
    an index, or a folder) headers are checked, and data compared with checksums that --write has once kept beside them.

    Exit codes: 0 nothing is wrong, 1 something is damaged, missing or unreadable, 2 there is no checkpoint, or a file
    of another kind.
    """
    with looking_at_checkpoints(), bytes_bar("verifying") as progress:
        from tensorferry.checkpoint import tools

        report = tools.verify(
            path, trust_pickle=trust_pickle, write_checksums=write, progress=progress
        )
    if as_json:
        print_json(_plain(report))
    else:
        _show_report(report)
    if not report.sound:
        raise LeavingError(FAILED)


def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A checkpoint's folder, a file of torch.save's or NumPy's, or a safetensors file or folder.",
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
    """Convert a checkpoint to safetensors or back, or a file of torch.save's (to either) or NumPy's (to safetensors).

    Takes about 100 MB of memory, whatever the size. What is at the target is replaced when all is written. Exit codes:
    0 done, 1 something is damaged, cannot be written, or cannot be held by the new format, 2 there is nothing to
    convert, or a bad argument.
    """
    with (
        _leaving_for_arguments(),
        looking_at_checkpoints("SOURCE"),
        _leaving_for_target(target),
        bytes_bar("converting") as progress,
        warnings.catch_warnings(),
    ):
        # What torch says to each save by one process, which this is on purpose.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
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


def _show_entries(entries: list[Entry], with_shards: bool) -> None:
    console = make_console()
    table = make_table(["name", "dtype", "shape"], ["size", "shards"])
    for entry in entries:
        table.add_row(
            Text(printable(entry.name)),
            entry.dtype or "object",
            str(list(entry.shape)) if entry.dtype else "",
            decimal(entry.nbytes),
            str(len(entry.shards)),
        )
        if with_shards:
            for shard in entry.shards:
                table.add_row(Text(printable(f"  {_place(shard)}")), "", _box(shard), style="dim")
    show(console, table)
    what = counted(len(entries), "entry", "entries")
    say(console, f"{what}, {decimal(sum(entry.nbytes for entry in entries))}")


def _place(shard: Shard) -> str:
    if shard.file is None:
        return "missing"
    return f"{shard.file}, bytes {shard.begin} to {shard.end}"


def _box(shard: Shard) -> str:
    return f"{list(shard.sizes)} at {list(shard.offsets)}" if shard.sizes else ""


def _show_report(report: Report) -> None:
    console = make_console()
    for problem in report.problems[:_SHOWN]:
        say(console, printable(f"damaged: {problem}"))
    if len(report.problems) > _SHOWN:
        say(console, f"and {len(report.problems) - _SHOWN} more")
    if report.unverified:
        shown = ", ".join(map(repr, report.unverified[:_SHOWN]))
        more = len(report.unverified) - _SHOWN
        shown += f" and {more} more" if more > 0 else ""
        say(console, printable(f"could not be verified, for want of a checksum: {shown}"))
        if any(name.endswith(".safetensors") for name in report.unverified):
            say(console, "(--write keeps checksums beside safetensors files, to compare them with)")
    for name in report.written:
        say(console, printable(f"checksums written: {name}"))
    found = counted(len(report.problems), "problem") if report.problems else "nothing is wrong"
    if report.sound and report.unverified:
        found += (
            " with what can be verified" if report.nbytes else ", but nothing could be verified"
        )
    entries = counted(report.entries, "entry", "entries")
    say(console, printable(f"{report.path}: {entries}, {report.nbytes:,} bytes verified: {found}"))


def _plain(report: Report) -> dict[str, object]:
    problems = [
        {
            "message": str(problem),
            "names": list(getattr(problem, "names", ())),
            "file": getattr(problem, "path", None) or getattr(problem, "filename", None),
            "begin": getattr(problem, "begin", None),
            "end": getattr(problem, "end", None),
        }
        for problem in report.problems
    ]
    return vars(report) | {"sound": report.sound, "problems": problems}
