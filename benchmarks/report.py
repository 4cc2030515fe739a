"""What a run prints and leaves behind: tables, JSON and a plot."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table

from benchmarks.harness import MIB, Comparison, Estimate, Figure, Outcome, ratio

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console


def print_comparison(console: Console, comparison: Comparison) -> None:
    """A comparison's table, best first, and what failed in it."""
    console.print(_comparison_table(comparison))
    for row in comparison.rows:
        if not row.usable:
            console.print(f"[red]{row.label} failed:[/red] {row.failure or 'no sample'}")
    if alike := comparison.as_good_as_the_best():
        best = comparison.sorted_rows()[0].label
        console.print(f"cannot be told from {best}: {', '.join(row.label for row in alike)}")


def print_figures(console: Console, figures: list[Figure]) -> None:
    """The promises, and whether this run met them."""
    table = Table(title="Figures", title_justify="left")
    for heading in ("what", "target", "measured", "95 %", "", "note"):
        table.add_column(heading, justify="left" if heading in ("what", "note") else "right")
    colours = {True: "green", False: "red", None: "yellow"}
    for figure in figures:
        table.add_row(
            figure.what,
            f"{figure.relation} {figure.target:g} {figure.unit}".rstrip(),
            "" if figure.measured is None else f"{figure.measured:.3g}",
            _range(figure.measured),
            f"[{colours[figure.met]}]{figure.verdict}[/]",
            figure.note,
        )
    console.print(table)


def as_json(
    machine: dict[str, Any], settings: dict[str, Any], outcomes: dict[str, Outcome]
) -> dict[str, Any]:
    """A whole run, every sample of it."""
    return {
        "machine": machine,
        "settings": settings,
        "scenarios": {
            name: {
                "notes": outcome.notes,
                "comparisons": [_comparison_json(c) for c in outcome.comparisons],
            }
            for name, outcome in outcomes.items()
        },
        "figures": [
            asdict(figure) | {"interval": _interval(figure.measured), "verdict": figure.verdict}
            for outcome in outcomes.values()
            for figure in outcome.figures
        ],
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def _comparison_table(comparison: Comparison) -> Table:
    table = Table(title=f"{comparison.name}: {comparison.rules}", title_justify="left")
    table.add_column("contender")
    for heading in (comparison.unit, "95 %", "over best fio", "95 %", "CPU s/GB", "peak growth"):
        table.add_column(heading, justify="right")
    best_fio = comparison.best("fio")
    for row in comparison.sorted_rows():
        over = ratio(row, best_fio)
        cpu = row.cpu_seconds_per_gb
        peak = row.peak_growth_nbytes
        table.add_row(
            row.label,
            f"{row.median:.3g}",
            _range(row.median),
            "no fio" if over is None else f"{over:.2f}",
            _range(over),
            "" if cpu is None else f"{cpu:.3f}",
            "" if peak is None else f"{peak / MIB:.0f} MiB",
            style="bold" if row.kind == "ours" else None,
        )
    return table


def _interval(number: float | None) -> tuple[float, float] | None:
    if not isinstance(number, Estimate) or not number.sure:
        return None
    return number.interval.low, number.interval.high


def _range(number: float | None) -> str:
    found = _interval(number)
    return "" if found is None else f"{found[0]:.3g} .. {found[1]:.3g}"


def _comparison_json(comparison: Comparison) -> dict[str, Any]:
    return {
        "name": comparison.name,
        "rules": comparison.rules,
        "unit": comparison.unit,
        "rows": [
            {
                "label": row.label,
                "kind": row.kind,
                "tags": row.tags,
                "failure": row.failure,
                "median": row.median if row.usable else None,
                "interval": _interval(row.median) if row.usable else None,
                "cpu_seconds_per_gb": row.cpu_seconds_per_gb,
                "peak_growth_nbytes": row.peak_growth_nbytes,
                "samples": [asdict(sample) for sample in row.samples],
            }
            for row in comparison.rows
        ],
    }
