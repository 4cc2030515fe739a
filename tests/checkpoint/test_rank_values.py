"""Ranks that save different values under one name are told, and different sizes are refused before anything is lost."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tensorferry.checkpoint import Checkpoints, FileSystemReader, FileSystemWriter
from tensorferry.checkpoint.storage import rank_values
from tests.support.ranks import call_on_ranks

if TYPE_CHECKING:
    import pathlib

EQUAL = {
    "tensor": torch.arange(300.0).reshape(3, 100).t(),
    "conjugate": torch.ones(3, dtype=torch.cfloat).conj(),
    "nothing": torch.zeros(0, 3),
    "sets": [{"a", "b", "c", "d"}, frozenset((1, 2))],
    "values": [None, True, 2.5, 10**5000, "text", b"bytes", (1, {"b": 2, "a": float("nan")})],
    "array": np.arange(9).reshape(3, 3),
}


def different(rank: int) -> dict[str, Any]:
    """Return a state of which the names of some values say that they differ from rank to rank."""
    return {
        "differs": rank,
        "nested": {"differs": [1, {"x": rank}]},
        "tensor differs": torch.full((4,), rank),
        "dtype differs": torch.zeros(4, dtype=(torch.int64, torch.float32)[rank]),
        "array differs": np.full(3, rank),
        **EQUAL,
        f"only of rank {rank}": rank,
    }


def messages_of_saves(rank: int, directory: str) -> list[list[str]]:
    """Save by both ways, and return the warnings of each save."""
    found = []
    for by_checkpoints in (True, False):
        for state in (different(rank), EQUAL):
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                if by_checkpoints:
                    with Checkpoints(f"{directory}/run") as checkpoints:
                        checkpoints.save(len(found), state, wait=True)
                else:
                    writer = FileSystemWriter(f"{directory}/{len(found)}")
                    dcp.save(state, storage_writer=writer)
            found.append(
                [str(each.message) for each in told if "under one name" in str(each.message)]
            )
    return found


def test_ranks_that_save_different_values_under_one_name_say_so(directory: pathlib.Path) -> None:
    for rank, found in enumerate(call_on_ranks(2, messages_of_saves, str(directory))):
        assert [*map(len, found)] == [1, 0, int(rank == 0), 0]
        for message in (each for messages in found for each in messages):
            assert (
                "'array differs', 'differs', 'dtype differs', 'nested.differs.1.x' and 1 more"
                in message
            )


def sizes_refused(rank: int, directory: str) -> list[str]:
    """Save tensors of different sizes over a checkpoint, and return the errors."""
    with Checkpoints(f"{directory}/run") as checkpoints:
        checkpoints.save(1, {"w": torch.ones(3)}, wait=True)
        with pytest.raises(ValueError, match="different sizes under one name: 'w'") as failure:
            checkpoints.save(1, {"w": torch.ones(3 + rank)}, overwrite=True)
        checkpoints.restore({"w": torch.zeros(3)})
        checkpoints.save(2, {"w": torch.ones(3)}, wait=True)
    writer = FileSystemWriter(f"{directory}/alone")
    dcp.save({"w": torch.ones(3)}, storage_writer=writer)
    with pytest.raises(CheckpointException) as failures:
        dcp.save({"w": torch.ones(3 + rank)}, storage_writer=writer)
    state = {"w": torch.zeros(3)}
    dcp.load(state, storage_reader=FileSystemReader(f"{directory}/alone"))
    assert torch.equal(state["w"], torch.ones(3))
    dist.barrier()
    return [str(failure.value), str(next(iter(failures.value.failures.values()))[0])]


def test_tensors_of_different_sizes_fail_the_save_and_the_last_checkpoint_stays(
    directory: pathlib.Path,
) -> None:
    for found in call_on_ranks(2, sizes_refused, str(directory)):
        assert all("'w' [[3], [4]]" in each for each in found)


def test_equal_values_have_equal_descriptions_whatever_made_them() -> None:
    text = "".join(["te", "xt"])
    one = {"v": [text, text, {"b": 1, "a": (2,)}], "w": torch.ones(2, 3)}
    other = {"v": ["text", "".join(["t", "ext"]), {"a": (2,), "b": 1}], "w": torch.ones(3, 2).t()}
    assert rank_values.describe(one) == rank_values.describe(other)
    for value in (0, 0.0, False, "0", b"0", None, [0], (0,), {0}):
        for another in (0, 0.0, False, "0", b"0", None, [0], (0,), {0}):
            same = rank_values.describe({"v": value}) == rank_values.describe({"v": another})
            assert same == (type(value) is type(another))
