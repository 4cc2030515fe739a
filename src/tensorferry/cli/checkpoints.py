"""``tensorferry ls``, ``verify`` and ``convert``: commands that list, verify and convert checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal
from rich.text import Text

from tensorferry.base.reprs import first_of
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
from tensorferry.cli.exit_codes import FAILED, UNUSABLE, ExitError, exiting_with, printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tensorferry.checkpoint.tools.findings import Entry, Report, Shard

_SHOWN = 50
# The options and arguments for the parameters of the function convert().
_NAMES = {"max_shard_nbytes": "--max-shard", "target": "TARGET"}

CheckpointPath = Annotated[
    str,
    typer.Argument(
        metavar="PATH",
        help="The folder of a checkpoint, a file of torch.save, or a safetensors file, index or folder.",
    ),
]
TrustPickle = Annotated[
    bool,
    typer.Option(
        "--trust-pickle",
        help="Allow any object in .metadata, which may run any code. Use this only for trusted checkpoints.",
    ),
]


def ls(
    path: CheckpointPath,
    shards: Annotated[
        bool, typer.Option("--shards", help="Show the file and the range of each part.")
    ] = False,
    as_json: AsJson = False,
    trust_pickle: TrustPickle = False,
) -> None:
    """List the tensors of a checkpoint, or of files of torch.save or safetensors, with dtypes, shapes and sizes.

    Reads only metadata. Exit codes: 0 success, 1 the checkpoint is damaged or unreadable, 2 the path does not exist or
    is not a checkpoint.
    """
    with reading_checkpoints():
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
        typer.Option("--write", help="Write checksums for safetensors files that have none."),
    ] = False,
) -> None:
    """Read all data of a checkpoint, or of a file of torch.save, and compare it with its checksums.

    Works for checkpoints of tensorferry and of torch. Data without a checksum is listed. For safetensors (a file, an
    index or a folder), headers are validated, and data is compared with the checksums that an earlier --write has
    stored next to the files.

    Exit codes: 0 no problem was found, 1 data is damaged, missing or unreadable, 2 the path does not exist or is not a
    checkpoint.
    """
    with reading_checkpoints(), bytes_bar("verifying") as progress:
        from tensorferry.checkpoint import tools

        report = tools.verify(
            path, trust_pickle=trust_pickle, write_checksums=write, progress=progress
        )
    if as_json:
        print_json(_as_dict(report))
    else:
        _show_report(report)
    if not report.sound:
        raise ExitError(FAILED)


def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="The folder of a checkpoint, a file of torch.save, or a safetensors file or folder.",
        ),
    ],
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="The new folder, or the new file if the name ends in .safetensors.",
        ),
    ],
    max_shard: Annotated[
        str,
        typer.Option(
            metavar="BYTES",
            help="The maximum size of each safetensors file of a folder (GB of 10^9 bytes).",
        ),
    ] = "5GB",
    tensors_only: Annotated[
        bool, typer.Option("--tensors-only", help="Leave out objects that are not tensors.")
    ] = False,
    trust_pickle: TrustPickle = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")
    ] = False,
) -> None:
    """Convert a checkpoint or a file of torch.save to safetensors, or safetensors to a checkpoint.

    Uses about 100 MB of memory, whatever the size. An existing target is replaced once everything is written. Exit
    codes: 0 success, 1 the source is damaged, the target cannot be written, or the new format cannot hold the data, 2
    the source does not exist, or an argument is invalid.
    """
    with (
        _exiting_for_arguments(),
        reading_checkpoints("SOURCE"),
        _exiting_for_target(target),
        bytes_bar("converting") as progress,
        warnings.catch_warnings(),
    ):
        # torch warns of each save by a single process, which is intended here.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        from tensorferry.checkpoint.tools.convert import convert

        moved = convert(
            source,
            target,
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
def reading_checkpoints(name: str = "PATH") -> Iterator[None]:
    """Exit with 2 if the path does not exist or is not a checkpoint, and with 1 if the checkpoint is damaged."""
    from tensorferry.checkpoint.errors import CheckpointError, NotACheckpointError
    from tensorferry.safetensors.errors import SafetensorError

    with (
        exiting_with(FAILED, CheckpointError, SafetensorError),
        exiting_with(
            UNUSABLE, FileNotFoundError, NotADirectoryError, NotACheckpointError, name=name
        ),
    ):
        yield


@contextlib.contextmanager
def _exiting_for_target(target: str) -> Iterator[None]:
    """Exit with 1 if the target cannot be created."""
    try:
        yield
    except OSError as error:
        # An error is about the target if its file is the target, a file in it, or one of its parent folders.
        path, found = Path(target).absolute(), Path(os.fsdecode(error.filename or "")).absolute()
        if error.filename is None or not (found in path.parents or found.is_relative_to(path)):
            raise
        raise ExitError(FAILED, [f"TARGET: {error.strerror}: {target!r}"]) from None


@contextlib.contextmanager
def _exiting_for_arguments() -> Iterator[None]:
    """Exit with 2 if an argument is invalid. Replace the parameter's name in the message with the option's name."""
    try:
        yield
    except ValueError as error:
        name, colon, problem = str(error).partition(": ")
        raise ExitError(UNUSABLE, [_NAMES.get(name, name) + colon + problem]) from None


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
                table.add_row(
                    Text(printable(f"  {_location(shard)}")), "", _box(shard), style="dim"
                )
    show(console, table)
    count = counted(len(entries), "entry", "entries")
    say(console, f"{count}, {decimal(sum(entry.nbytes for entry in entries))}")


def _location(shard: Shard) -> str:
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
        shown = first_of([*map(repr, report.unverified)], _SHOWN)
        say(console, printable(f"could not be verified, because they have no checksum: {shown}"))
        if any(name.endswith(".safetensors") for name in report.unverified):
            say(
                console,
                "(--write stores checksums next to safetensors files, for later comparison)",
            )
    for name in report.written:
        say(console, printable(f"checksums written: {name}"))
    found = counted(len(report.problems), "problem") if report.problems else "no problem found"
    if report.sound and report.unverified:
        found += " in the verified part" if report.nbytes else ", but nothing could be verified"
    entries = counted(report.entries, "entry", "entries")
    say(console, printable(f"{report.path}: {entries}, {report.nbytes:,} bytes verified: {found}"))


def _as_dict(report: Report) -> dict[str, object]:
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
