"""Draws docs/throughput.svg from the first table of docs/measured.md: python tools/throughput_picture.py."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
PICTURE = DOCS / "throughput.svg"
_OURS, _FIO, _OTHERS = "#1f6fb2", "#b8692f", "#8a8f98"


def panels(page: str) -> dict[str, dict[str, float]]:
    """Return the GB/s of writes and of reads in the first table of a page, by the name of the row."""
    table = re.search(r"^\|.*?\n\n", page, re.MULTILINE | re.DOTALL)
    assert table is not None
    found: dict[str, dict[str, float]] = {"1 GiB written": {}, "1 GiB read": {}}
    for line in table.group().strip().splitlines()[2:]:
        name, write, _, read, _ = (cell.strip(" *") for cell in line.strip("|").split("|"))
        label = re.sub(r"[*`]| \(.*\)$", "", name)
        for panel, cell in zip(found.values(), (write, read), strict=True):
            panel[label] = float(cell)
    return found


def draw(shown: dict[str, dict[str, float]], path: Path) -> None:
    """Draw a chart with one panel for each set of figures, the highest first."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 2.7), layout="constrained")
    for axes, (title, figures) in zip(figure.subplots(1, len(shown)), shown.items(), strict=True):
        rows = sorted(figures, key=lambda label: figures[label])
        colours = [_OURS if "ferry" in row else _FIO if "fio" in row else _OTHERS for row in rows]
        bars = axes.barh(rows, [figures[row] for row in rows], color=colours)
        axes.bar_label(bars, [f"{figures[row]:.2f}" for row in rows], padding=4, fontsize=8)
        axes.margins(x=0.15)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlabel("GB/s", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    # A fixed hash salt and no date make the file reproducible for the same figures.
    with rc_context({"svg.hashsalt": "tensorferry", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    draw(panels((DOCS / "measured.md").read_text()), PICTURE)
