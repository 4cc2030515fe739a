"""Draws docs/throughput.svg from the first table of docs/measured.md: python tools/throughput_picture.py."""

from __future__ import annotations

import re
from pathlib import Path

from tensorferry.tuning.plot import draw
from tensorferry.tuning.rounds import Comparison, Kind, Row, Sample

DOCS = Path(__file__).resolve().parent.parent / "docs"
PICTURE = DOCS / "throughput.svg"


def comparisons(page: str) -> dict[str, Comparison]:
    """Return the comparisons of writes and reads in the first table of a page."""
    table = re.search(r"^\|.*?\n\n", page, re.MULTILINE | re.DOTALL)
    assert table is not None
    found = {f"1 GiB {verb}": Comparison(verb, "") for verb in ("written", "read")}
    for line in table.group().strip().splitlines()[2:]:
        name, write, _, read, _ = (cell.strip() for cell in line.strip("|").split("|"))
        label = re.sub(r"[*`]| \(.*\)$", "", name)
        kind: Kind = "ours" if name.startswith("**") else "fio" if "fio" in name else "peer"
        for comparison, cell in zip(found.values(), (write, read), strict=True):
            sample = Sample(float(cell.strip("*")), 1.0)
            comparison.rows.append(Row(label, kind, samples=[sample]))
    return found


if __name__ == "__main__":
    draw(comparisons((DOCS / "measured.md").read_text()), PICTURE)
