"""Loads by our reader, of whole states and of slices, and how saves and loads fail."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from tensorferry.checkpoint import FileSystemReader, FileSystemWriter

if TYPE_CHECKING:
    import io
    import pathlib
    from collections.abc import Iterator

LEVELS = ["off", "read", "before"]
WRITERS = {"ours": FileSystemWriter, "torch": dcp.FileSystemWriter}


def load(state: dict[str, Any], path: pathlib.Path, **options: Any) -> FileSystemReader:
    """Load into a state with our reader, in this process alone."""
    reader = FileSystemReader(path, **options)
    dcp.load(state, storage_reader=reader, no_dist=True)
    return reader


@contextlib.contextmanager
def fails(kind: type[BaseException], match: str = "", *, errno: int | None = None) -> Iterator[Any]:
    """Expect a save or load to fail for a reason that torch has wrapped; the list that it gives gets the reason."""
    reasons: list[Any] = []
    with pytest.raises(dcp.api.CheckpointException) as caught:
        yield reasons
    reasons += [reason for reason, _ in caught.value.failures.values()]
    (reason,) = reasons
    assert isinstance(reason, kind), repr(reason)
    assert match in str(reason)
    assert errno is None or reason.errno == errno, repr(reason)  # type: ignore[attr-defined]


class Targets(LoadPlanner):
    """A planner that resolves the items of a plan to tensors, and records the committed ones."""

    def __init__(self, targets: list[torch.Tensor]) -> None:
        self.targets = targets
        self.committed: list[int] = []

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self.targets[int(read_item.dest_index.fqn)]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        number = int(read_item.dest_index.fqn)
        assert tensor.data_ptr() == self.targets[number].data_ptr()
        self.committed.append(number)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise NotImplementedError

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None: ...
    def create_local_plan(self) -> LoadPlan: ...  # type: ignore[empty-body]
    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]: ...  # type: ignore[empty-body]
    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan: ...  # type: ignore[empty-body]


def item(name: str, number: int, offsets: Any, lengths: Any) -> ReadItem:
    origin = torch.Size([0] * len(lengths))
    return ReadItem(
        LoadItemType.TENSOR,
        MetadataIndex(str(number)),
        origin,
        MetadataIndex(name, origin),
        torch.Size(offsets),
        torch.Size(lengths),
    )


def read_slices(
    path: pathlib.Path, wanted: list[tuple[str, Any, Any, torch.Tensor]], verify: Any = "read"
) -> FileSystemReader:
    """Read slices (name, offsets, lengths) into tensors."""
    reader = FileSystemReader(path, verify=verify)
    reader.set_up_storage_reader(reader.read_metadata(), True)
    items = [item(name, k, o, n) for k, (name, o, n, _) in enumerate(wanted)]
    planner = Targets([target for *_, target in wanted])
    plan = reader.prepare_local_plan(LoadPlan(items))
    reader.read_data(plan, planner).wait()
    assert sorted(planner.committed) == list(range(len(wanted)))
    return reader
