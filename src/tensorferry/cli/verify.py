"""``tensorferry verify``: whether a checkpoint is what was written."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from tensorferry.cli.checkpoint_arguments import (
    NO_CHECKPOINT,
    CheckpointPath,
    TrustPickle,
    printable,
)
from tensorferry.cli.leaving import leaving_well

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tensorferry.checkpoint.audit import Report

_SHOWN = 50
_DAMAGED = 1


def verify(
    path: CheckpointPath,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
    trust_pickle: TrustPickle = False,
) -> None:
    """Read a whole checkpoint and compare every byte with the checksums made when it was written.

    Works for checkpoints of tensorferry and of torch; what has no checksum is named. Exit codes: 0 nothing is wrong, 1
    something is damaged, missing or unreadable, 2 there is no checkpoint.
    """
    from tensorferry.checkpoint import audit

    with leaving_well("tensorferry verify"):
        try:
            with _progress_bar() as progress:
                report = audit.verify(path, trust_pickle=trust_pickle, progress=progress)
        except (FileNotFoundError, NotADirectoryError) as error:
            typer.echo(f"tensorferry verify: {error}", err=True)
            raise typer.Exit(NO_CHECKPOINT) from None
        except OSError as error:
            typer.echo(f"tensorferry verify: {error}", err=True)
            raise typer.Exit(_DAMAGED) from None
    if as_json:
        typer.echo(json.dumps(_plain(report), indent=2))
    else:
        _show(report)
    if not report.sound:
        raise typer.Exit(_DAMAGED)


def _show(report: Report) -> None:
    for problem in report.problems[:_SHOWN]:
        typer.echo(printable(f"damaged: {problem}"))
    if len(report.problems) > _SHOWN:
        typer.echo(f"and {len(report.problems) - _SHOWN} more")
    if report.unverified:
        shown = ", ".join(map(repr, report.unverified[:_SHOWN]))
        more = len(report.unverified) - _SHOWN
        shown += f" and {more} more" if more > 0 else ""
        typer.echo(f"could not be verified, for want of a checksum: {shown}")
    found = "nothing is wrong" if report.sound else f"{len(report.problems)} problems"
    if report.sound and report.unverified:
        found += " with what can be verified"
    typer.echo(
        f"{report.path}: {report.entries} entries, {report.nbytes:,} bytes verified: {found}"
    )


def _plain(report: Report) -> dict[str, object]:
    return {
        "path": report.path,
        "sound": report.sound,
        "entries": report.entries,
        "nbytes": report.nbytes,
        "unverified": report.unverified,
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


@contextlib.contextmanager
def _progress_bar() -> Iterator[Callable[[int, int], None] | None]:
    """Show a bar on stderr where that is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("verifying"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
