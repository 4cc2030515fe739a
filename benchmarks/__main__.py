"""``python -m benchmarks [name ...]``: run scenarios, print tables, and keep JSON."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import fio, report
from benchmarks.harness import GIB, Figure, MeasurementError, Outcome, Settings, UnavailableError
from benchmarks.others import only_benchmark
from benchmarks.scenarios import SCENARIOS
from tensorferry.tuning import fio as tuning_fio
from tensorferry.tuning import machine

if TYPE_CHECKING:
    from types import FrameType


_PIPED_WIDTH = 160


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if not options.directory.is_dir():
        parser.error(f"--directory: {options.directory} is no directory")
    signal.signal(signal.SIGTERM, _interrupt)  # leave as after Ctrl-C: files and mounts removed
    console = Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH)
    directory: Path = options.directory.resolve()
    names = options.names or list(SCENARIOS)
    description = machine.describe(directory) | {"fio": tuning_fio.version()}
    console.print(machine.summary(description))

    outcomes: dict[str, Outcome] = {}
    status = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    progress = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
    settings = Settings(
        directory=directory,
        rounds=options.rounds,
        nbytes=options.nbytes,
        parameters=options.parameters,
        huge_pages=options.huge_pages,
        deepspeed=options.deepspeed,
        others_share_max=options.others_share_max,
        progress=progress,
        finished=lambda comparison: report.print_comparison(console, comparison),
    )
    with contextlib.ExitStack() as stack:
        if not settings.smoke:
            stack.enter_context(only_benchmark(lambda: console.print("another benchmark runs")))
        stack.enter_context(fio.reserved_huge_pages(options.huge_pages))
        stack.enter_context(progress)
        for name in names:
            try:
                outcomes[name] = SCENARIOS[name](settings)
            except (UnavailableError, MeasurementError) as reason:
                outcomes[name] = Outcome(notes=[str(reason)])
                if name in options.names:  # asked for: that it did not run must be noticed
                    status = 1
            for note in outcomes[name].notes:
                console.print(f"{name}: {note}", style="dim")

    figures: list[Figure] = [f for outcome in outcomes.values() for f in outcome.figures]
    report.print_figures(console, figures)
    if options.json:
        kept = dataclasses.asdict(dataclasses.replace(settings, progress=None, finished=None))
        kept = {name: value for name, value in kept.items() if value is not None}
        kept["directory"] = str(settings.directory)
        report.write_json(options.json, report.as_json(description, kept, outcomes))
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Compare tensorferry with fio, plain Python, torch and DeepSpeed.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "names",
        nargs="*",
        choices=[*SCENARIOS, []],
        metavar="name",
        help="scenarios to run; all if none is named: " + ", ".join(SCENARIOS),
    )
    parser.add_argument(
        "--directory", type=Path, default=Path.cwd(), help="where files are made, and removed again"
    )
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each contender")
    parser.add_argument("--nbytes", type=int, default=GIB, help="size of the large tensor")
    parser.add_argument(
        "--parameters",
        type=int,
        default=Settings.parameters,
        help="of the model whose optimizer's state is offloaded",
    )
    parser.add_argument(
        "--huge-pages",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="let fio use huge pages; root reserves them for the run and gives them back",
    )
    parser.add_argument(
        "--deepspeed",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare with DeepSpeed's handle where it is installed",
    )
    parser.add_argument(
        "--others-share-max",
        type=float,
        help="measure again while other processes use more than this part of the processors "
        "(0.05, say, where others work on the machine)",
    )
    parser.add_argument("--json", type=Path, help="keep every sample in this file")
    return parser


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
