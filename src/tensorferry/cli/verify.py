"""``tensorferry verify``: whether a checkpoint is what was written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tensorferry.cli.checkpoint_arguments import (
    AsJson,
    CheckpointPath,
    TrustPickle,
    looking_at_checkpoints,
)
from tensorferry.cli.consoles import bytes_bar, counted, make_console, print_json, say
from tensorferry.cli.leaving import FAILED, LeavingError, printable

if TYPE_CHECKING:
    from tensorferry.checkpoint.tools.findings import Report

_SHOWN = 50


def verify(
    path: CheckpointPath,
    as_json: AsJson = False,
    trust_pickle: TrustPickle = False,
    write: Annotated[
        bool,
        typer.Option("--write", help="Keep checksums beside safetensors files that have none."),
    ] = False,
) -> None:
    """Read a whole checkpoint, or a file of torch.save's, and compare all of it with the checksums it was written with.

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
        _show(report)
    if not report.sound:
        raise LeavingError(FAILED)


def _show(report: Report) -> None:
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
    return {
        "path": report.path,
        "sound": report.sound,
        "entries": report.entries,
        "nbytes": report.nbytes,
        "unverified": report.unverified,
        "written": report.written,
        "problems": [
            {
                "message": str(problem),
                "names": list(getattr(problem, "names", ())),
                "file": getattr(problem, "path", None) or getattr(problem, "filename", None),
                "begin": getattr(problem, "begin", None),
                "end": getattr(problem, "end", None),
            }
            for problem in report.problems
        ],
    }
