"""Tables of measurements, for ``tensorferry bench`` and the project's own benchmarks.

A contender is one way to do the measured work, such as tensorferry, fio or plain Python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensorferry.cli.consoles import make_table

if TYPE_CHECKING:
    from rich.table import Table

    from tensorferry.tuning.rounds import Comparison, Row


def comparison_cells(row: Row) -> list[str]:
    """Return the cells of a contender's row: GB/s and their range, latencies, CPU time, and growth of memory."""
    latency = row.samples[-1].details.get("latency_microseconds") or {}
    cpu, growth = row.cpu_seconds_per_gb, row.peak_growth_nbytes
    return [
        f"{row.median:.3f}",
        f"{row.median.low:.2f} .. {row.median.high:.2f}",
        *(f"{latency[name] / 1000:.2f}" if name in latency else "-" for name in ("p50", "p99")),
        "-" if cpu is None else f"{cpu:.3f}",
        "-" if growth is None else f"{growth / (1 << 20):.0f}",
    ]


def comparison_table(comparison: Comparison) -> Table:
    """Return a table of contenders, the best one first.

    It has the ratio of each contender to the best configuration of fio, computed within the same rounds.
    """
    numbers = (comparison.unit, "min .. max", "over best fio", "min .. max", "CPU s/GB", "+MiB")
    table = make_table(["contender"], numbers)
    table.title, table.title_justify = f"{comparison.name}: {comparison.rules}", "left"
    best_fio = comparison.best("fio")
    for row in comparison.sorted_rows():
        over = comparison.over(row.label, best_fio)
        table.add_row(
            row.label,
            f"{row.median:.3g}",
            f"{row.median.low:.3g} .. {row.median.high:.3g}",
            "-" if over is None else f"{over:.2f}",
            "-" if over is None else f"{over.low:.2f} .. {over.high:.2f}",
            *comparison_cells(row)[4:],
            style="bold" if row.kind == "ours" else None,
        )
    return table
