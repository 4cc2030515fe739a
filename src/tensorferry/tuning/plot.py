"""Charts of measurements with matplotlib, an optional dependency that is imported only here."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tensorferry.tuning.rounds import Comparison

_COLOURS = {"ours": "#1f6fb2", "fio": "#b8692f", "peer": "#8a8f98", "limit": "#c9c3b8"}


def problem_of(path: Path) -> str | None:
    """Return why a chart cannot be written to a file, or None if it can. Call this before the measurement."""
    if importlib.util.find_spec("matplotlib") is None:
        return "needs matplotlib; install it with: pip install 'tensorferry[plot]'"
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        return f"{str(path)!r} does not end in .png, .svg or .pdf"
    if path.is_dir() or not path.parent.is_dir():
        return f"{str(path)!r} is a folder, or its folder does not exist"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return f"{str(path)!r} cannot be written"
    return None


def draw(comparisons: Mapping[str, Comparison], path: Path) -> None:
    """Draw a chart to a file, with one panel for each comparison. Bars are medians, whiskers are ranges."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    labels = {row.label for each in comparisons.values() for row in each.rows}
    most = max(len(each.sorted_rows()) for each in comparisons.values())
    figure = Figure(
        figsize=(3.6 * len(comparisons) + 0.06 * max(map(len, labels)), 0.9 + 0.36 * most),
        layout="constrained",
    )
    panels = figure.subplots(1, len(comparisons), squeeze=False)[0]
    for panel, (title, comparison) in zip(panels, comparisons.items(), strict=True):
        rows = comparison.sorted_rows()[::-1]
        medians = [float(row.median) for row in rows]
        whiskers = [
            [row.median - row.median.low for row in rows],
            [row.median.high - row.median for row in rows],
        ]
        colours = [_COLOURS[row.kind] for row in rows]
        bars = panel.barh(
            [row.label for row in rows], medians, xerr=whiskers, color=colours, ecolor="#333"
        )
        panel.bar_label(bars, [f"{median:.2f}" for median in medians], padding=4, fontsize=8)
        panel.margins(x=0.15)
        panel.set_title(title, fontsize=10, loc="left")
        panel.set_xlabel(comparison.unit, fontsize=9)
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    # A fixed hash salt and no date make the file reproducible for the same figures.
    with rc_context({"svg.hashsalt": "tensorferry", "svg.fonttype": "none"}):
        figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)
