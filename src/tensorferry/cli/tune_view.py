"""How a tuning run looks: live while it measures, and what is printed of its outcome."""

from __future__ import annotations

import json
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from tensorferry.base.checks import format_nbytes
from tensorferry.cli.consoles import counted, make_table, say, show
from tensorferry.cli.leaving import printable
from tensorferry.tuning.gpus import CUFILE
from tensorferry.tuning.heatmap import Grid, grids, known
from tensorferry.tuning.space import available_engines

if TYPE_CHECKING:
    from rich.console import Console

    from tensorferry.transfer.profiles import Profile
    from tensorferry.transfer.settings import Settings
    from tensorferry.tuning.intervals import Interval
    from tensorferry.tuning.race import Turn
    from tensorferry.tuning.tune import Progress, Result

_GB = 1e9
# Dark blue to yellow, as 8-bit colours; every terminal that has colours has these.
_COLOURS = (17, 18, 19, 25, 31, 36, 41, 77, 113, 149, 185, 221)


class LiveView:
    """How far a run has come: a bar that is redrawn after each measurement, or on a pipe one line for each stage."""

    def __init__(self, console: Console) -> None:
        self._console = console
        # Drawn between measurements only: a drawing thread would take processor time from them.
        self._bar = Bar(
            BarColumn(),
            TextColumn("{task.description}"),
            console=console,
            auto_refresh=False,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=1.0)
        self._stage = ""

    def __enter__(self) -> LiveView:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def stage(self, name: str, points: int, progress: Progress) -> None:
        """Show that a stage begins."""
        self._stage = name
        if self._console.is_terminal:
            self._draw(progress)
        else:
            left = _duration(progress.seconds_left)
            line = f"{name} ({_left(progress)})" if points else f"about {left}"
            self._console.print(line, highlight=False)

    def turn(self, _turn: Turn, progress: Progress) -> None:
        """Show that something was measured."""
        self._draw(progress)

    def _draw(self, progress: Progress) -> None:
        description = f"{_left(progress)}: {self._stage}"
        self._bar.update(
            self._task, completed=progress.share, description=description, refresh=True
        )


def print_result(console: Console, result: Result) -> None:
    """Print the finalists, the heat maps of the chosen engine, and what the outcome is worth."""
    found = result.found
    show(console, _finalists(result))
    for grid in grids(found.turns):
        if grid.engine == found.chosen.engine and known(grid):
            say(console, f"\n{grid.title}")
            show(console, _heat_map(grid))
    for line in conclusion(result):
        say(console, line)
    say(console, "\nFor DeepSpeed's configuration:")
    say(console, json.dumps(result.deepspeed(), indent=2))
    if found.chosen.engine not in (available_engines()[0], CUFILE):
        say(console, f"with TENSORFERRY_ENGINE={found.chosen.engine} in the environment")
    for warning in result.warnings:
        say(console, printable(f"Note: {warning}"))
    for places, words in (
        (result.stored_for, "Stored for {}: handles and files without explicit settings use it."),
        (result.dropped_for, "Dropped what was stored for {}: it is not better any more."),
    ):
        if places:
            say(console, "\n" + words.format(printable(", ".join(places))))


def conclusion(result: Result) -> list[str]:
    """Return in words what was chosen, how fast it is, and how sure that is."""
    found = result.found
    lines = [f"\nBest: {describe(found.chosen)}"]
    for action in ("write", "read"):
        interval = found.interval(found.chosen, action)
        if interval is not None:
            lines.append(f"  {action:5} {_with_interval(interval)}")
    if found.chosen == found.default:
        lines.append("  These are the default settings: nothing else is proven to be 2 % faster.")
    for trial in found.trials:
        gain = trial.gain
        who = "It is" if trial.proven else f"{describe(trial.nominee)} came nearest:"
        lines.append(
            f"  {who} {gain.median:.2f} times as fast as the default settings "
            f"({gain.low:.2f} to {gain.high:.2f}, {_sure(gain)}, {len(trial.pairs)} times each in turn)"
        )
    size = format_nbytes(result.nbytes)
    lines.append(f"  {len(found.turns)} measurements on {size} in {_duration(result.seconds)}")
    return lines


