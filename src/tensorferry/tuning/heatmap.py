"""What a sweep measured, as grids of block size and queue depth: numbers for a terminal, or a picture."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tensorferry.base.checks import format_nbytes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tensorferry.transfer.settings import Settings
    from tensorferry.tuning.race import Turn


@dataclass(frozen=True)
class Grid:
    """GB/s of one engine and action, rows by block size and columns by queue depth; None where nothing was measured.

    A cell is the best of all numbers of workers.
    """

    engine: str
    action: str
    block_sizes: list[int]
    queue_depths: list[int]
    values: list[list[float | None]]

    @property
    def title(self) -> str:
        """What it shows."""
        return f"{self.engine}, {self.action}, GB/s"


def grids(turns: Sequence[Turn]) -> list[Grid]:
    """Return a grid for each engine and action that was measured."""
    cells: dict[tuple[str, str], dict[tuple[int, int], float]] = defaultdict(dict)
    for action in ("write", "read"):
        for settings, rate in _rates(turns, action).items():
            of_engine = cells[str(settings.engine), action]
            cell = settings.block_size, settings.queue_depth
            of_engine[cell] = max(of_engine.get(cell, 0.0), rate)
    made = []
    for (engine, action), found in cells.items():
        blocks, depths = (sorted(set(axis)) for axis in zip(*found, strict=True))
        values = [[found.get((block, depth)) for depth in depths] for block in blocks]
        made.append(Grid(engine, action, blocks, depths, values))
    return made


def draw(found: Sequence[Grid], path: Path, title: str) -> None:
    """Draw grids into a file, whose ending tells its format (PNG, SVG, PDF).

    Raises
    ------
    ModuleNotFoundError
        matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    actions = list(dict.fromkeys(grid.action for grid in found))
    engines = list(dict.fromkeys(grid.engine for grid in found))
    figure = Figure(
        figsize=(4.2 * len(engines) + 0.6, 3.4 * len(actions) + 0.6), layout="constrained"
    )
    figure.suptitle(title, fontsize=9)
    axes = figure.subplots(len(actions), len(engines), squeeze=False)
    for grid in found:
        axis = axes[actions.index(grid.action), engines.index(grid.engine)]
        numbers = [[float("nan") if v is None else v for v in row] for row in grid.values]
        seen = [v for other in found if other.action == grid.action for v in known(other)]
        image = axis.imshow(numbers, aspect="auto", cmap="viridis", vmin=min(seen), vmax=max(seen))
        middle = (min(seen) + max(seen)) / 2
        for row, line in enumerate(grid.values):
            for column, value in enumerate(line):
                if value is not None:
                    colour = "black" if value > middle else "white"
                    text = f"{value:.2f}"
                    axis.text(column, row, text, ha="center", va="center", color=colour, fontsize=8)
        axis.set_xticks(range(len(grid.queue_depths)), [str(depth) for depth in grid.queue_depths])
        axis.set_yticks(
            range(len(grid.block_sizes)), [format_nbytes(block) for block in grid.block_sizes]
        )
        axis.set_xlabel("queue depth")
        axis.set_ylabel("block size")
        axis.set_title(grid.title, fontsize=9)
        figure.colorbar(image, ax=axis)
    figure.savefig(path, dpi=120)


def known(grid: Grid) -> list[float]:
    """Return the values that a grid has."""
    return [value for row in grid.values for value in row if value is not None]


def _rates(turns: Sequence[Turn], action: str) -> dict[Settings, float]:
    """Return the median GB/s of each point where it moved most of the file."""
    measured: dict[Settings, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for turn in turns:
        found = getattr(turn, action)
        if found is not None:
            measured[turn.settings][turn.nbytes].append(found.rate / 1e9)
    return {
        settings: statistics.median(by_size[max(by_size)]) for settings, by_size in measured.items()
    }
