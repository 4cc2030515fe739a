"""Output of the commands: tables, text and JSON on stdout, and progress bars on stderr."""

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

from tensorferry.cli.exit_codes import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tensorferry.checkpoint.progress import Progress as Moved

# Piped output is processed by other programs, so names of ordinary length must not be folded. The limit keeps a very
# long name, which an untrusted file may contain, from making every line of the table as long as itself.
_PIPED_WIDTH = 500


AsJson = Annotated[
    bool, typer.Option("--json", help="Print the complete result as JSON, and nothing else.")
]


def make_console() -> Console:
    """Return a console on stdout. On a pipe, it has no control codes, and is wide enough for any ordinary line."""
    console = Console(highlight=False, emoji=False)
    return (
        console
        if console.is_terminal
        else Console(width=_PIPED_WIDTH, highlight=False, emoji=False)
    )


def say(console: Console, text: str) -> None:
    """Print text. On a terminal, it is wrapped between words, and all lines keep the indent of the first one."""
    if not console.is_terminal:
        console.print(text, markup=False, soft_wrap=True)
        return
    stripped = text.lstrip(" ")
    console.print(Padding(Text(stripped), (0, 0, 0, len(text) - len(stripped)), expand=False))


def show(console: Console, table: Table) -> None:
    """Print a table. On a pipe, the blanks at the ends of its rows are removed."""
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    print("\n".join(lines).strip("\n"))


def make_table(words: Sequence[str], numbers: Sequence[str]) -> Table:
    """Return a table with columns of words, which are folded if necessary, and columns of numbers."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in words:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def print_json(value: Any) -> None:
    """Print the complete result of a command, for the option --json."""
    print(json.dumps(value, indent=2))


def counted(count: int, one: str, many: str = "") -> str:
    """Return a number with its noun: "1 entry", "2 entries"."""
    return f"{count} {one if count == 1 else many or one + 's'}"


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar on stderr if that is a terminal. Yield a function of a description, the progress, and the total."""
    # Checked here, because FORCE_COLOR and similar variables override rich's own check.
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn

    # Without auto_refresh, the bar is drawn only on updates. A thread that draws it would take processor time from the
    # measurements.
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with _bar("", *columns, auto_refresh=False) as update:

        def report(description: str, done: int, total: int) -> None:
            update(description=printable(description), completed=done, total=total, refresh=True)

        yield report


@contextlib.contextmanager
def bytes_bar(verb: str) -> Iterator[Callable[[Moved], None] | None]:
    """Show a bar of bytes on stderr if that is a terminal. ``verb`` describes the operation."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, TransferSpeedColumn

    with _bar(verb, BarColumn(), DownloadColumn(), TransferSpeedColumn()) as update:

        def show(progress: Moved) -> None:
            files = f", {progress.files} of {progress.total_files} files"
            description = verb + files if progress.total_files > 1 else verb
            update(description=description, completed=progress.nbytes, total=progress.total_nbytes)

        yield show


@contextlib.contextmanager
def _bar(
    description: str, *columns: Any, auto_refresh: bool = True
) -> Iterator[Callable[..., None]]:
    from rich.progress import Progress, TextColumn

    text = TextColumn("{task.description}", markup=False)
    console = Console(stderr=True)
    with Progress(
        text, *columns, console=console, transient=True, auto_refresh=auto_refresh
    ) as bar:
        task = bar.add_task(description, total=None)
        yield lambda **fields: bar.update(task, **fields)
