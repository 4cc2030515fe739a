"""Charts of what was measured, by matplotlib, which is an extra and imported here only."""

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
    """Return why nothing can be drawn into a file, before anything is measured; None where it can."""
    if importlib.util.find_spec("matplotlib") is None:
        return "needs matplotlib; install it with: pip install 'tensorferry[plot]'"
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        return f"{str(path)!r} ends neither in .png nor in .svg or .pdf"
    if path.is_dir() or not path.parent.is_dir():
        return f"{str(path)!r} is not a file in a folder that there is"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return f"{str(path)!r} cannot be written"
    return None


def draw(comparisons: Mapping[str, Comparison], path: Path) -> None:
    """Draw medians as bars and ranges as whiskers, a panel for each comparison by its title, into a file."""
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
    with rc_context(
        {"svg.hashsalt": "tensorferry", "svg.fonttype": "none"}
    ):  # the same figures make the same file
        figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)
