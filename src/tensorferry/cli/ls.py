"""``tensorferry ls``: what is in a checkpoint."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from tensorferry.cli.checkpoint_arguments import (
    NO_CHECKPOINT,
    CheckpointPath,
    TrustPickle,
    printable,
)
from tensorferry.cli.consoles import make_console
from tensorferry.cli.leaving import leaving_well

if TYPE_CHECKING:
    from rich.console import Console

    from tensorferry.checkpoint.listing import Entry, Shard

_FAILED = 1


def ls(
    path: CheckpointPath,
    shards: Annotated[bool, typer.Option("--shards", help="Show where each part lies.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
    trust_pickle: TrustPickle = False,
) -> None:
    """List a checkpoint's tensors and objects: shapes, dtypes, sizes, shards. Reads its metadata alone."""
    from tensorferry.checkpoint.errors import CheckpointError
    from tensorferry.checkpoint.listing import list_checkpoint

    with leaving_well("tensorferry ls"):
        try:
            entries = list_checkpoint(path, trust_pickle=trust_pickle)
        except (FileNotFoundError, NotADirectoryError) as error:
            typer.echo(f"tensorferry ls: {error}", err=True)
            raise typer.Exit(NO_CHECKPOINT) from None
        except (CheckpointError, OSError) as error:
            typer.echo(printable(f"tensorferry ls: {error}"), err=True)
            raise typer.Exit(_FAILED) from None
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(entry) for entry in entries], indent=2))
        return
    _show(entries, shards, make_console())


def _show(entries: list[Entry], with_shards: bool, console: Console) -> None:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("name", overflow="fold")
    table.add_column("dtype")
    table.add_column("shape")
    table.add_column("size", justify="right")
    table.add_column("shards", justify="right")
    for entry in entries:
        shape = str(list(entry.shape)) if entry.dtype else ""
        size = decimal(entry.nbytes)
        table.add_row(
            Text(printable(entry.name)),
            entry.dtype or "object",
            shape,
            size,
            str(len(entry.shards)),
        )
        if with_shards:
            for shard in entry.shards:
                table.add_row(Text(printable(f"  {_place(shard)}")), "", _box(shard), style="dim")
    console.print(table)
    total = sum(entry.nbytes for entry in entries)
    console.print(f"{len(entries)} entries, {decimal(total)}", highlight=False)


def _place(shard: Shard) -> str:
    if shard.file is None:
        return "missing"
    return f"{shard.file}, bytes {shard.begin} to {shard.end}"


def _box(shard: Shard) -> str:
    return f"{list(shard.sizes)} at {list(shard.offsets)}" if shard.sizes else ""
