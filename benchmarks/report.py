"""What a run prints and leaves behind: tables, JSON and a plot."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table

from benchmarks.harness import MIB, Comparison, Figure, Outcome, Row

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

_COLOURS = {"ours": "#1f77b4", "fio": "#8c8c8c", "peer": "#e8a33d", "limit": "#bcbcbc"}


def print_comparison(console: Console, comparison: Comparison) -> None:
    """A comparison's table, best first, and what failed in it."""
    console.print(_comparison_table(comparison))
    for row in comparison.rows:
        if not row.usable:
            console.print(f"[red]{row.label} failed:[/red] {row.failure or 'no sample'}")


def print_figures(console: Console, figures: list[Figure]) -> None:
    """The promises, and whether this run met them."""
    table = Table(title="Figures", title_justify="left")
    for heading in ("what", "target", "measured", "", "note"):
        table.add_column(heading, justify="left" if heading in ("what", "note") else "right")
    for figure in figures:
        measured = "not measured" if figure.measured is None else f"{figure.measured:.3g}"
        verdict = {True: "[green]met[/green]", False: "[red]missed[/red]", None: "[dim]-[/dim]"}
        table.add_row(
            figure.what,
            f"{figure.relation} {figure.target:g} {figure.unit}".rstrip(),
            measured,
            verdict[figure.met],
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
            asdict(figure) | {"met": figure.met}
            for outcome in outcomes.values()
            for figure in outcome.figures
        ],
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def write_plot(path: Path, outcomes: dict[str, Outcome], title: str) -> None:
    """Bars of medians with their quartiles, one panel for each comparison."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    comparisons = [
        c for o in outcomes.values() for c in o.comparisons if any(r.usable for r in c.rows)
    ]
    if not comparisons:
        return
    heights = [0.9 + 0.24 * sum(row.usable for row in c.rows) for c in comparisons]
    figure, axes = pyplot.subplots(
        len(comparisons),
        1,
        figsize=(10, sum(heights) + 0.6),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    figure.suptitle(title, fontsize=9)
    for axis, comparison in zip(axes[:, 0], comparisons, strict=True):
        rows = _sorted(comparison)[::-1]
        medians = [row.median for row in rows]
        lows = [row.median - row.quartiles[0] for row in rows]
        highs = [row.quartiles[1] - row.median for row in rows]
        axis.barh(
            [row.label for row in rows],
            medians,
            xerr=[lows, highs],
            color=[_COLOURS[row.kind] for row in rows],
            error_kw={"elinewidth": 0.8},
        )
        axis.set_title(f"{comparison.name} ({comparison.unit})", fontsize=9, loc="left")
        axis.tick_params(labelsize=7)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _comparison_table(comparison: Comparison) -> Table:
    table = Table(title=f"{comparison.name}: {comparison.rules}", title_justify="left")
    table.add_column("contender")
    for heading in (comparison.unit, "quartiles", "of best fio", "CPU s/GB", "peak growth"):
        table.add_column(heading, justify="right")
    best_fio = comparison.best("fio")
    for row in _sorted(comparison):
        low, high = row.quartiles
        cpu = row.cpu_seconds_per_gb
        peak = row.peak_growth_nbytes
        table.add_row(
            row.label,
            f"{row.median:.3g}",
            f"{low:.3g} .. {high:.3g}",
            f"{row.median / best_fio.median:.2f}" if best_fio else "no fio",
            "" if cpu is None else f"{cpu:.3f}",
            "" if peak is None else f"{peak / MIB:.0f} MiB",
            style="bold" if row.kind == "ours" else None,
        )
    return table


def _sorted(comparison: Comparison) -> list[Row]:
    rows = [row for row in comparison.rows if row.usable]
    return sorted(rows, key=lambda row: row.median, reverse=comparison.higher_is_better)


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
                "quartiles": row.quartiles if row.usable else None,
                "cpu_seconds_per_gb": row.cpu_seconds_per_gb,
                "peak_growth_nbytes": row.peak_growth_nbytes,
                "samples": [asdict(sample) for sample in row.samples],
            }
            for row in comparison.rows
        ],
    }
