"""``tensorferry report``: prints the facts and the advice that ``tuning.report`` collects."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from tensorferry.cli.consoles import AsJson, make_console, print_json, say
from tensorferry.cli.exit_codes import UNUSABLE, ExitError, printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

_STYLE_OF_LEVEL = {"stops": "bold red", "speed": "bold yellow", "hint": "bold cyan"}

# Titles of parts that differ from the parts' keys.
_TITLES = {
    "control_groups": "Limits of control groups",
    "gpu": "GPU",
    "gpudirect_storage": "GPUDirect Storage",
}
_NO_PARTS = ("tensorferry", "path", "advice")
# The meaning of None for keys where it is not "none".
_TEXTS_OF_NONE = {
    "soft": "unlimited",
    "hard": "unlimited",
    "version": "not installed",
}
_NO_LIMIT_KB = (1 << 31) - 1  # the value that a driver without a limit reports

Row = tuple[str | Text, str]


def report(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", help="The folder, file or block device to inspect.", show_default=False
        ),
    ] = Path(),
    as_json: AsJson = False,
) -> None:
    """Report what this machine supports for files at PATH, what limits it, and how to improve it."""
    from tensorferry.tuning.report import report as collect

    try:
        path.stat()
    except OSError as error:
        problem = f"PATH: {(error.strerror or str(error)).lower()}: {str(path)!r}"
        raise ExitError(UNUSABLE, [problem]) from None
    facts = collect(path)
    if as_json:
        print_json(facts)
        return
    console = make_console()
    about = facts["tensorferry"]
    name = printable(facts["path"])
    say(console, f"tensorferry {about['version']}, Python {about['python']}, {name}")
    engines = facts["engines"]
    works = {name: refusal or "works" for name, refusal in engines["available"].items()}
    shown = facts | {"engines": {**engines, "available": works}}
    for name, part in shown.items():
        if name not in _NO_PARTS:
            console.print(f"\n[bold]{_TITLES.get(name, _words(name).capitalize())}[/bold]")
            _print_rows(console, list(_rows(part)))
    _print_advice(console, facts["advice"])


def _print_rows(console: Console, rows: list[Row]) -> None:
    # Long values are wrapped on a terminal only. Piped output has one line for each row, for other programs.
    width = max(len(name) for name, _ in rows)
    if not console.is_terminal:
        for name, value in rows:
            say(console, printable(f"  {name!s:{width}}  {value}".rstrip()))
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text.assemble("  ", name), Text(printable(value)))
    console.print(table)


def _rows(facts: Any) -> Iterator[Row]:
    """Yield names and values. Nested facts are indented by two."""
    if isinstance(facts, list):
        facts = {fact.get("name", str(number)): fact for number, fact in enumerate(facts)}
    if not facts or "unknown" in facts:
        yield ("none" if not facts else f"unknown: {facts['unknown']}", "")
        return
    for name, fact in facts.items():
        nested: Any = fact if isinstance(fact, dict) else {}
        if isinstance(fact, list) and fact and isinstance(fact[0], dict):
            nested = fact
        if nested and "unknown" not in nested:
            yield _words(name), ""
            yield from ((f"  {each}", value) for each, value in _rows(nested))
        else:
            yield _words(name), _value(name, fact)


def _words(name: str) -> str:
    for unit in ("_nbytes", "_kb"):
        name = name.removesuffix(unit)
    return "size" if name == "nbytes" else name.replace("_", " ").replace("io uring", "io_uring")


def _value(name: str, fact: Any) -> str:
    if isinstance(fact, dict):
        return f"unknown: {fact['unknown']}" if fact else "none"
    if isinstance(fact, list):
        return ", ".join(map(str, fact)) or "none"
    if fact is None:
        return _TEXTS_OF_NONE.get(name, "none")
    if isinstance(fact, bool):
        return "yes" if fact else "no"
    if name == "options":  # mount options: the blanks allow a line break between them
        return str(fact).replace(",", ", ")
    if name.endswith("nbytes") or (name in ("soft", "hard") and fact >= 1 << 20):
        return _nbytes(fact)
    if name.endswith("_kb"):
        return "no limit" if fact >= _NO_LIMIT_KB else f"{fact} KiB"
    return str(fact)


def _nbytes(nbytes: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.4g} {unit}"
    return f"{nbytes} bytes"


def _print_advice(console: Console, advice: list[dict[str, str]]) -> None:
    if not advice:
        console.print("\n[bold]Advice[/bold]\n  None: no possible improvement was found.")
        return
    console.print("\n[bold]Advice[/bold], most important first")
    rows: list[Row] = []
    for number, item in enumerate(advice, 1):
        level = Text(f"{number}. ").append(item["level"], _STYLE_OF_LEVEL[item["level"]])
        rows.append((level, item["finding"]))
        rows += [(f"   {name}", item[name]) for name in ("meaning", "remedy")]
    _print_rows(console, rows)
