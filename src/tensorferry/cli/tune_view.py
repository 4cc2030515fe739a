"""How a tuning run looks: live while it measures, and what is printed of its outcome."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tensorferry.tuning.gpus import CUFILE
from tensorferry.tuning.heatmap import Grid, grids, known
from tensorferry.tuning.sizes import format_nbytes
from tensorferry.tuning.space import available_engines

if TYPE_CHECKING:
    from types import TracebackType

    from tensorferry.tuning.profiles import Profile
    from tensorferry.tuning.race import Interval, Step, Turn
    from tensorferry.tuning.settings import Settings
    from tensorferry.tuning.tune import Result

_GB = 1e9
_LIVE_ROWS = 10
# Dark blue to yellow, as 8-bit colours; every terminal that has colours has these.
_COLOURS = (17, 18, 19, 25, 31, 36, 41, 77, 113, 149, 185, 221)


class LiveView:
    """A table of the fastest settings so far, redrawn after each measurement; on a pipe, one line for each stage."""

    def __init__(self, console: Console) -> None:
        self._console = console
        # Drawn between measurements only: a drawing thread would take processor time from them.
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._stage = ""
        self._count = 0
        self._total = 0
        self._turns: dict[Settings, Turn] = {}

    def __enter__(self) -> LiveView:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.stop()

    def stage(self, name: str, points: int, rounds: int) -> None:
        """Show that a stage begins."""
        self._stage, self._count, self._total = name, 0, points * rounds
        self._turns = {}
        repeats = f", at most {rounds} interleaved rounds" if rounds > 1 else ""
        if not self._console.is_terminal:
            self._console.print(f"{name}: {points} settings{repeats}")

    def turn(self, step: Step, turn: Turn) -> None:
        """Show what was measured."""
        self._count += 1
        self._turns[step.settings] = turn
        if not self._console.is_terminal:
            return
        table = _settings_table()
        for heading in ("write GB/s", "read GB/s"):
            table.add_column(heading, justify="right")
        best = sorted(self._turns.values(), key=lambda each: each.score, reverse=True)
        for each in best[:_LIVE_ROWS]:
            measured = (each.write, each.read)
            rates = ("" if one is None else f"{one.rate / _GB:.2f}" for one in measured)
            table.add_row(*_cells(each.settings), *rates)
        heading = f"{self._stage}: {self._count} of at most {self._total} measurements"
        self._live.update(Group(Text(heading), table), refresh=True)


def print_result(console: Console, result: Result) -> None:
    """Print the finalists, the heat maps of the chosen engine, and what the outcome is worth."""
    found = result.found
    console.print(_finalists(result))
    for grid in grids(found.turns):
        if grid.engine == found.chosen.engine and known(grid):
            console.print(_heat_map(grid))
    for line in conclusion(result):
        console.print(line, highlight=False)
    console.print("\nFor DeepSpeed's configuration:", highlight=False)
    console.print(json.dumps(result.deepspeed(), indent=2), highlight=False)
    if found.chosen.engine not in (available_engines()[0], CUFILE):
        console.print(
            f"with TENSORFERRY_ENGINE={found.chosen.engine} in the environment", highlight=False
        )
    for warning in result.warnings:
        console.print(f"Note: {warning}", highlight=False)
    if result.saved:
        places = ", ".join(dict.fromkeys(each.mount_point for each in result.file_systems))
        console.print(
            f"\nStored in {result.saved} for {places}: handles and files without explicit settings use it.",
            highlight=False,
            soft_wrap=True,
        )


def conclusion(result: Result) -> list[str]:
    """Return in words what was chosen, how fast it is, and how sure that is."""
    found = result.found
    lines = [f"\nBest: {describe(found.chosen)}"]
    for action in ("write", "read"):
        interval = found.interval(found.chosen, action)
        if interval is not None:
            lines.append(f"  {action:5} {_with_interval(interval)}")
    if found.chosen == found.default:
        lines.append("  These are the default settings: nothing else is faster beyond noise.")
    else:
        gain = found.gain()
        lines.append(
            f"  {gain.median:.2f} times as fast as the default settings "
            f"({gain.low:.2f} to {gain.high:.2f}, {_sure(gain)})"
        )
    if found.within_noise:
        count = len(found.within_noise)
        chosen = (
            ""
            if found.chosen == found.default
            else "; of the fastest, it takes least processor time"
        )
        lines.append(f"  within noise of {count} other{'s' if count > 1 else ''}{chosen}")
    size = format_nbytes(result.nbytes)
    lines.append(
        f"  {len(found.turns)} measurements on {size} in {result.seconds:.0f} s"
        + (f", {result.resumed} of them from an earlier run" if result.resumed else "")
    )
    return lines


def print_profiles(console: Console, profiles: list[Profile], path: str) -> None:
    """Print stored profiles."""
    table = _settings_table()
    for heading in ("write GB/s", "read GB/s"):
        table.add_column(heading, justify="right")
    table.add_column("file system")
    table.add_column("found")
    for profile in profiles:
        rates = profile.found.get("rates", {})
        cells = (_rate_of(rates, action) for action in ("write", "read"))
        system = profile.file_system
        place = f"{system.mount_point} ({system.type})"
        when = str(profile.found.get("when", ""))[:10]
        table.add_row(*_cells(profile.settings), *cells, place, when)
    console.print(table)
    console.print(f"in {path}", highlight=False, soft_wrap=True)


def describe(settings: Settings) -> str:
    """Return settings in words."""
    workers = settings.intra_op_parallelism
    words = (
        f"{settings.engine}, blocks of {format_nbytes(settings.block_size)}, queue depth {settings.queue_depth}, "
        f"{workers} worker{'s' if workers > 1 else ''}"
    )
    return words + (", single submit" if settings.single_submit else "")


def _settings_table() -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("engine")
    for heading in ("block", "depth", "workers"):
        table.add_column(heading, justify="right")
    return table


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
    table = _settings_table()
    for heading in ("write GB/s", "read GB/s", "CPU s/GB"):
        table.add_column(heading, justify="right")
    table.add_column("")
    order = sorted(
        found.rounds,
        key=lambda settings: _median(found.interval(settings)),
        reverse=True,
    )
    shown = order[:_LIVE_ROWS]
    for settings in dict.fromkeys([*shown, found.chosen, found.default]):
        notes = []
        if settings == found.chosen:
            notes.append("best")
        if settings == found.default:
            notes.append("default")
        if settings in found.within_noise:
            notes.append("within noise")
        rates = (found.interval(settings, action) for action in ("write", "read"))
        cpu = sorted(turn.cpu_seconds_per_gb for turn in found.rounds[settings])
        table.add_row(
            *_cells(settings),
            *("" if rate is None else f"{rate.median / _GB:.2f}" for rate in rates),
            f"{cpu[len(cpu) // 2]:.3f}",
            ", ".join(notes),
            style="bold" if settings == found.chosen else None,
        )
    return table


def _heat_map(grid: Grid) -> Table:
    table = Table(title=grid.title, title_justify="left", box=None, padding=0)
    table.add_column("block ", justify="right")
    for depth in grid.queue_depths:
        table.add_column(f"depth {depth} ", justify="right")
    values = known(grid)
    low, span = min(values), max(values) - min(values) or 1.0
    for block, row in zip(grid.block_sizes, grid.values, strict=True):
        cells = []
        for value in row:
            if value is None:
                cells.append(Text(""))
                continue
            share = (value - low) / span
            colour = _COLOURS[round(share * (len(_COLOURS) - 1))]
            ink = "black" if share > 0.5 else "white"
            cells.append(Text(f"  {value:6.2f} ", style=f"{ink} on color({colour})"))
        table.add_row(f"{format_nbytes(block)} ", *cells)
    return table


def _with_interval(interval: Interval) -> str:
    return (
        f"{interval.median / _GB:.2f} GB/s ({interval.low / _GB:.2f} to {interval.high / _GB:.2f}, "
        f"{_sure(interval)})"
    )


def _sure(interval: Interval) -> str:
    return f"{100 * interval.confidence:.0f} % sure"


def _median(interval: Interval | None) -> float:
    return interval.median if interval else 0.0


def _rate_of(rates: Any, action: str) -> str:
    try:
        return f"{rates[action]['median'] / _GB:.2f}"
    except (KeyError, TypeError):
        return ""
