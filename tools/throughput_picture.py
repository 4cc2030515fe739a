"""Draws docs/throughput.svg from the first table of docs/measured.md: python tools/throughput_picture.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).resolve().parent.parent / "docs"
PICTURE = DOCS / "throughput.svg"

ROW, BAR, LEFT, WIDTH, TOP = 54, 17, 420, 320, 58
COLORS = {"write": "#1565c0", "read": "#2e7d32"}


class Measured(NamedTuple):
    """A row of the table: gigabytes a second."""

    name: str
    ours: bool
    write: float
    read: float


def rows(page: str) -> list[Measured]:
    """Return the rows of a page's first table."""
    table = re.search(r"^\|.*?\n\n", page, re.MULTILINE | re.DOTALL)
    assert table is not None
    found = []
    for line in table.group().strip().splitlines()[2:]:
        name, write, _, read, _ = (cell.strip() for cell in line.strip("|").split("|"))
        plain = re.sub(r"[*`]", "", name)
        numbers = [float(cell.strip("*")) for cell in (write, read)]
        found.append(Measured(plain, name.startswith("**"), *numbers))
    return found


def picture(measured: list[Measured]) -> str:
    """Return the SVG: two bars for each row."""
    height = TOP + ROW * len(measured) + 8
    scale = WIDTH / max(max(row.write, row.read) for row in measured)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="800" height="{height}" '
        f'viewBox="0 0 800 {height}" font-family="sans-serif" font-size="13">',
        "<title>1 GiB written and read, GB/s</title>",
        f'<rect width="800" height="{height}" fill="#ffffff"/>',
        '<text x="16" y="28" font-size="16" font-weight="bold">1 GiB to and from one drive, GB/s</text>',
    ]
    for at, kind in enumerate(COLORS):
        x = LEFT + 140 * at
        lines.append(f'<rect x="{x}" y="16" width="14" height="14" fill="{COLORS[kind]}"/>')
        lines.append(f'<text x="{x + 20}" y="28">{kind}</text>')
    for index, row in enumerate(measured):
        y = TOP + ROW * index
        weight = ' font-weight="bold"' if row.ours else ""
        label = re.sub(r" \(.*\)$", "", row.name)
        lines.append(f'<text x="16" y="{y + 22}"{weight}>{label}</text>')
        for at, (kind, value) in enumerate((("write", row.write), ("read", row.read))):
            faded = "" if row.ours else ' opacity=".55"'
            top, length = y + at * (BAR + 2), value * scale
            lines.append(
                f'<rect x="{LEFT}" y="{top}" width="{length:.1f}" height="{BAR}" fill="{COLORS[kind]}"'
                f"{faded}/>"
            )
            lines.append(
                f'<text x="{LEFT + length + 6:.1f}" y="{top + 13}"{weight}>{value:.2f}</text>'
            )
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(picture(rows((DOCS / "measured.md").read_text())))
