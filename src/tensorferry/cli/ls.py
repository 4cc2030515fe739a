"""``tensorferry ls``: what is in a checkpoint."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal
from rich.text import Text

from tensorferry.cli.checkpoint_arguments import (
    AsJson,
    CheckpointPath,
    TrustPickle,
    looking_at_checkpoints,
)
from tensorferry.cli.consoles import counted, make_console, make_table, print_json, say, show
from tensorferry.cli.leaving import printable

if TYPE_CHECKING:
    from tensorferry.checkpoint.tools.findings import Entry, Shard


def ls(
    path: CheckpointPath,
    shards: Annotated[bool, typer.Option("--shards", help="Show where each part lies.")] = False,
    as_json: AsJson = False,
    trust_pickle: TrustPickle = False,
) -> None:
    """List what is in a checkpoint, or the tensors of files of torch.save's or safetensors: shapes, dtypes, sizes.

    Reads metadata alone. Exit codes: 0 done, 1 it is damaged or unreadable, 2 there is no checkpoint, or a file of
    another kind.
    """
    with looking_at_checkpoints():
        from tensorferry.checkpoint import tools

        entries = tools.entries(path, trust_pickle=trust_pickle)
    if as_json:
        print_json([dataclasses.asdict(entry) for entry in entries])
    else:
        _show(entries, shards)


def _show(entries: list[Entry], with_shards: bool) -> None:
    console = make_console()
    table = make_table(["name", "dtype", "shape"], ["size", "shards"])
    for entry in entries:
        table.add_row(
            Text(printable(entry.name)),
            entry.dtype or "object",
            str(list(entry.shape)) if entry.dtype else "",
            decimal(entry.nbytes),
            str(len(entry.shards)),
        )
        if with_shards:
            for shard in entry.shards:
                table.add_row(Text(printable(f"  {_place(shard)}")), "", _box(shard), style="dim")
    show(console, table)
    what = counted(len(entries), "entry", "entries")
    say(console, f"{what}, {decimal(sum(entry.nbytes for entry in entries))}")


def _place(shard: Shard) -> str:
    if shard.file is None:
        return "missing"
    return f"{shard.file}, bytes {shard.begin} to {shard.end}"


def _box(shard: Shard) -> str:
    return f"{list(shard.sizes)} at {list(shard.offsets)}" if shard.sizes else ""