def print_profiles(console: Console, profiles: list[Profile], path: str) -> None:
    """Print stored profiles."""
    table = _settings_table("write GB/s", "read GB/s")
    table.add_column("file system", overflow="fold")
    table.add_column("found", no_wrap=True)
    for profile in profiles:
        rates = profile.found.get("rates", {})
        cells = (_rate_of(rates, action) for action in ("write", "read"))
        system = profile.file_system
        place = f"{system.mount_point} ({system.type})"
        when = str(profile.found.get("when", ""))[:10]
        names = (Text(printable(name)) for name in (place, when))
        table.add_row(*_cells(profile.settings), *cells, *names)
    show(console, table)
    say(console, printable(f"in {path}"))


def describe(settings: Settings) -> str:
    """Return settings in words."""
    words = (
        f"{settings.engine}, blocks of {format_nbytes(settings.block_size)}, queue depth {settings.queue_depth}, "
        f"{counted(settings.intra_op_parallelism, 'worker')}"
    )
    return words + (", single submit" if settings.single_submit else "")


def _settings_table(*numbers: str) -> Table:
    return make_table(["engine"], ("block", "depth", "workers", *numbers))


def _cells(settings: Settings) -> tuple[str, ...]:
    engine = f"{settings.engine} single" if settings.single_submit else str(settings.engine)
    return (
        engine,
        format_nbytes(settings.block_size),
        str(settings.queue_depth),
        str(settings.intra_op_parallelism),
    )


def _finalists(result: Result) -> Table:
    found = result.found
    table = _settings_table("write GB/s", "read GB/s", "CPU s/GB")
    table.add_column("")
    tried = [trial.nominee for trial in found.trials]
    scores = {
        settings: median(turn.score for turn in found.turns_of(settings))
        for settings in dict.fromkeys([*found.finals, *tried, found.chosen])
    }
    for settings in sorted(scores, key=lambda each: scores[each], reverse=True):
        notes = ["best"] if settings == found.chosen else []
        notes += ["default"] if settings == found.default else []
        rates = (found.interval(settings, action) for action in ("write", "read"))
        cpu = median(turn.cpu_seconds_per_gb for turn in found.turns_of(settings))
        table.add_row(
            *_cells(settings),
            *("" if rate is None else f"{rate.median / _GB:.2f}" for rate in rates),
            f"{cpu:.3f}",
            ", ".join(notes),
            style="bold" if settings == found.chosen else None,
        )
    return table


def _heat_map(grid: Grid) -> Table:
    table = Table(box=None, padding=0)
    for heading in ("block", *(f"depth {depth}" for depth in grid.queue_depths)):
        table.add_column(f"{heading} ", justify="right", no_wrap=True)
    values = known(grid)
    low, span = min(values), max(values) - min(values) or 1.0
    for block, row in zip(grid.block_sizes, grid.values, strict=True):
        cells = [Text("") if value is None else _cell(value, (value - low) / span) for value in row]
        table.add_row(f"{format_nbytes(block)} ", *cells)
    return table


def _cell(value: float, share: float) -> Text:
    colour, ink = _COLOURS[round(share * (len(_COLOURS) - 1))], "black" if share > 0.5 else "white"
    return Text(f"  {value:6.2f} ", style=f"{ink} on color({colour})")


def _with_interval(interval: Interval) -> str:
    return (
        f"{interval.median / _GB:.2f} GB/s ({interval.low / _GB:.2f} to {interval.high / _GB:.2f}, "
        f"{_sure(interval)})"
    )


def _sure(interval: Interval) -> str:
    return f"{100 * interval.confidence:.3g} % sure"


def _left(progress: Progress) -> str:
    return f"{100 * progress.share:.0f} %, {_duration(progress.seconds_left)} left"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02} minutes" if minutes else f"{rest} s"


def _rate_of(rates: Any, action: str) -> str:
    try:
        return f"{rates[action]['median'] / _GB:.2f}"
    except (KeyError, TypeError, OverflowError):
        return ""
