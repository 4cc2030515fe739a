"""``python -m benchmarks [name ...]``: run scenarios, print tables, and write JSON."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from benchmarks.bench import GIB, LARGE, MIB, Figure, Outcome, Settings
from benchmarks.scenarios import SCENARIOS
from tensorferry.cli.consoles import progress_bar
from tensorferry.cli.tables import comparison_table
from tensorferry.tuning import fio, machine
from tensorferry.tuning.rounds import Comparison, Estimate, MeasurementError
from tensorferry.tuning.workers import UnavailableError, WorkerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PIPED_WIDTH = 160  # columns of the output if it is not a terminal
_HUGE_PAGE_NBYTES = 2 * MIB


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if not options.directory.is_dir():
        parser.error(f"--directory: {options.directory} is not a directory")
    # SIGTERM raises KeyboardInterrupt, as Ctrl-C does. The context managers then remove files, mounts and huge pages.
    signal.signal(signal.SIGTERM, _interrupt)
    console = Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH)
    description = machine.describe(options.directory) | {"fio": fio.version()}
    cpus, memory = description["cpu_count"], description["memory_nbytes"] / (1 << 30)
    console.print(
        f"{cpus} x {description['cpu_model']}, {memory:.0f} GiB, kernel {description['kernel']}, "
        f"{description['file_system'].get('type', 'unknown file system')}"
    )
    outcomes: dict[str, Outcome] = {}
    status = 0
    names = ("rounds", "nbytes", "parameters", "huge_pages", "deepspeed")
    chosen = {name: getattr(options, name) for name in names}
    with contextlib.ExitStack() as stack:
        if chosen["nbytes"] >= 64 * MIB:
            stack.enter_context(
                only_benchmark(lambda: console.print("waiting until another benchmark ends"))
            )
        stack.enter_context(reserved_huge_pages(options.huge_pages))
        settings = Settings(
            options.directory.resolve(),
            **chosen,
            told=stack.enter_context(progress_bar()),
            finished=lambda comparison: print_comparison(console, comparison),
        )
        for name in options.names or SCENARIOS:
            try:
                outcomes[name] = SCENARIOS[name](settings)
            except (UnavailableError, MeasurementError, WorkerError) as reason:
                outcomes[name] = Outcome(notes=[str(reason)])
                # A scenario that was named on the command line has to run. Without names, a note is enough.
                if name in options.names:
                    status = 1
            for note in outcomes[name].notes:
                console.print(f"{name}: {note}", style="dim")
    print_figures(console, [f for outcome in outcomes.values() for f in outcome.figures])
    if options.json:
        settings_used = chosen | {"directory": str(settings.directory)}
        content = as_json(description, settings_used, outcomes)
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return status


def print_comparison(console: Console, comparison: Comparison) -> None:
    """Print the table of a comparison, best contender first, and the contenders that failed."""
    console.print(comparison_table(comparison))
    for row in comparison.rows:
        if not row.usable:
            console.print(f"[red]{row.label} failed:[/red] {row.failure or 'no sample'}")


def print_figures(console: Console, figures: list[Figure]) -> None:
    """Print the figures with their targets, and whether this run met the targets."""
    table = Table(title="Figures", title_justify="left")
    for heading in ("what", "target", "measured", "min .. max", "", "note"):
        table.add_column(heading, justify="left" if heading in ("what", "note") else "right")
    colours = {"met": "green", "missed": "red", "not measured": "yellow"}
    for each in figures:
        found = each.measured
        table.add_row(
            each.what,
            f"{each.relation} {each.target:g} {each.unit}".rstrip(),
            "" if found is None else f"{found:.3g}",
            f"{found.low:.3g} .. {found.high:.3g}" if isinstance(found, Estimate) else "",
            f"[{colours[each.verdict]}]{each.verdict}[/]",
            each.note,
        )
    console.print(table)


def as_json(
    description: dict[str, Any], settings: dict[str, Any], outcomes: dict[str, Outcome]
) -> dict[str, Any]:
    """Return a run with every sample, ready for JSON."""
    return {
        "machine": description,
        "settings": settings,
        "scenarios": {
            name: {"notes": each.notes, "comparisons": [c.as_dict() for c in each.comparisons]}
            for name, each in outcomes.items()
        },
        "figures": [f.as_dict() for outcome in outcomes.values() for f in outcome.figures],
    }


@contextlib.contextmanager
def only_benchmark(waiting: Callable[[], object]) -> Iterator[None]:
    """Hold a lock that lets one benchmark run on this machine; if another one holds it, call ``waiting`` and wait."""
    # Lock the temporary directory instead of a file in it. All users can write to that directory, so the name of a lock
    # file could be another user's symbolic link.
    folder = os.open(tempfile.gettempdir(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


@contextlib.contextmanager
def reserved_huge_pages(wanted: bool) -> Iterator[None]:
    """Reserve huge pages for fio's buffers while the benchmark runs (root only).

    Buffers in huge pages make fio much faster on some drives, so a comparison without them would favour tensorferry.
    """
    setting = fio.HUGE_PAGES / "nr_hugepages"
    needed = max(c.memory_nbytes for c in LARGE if c.huge_pages) // _HUGE_PAGE_NBYTES + 8
    reserved = False
    with contextlib.suppress(OSError, ValueError):
        if wanted and fio.free_huge_pages_nbytes() < needed * _HUGE_PAGE_NBYTES:
            setting.write_text(str(int(setting.read_text()) + needed))
            reserved = True
    try:
        yield
    finally:
        if reserved:
            # Subtract the pages that were added here. Restoring the old number would also remove pages that another
            # program has reserved since.
            setting.write_text(str(max(0, int(setting.read_text()) - needed)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Compare tensorferry with fio, plain Python, torch and DeepSpeed.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    every = "scenarios to run (all by default): " + ", ".join(SCENARIOS)
    parser.add_argument("names", nargs="*", choices=[*SCENARIOS, []], metavar="name", help=every)
    switch = argparse.BooleanOptionalAction
    for name, default, how, text in (
        ("directory", Path.cwd(), {"type": Path}, "directory for temporary files"),
        ("rounds", 7, {"type": int}, "measurements of each contender"),
        ("nbytes", GIB, {"type": int}, "size of the large tensor, in bytes"),
        ("parameters", Settings.parameters, {"type": int}, "parameters of the offloaded model"),
        ("huge-pages", True, {"action": switch}, "let fio use huge pages; root reserves them"),
        ("deepspeed", True, {"action": switch}, "compare with DeepSpeed if it is installed"),
        ("json", None, {"type": Path}, "write every sample to this file"),
    ):
        parser.add_argument(f"--{name}", default=default, help=text, **how)
    return parser


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
