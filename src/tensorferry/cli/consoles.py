"""How commands print: tables and texts on stdout, alike in all of them, and bars on stderr while they work."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tensorferry.checkpoint.progress import Progress as Moved

# Lines are searched, cut and mailed: no name of ordinary length is folded there. But one long name, which anybody may
# have put into a file, must not make each line as long.
_PIPED_WIDTH = 500


AsJson = Annotated[
    bool, typer.Option("--json", help="Print all that was found as JSON, and nothing else.")
]


def make_console() -> Console:
    """Return a console on stdout; on a pipe one that is wide enough for any ordinary line, without control codes."""
    console = Console(highlight=False, emoji=False)
    return (
        console
        if console.is_terminal
        else Console(width=_PIPED_WIDTH, highlight=False, emoji=False)
    )


def say(console: Console, text: str) -> None:
    """Print a line of text: as long as it is, and on a terminal wrapped between words, each line as far in."""
    if not console.is_terminal:
        console.print(text, markup=False, soft_wrap=True)
        return
    inside = text.lstrip(" ")
    console.print(Padding(Text(inside), (0, 0, 0, len(text) - len(inside)), expand=False))


def show(console: Console, table: Table) -> None:
    """Print a table; elsewhere than on a terminal without the blanks that fill its rows."""
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as drawn:
        console.print(table)
    lines = [line.rstrip() for line in drawn.get().splitlines()]
    print("\n".join(lines).strip("\n"))


def make_table(words: Sequence[str], numbers: Sequence[str]) -> Table:
    """Return a table with columns of words, which may be folded, and of numbers."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in words:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def print_json(value: Any) -> None:
    """Print all that a command has found: what --json means, of every command."""
    print(json.dumps(value, indent=2))


def counted(count: int, one: str, many: str = "") -> str:
    """Return how many there are, in words: "1 entry", "2 entries"."""
    return f"{count} {one if count == 1 else many or one + 's'}"


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar on stderr where that is a terminal; what it yields is told what is done, how far, and of how much."""
    if not sys.stderr.isatty():  # which rich may be told to overlook
        yield lambda *_: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn

    # Drawn when something is said only: a drawing thread would take processor time from what is measured.
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with _bar("", *columns, auto_refresh=False) as update:

        def listen(description: str, done: int, total: int) -> None:
            update(description=description, completed=done, total=total, refresh=True)

        yield listen


@contextlib.contextmanager
def bytes_bar(verb: str) -> Iterator[Callable[[Moved], None] | None]:
    """Show a bar of bytes on stderr where that is a terminal; ``verb`` says what is done to them."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, TransferSpeedColumn

    with _bar(verb, BarColumn(), DownloadColumn(), TransferSpeedColumn()) as update:

        def show(progress: Moved) -> None:
            files = f", {progress.files} of {progress.total_files} files"
            what = verb + files if progress.total_files > 1 else verb
            update(description=what, completed=progress.nbytes, total=progress.total_nbytes)

        yield show


@contextlib.contextmanager
def _bar(
    description: str, *columns: Any, auto_refresh: bool = True
) -> Iterator[Callable[..., None]]:
    from rich.progress import Progress, TextColumn

    text = TextColumn("{task.description}")
    console = Console(stderr=True)
    with Progress(
        text, *columns, console=console, transient=True, auto_refresh=auto_refresh
    ) as bar:
        task = bar.add_task(description, total=None)
        yield lambda **said: bar.update(task, **said)
