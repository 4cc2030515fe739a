"""load_files(): tensors of several files in order, within a budget, and only the parts that the plan selects."""

from __future__ import annotations

import gc
import itertools
import json
import os
import random
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import tensorferry
from tensorferry.safetensors import checksums, plans, safe_open
from tensorferry.safetensors.errors import SafetensorError
from tensorferry.safetensors.plans import load_files, tensor_parallel_plan
from tensorferry.transfer import pipeline
from tests.safetensors.files import written
from tests.support import child, interrupts, leaks
from tests.support.forks import passes_in_child
from tests.support.page_cache import make_cold

MIB = 1 << 20


def make(directory: Path) -> tuple[list[Path], dict[str, Any]]:
    """Write two files with tensors of many kinds; return the paths and the tensors."""
    generator = torch.Generator().manual_seed(14)

    def random(*shape: int, dtype: Any = torch.float32) -> Any:
        return torch.randn(shape, generator=generator).to(dtype)

    first = {f"a{number:03}": random(7, number) for number in range(100)}
    first |= {"large": random(1031, 517), "half": random(700, 1111, dtype=torch.bfloat16)}
    second = {"scalar": random(), "empty": random(0, 5), "bytes": random(3, 3).to(torch.uint8)}
    second |= {"wide": random(64, 50_000), "deep": random(5, 300, 70), "long": random(2_000_000)}
    paths = [directory / "1.safetensors", directory / "2.safetensors"]
    for path, tensors in zip(paths, (first, second), strict=True):
        save_file(tensors, path)
    return paths, first | second


def assert_same(found: Any, wanted: Any) -> None:
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    assert torch.equal(found, wanted)
    assert found.is_contiguous()


@pytest.mark.parametrize("budget", ["14MiB", "20MiB", "1GiB"])
def test_all_tensors_come_in_file_order(directory: Path, budget: str) -> None:
    paths, wanted = make(directory)
    found = list(load_files(paths, memory_budget=budget))
    assert sorted(name for name, _ in found) == sorted(wanted)
    offsets = []
    for path in paths:
        head = json.loads(path.read_bytes()[8:].split(b"}}", 1)[0] + b"}}")
        named = [(entry["data_offsets"], name) for name, entry in head.items()]
        offsets += [name for _, name in sorted(named)]
    order = [name for name, _ in found]
    assert [name for name in order if name != "empty"] == [n for n in offsets if n != "empty"]
    for name, tensor in found:
        assert_same(tensor, wanted[name])


@pytest.mark.parametrize(
    "index",
    [
        slice(None),
        slice(3, 5),
        slice(-2, None),
        slice(1, 10_000),
        slice(3, 1),
        slice(0, None, 2),
        2,
        -1,
        ...,
        None,
        (slice(None), slice(1, 3)),
        (..., slice(2, 40)),
        (slice(1, 4), slice(None, None, 7)),
        (1, ..., 2),
        (slice(None, None, 2), slice(10, 12), ...),
        (None, 1),
        (slice(None), None, slice(2, 3)),
    ],
    ids=str,
)
def test_slices_are_those_of_torch(directory: Path, index: Any) -> None:
    paths, wanted = make(directory)
    names = ["large", "half", "wide", "deep", "bytes"]
    for name, tensor in load_files(paths, dict.fromkeys(names, index)):
        names.remove(name)
        assert_same(tensor, wanted[name] if index is None else wanted[name][index].contiguous())
    assert names == []


@pytest.mark.parametrize("seed", range(20))
def test_random_slices_are_those_of_torch(directory: Path, seed: int) -> None:
    rng = random.Random(seed)
    shape = tuple(rng.choice([1, 2, 3, 8, 33, 700]) for _ in range(rng.randint(1, 4)))
    while torch.Size(shape).numel() > 4_000_000:
        shape = shape[1:]
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)
    save_file(
        {"pad": torch.zeros(rng.randint(1, 9), dtype=torch.uint8), "x": tensor},
        directory / "x.safetensors",
    )
    for _ in range(20):
        index = tuple(
            slice(
                rng.choice([None, *range(-n - 1, n + 2)]),
                rng.choice([None, *range(-n - 1, n + 2)]),
                rng.choice([None, 1, 2, 3]),
            )
            if rng.random() < 0.8
            else rng.randrange(-n, n)
            for n in shape[: rng.randint(1, len(shape))]
        )
        ((_, found),) = load_files(directory / "x.safetensors", {"x": index})
        assert_same(found, tensor[index].contiguous())


def test_numpy_arrays(directory: Path) -> None:
    paths, wanted = make(directory)
    plan = {
        "wide": (slice(None), slice(5, 9)),
        "long": None,
        "deep": (1, slice(None, None, 3)),
        "empty": None,
    }
    plan["bytes"] = (..., slice(None, None, 2))
    found = dict(load_files(paths, plan, framework="np"))
    assert found.keys() == plan.keys()
    for name, array in found.items():
        index = plan[name]
        right = wanted[name] if index is None else wanted[name][index]
        assert array.dtype == right.numpy().dtype
        np.testing.assert_array_equal(array, right.numpy())
    with pytest.raises(SafetensorError, match="BF16"):
        load_files(paths, {"half": None}, framework="np")


def test_a_model_is_an_index_or_a_directory(directory: Path) -> None:
    _, wanted = make(directory)
    assert {name for name, _ in load_files(directory)} == set(wanted)
    owners = {"large": "1.safetensors", "long": "2.safetensors"}
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": owners}))
    for source in (directory, index):
        assert [name for name, _ in load_files(source)] == ["large", "long"]
    for wrong, message in (
        ({"large": "../1.safetensors"}, "not in the folder of the index"),
        ({"nothing": "1.safetensors"}, "does not contain it"),
        ({"large": 3}, "not a file name"),
        ({"large": "\ud800.safetensors"}, "not a file name"),
        ({}, "not name any tensor"),
    ):
        index.write_text(json.dumps({"weight_map": wrong}))
        with pytest.raises(SafetensorError, match=message):
            load_files(index)
    index.unlink()
    save_file({"large": torch.zeros(1)}, directory / "3.safetensors")
    with pytest.raises(SafetensorError, match=r"'large'.*1\.safetensors'"):
        load_files(directory)


def test_what_cannot_be_is_refused_before_any_tensor_is_read(directory: Path) -> None:
    paths, _ = make(directory)
    with pytest.raises(
        ValueError, match=r"memory_budget: 1000000 bytes.*'half'.* needs 15\d\d\d\d\d"
    ):
        load_files(paths, {"half": None, "a001": None}, memory_budget=1_000_000)
    with pytest.raises(SafetensorError, match="'nothing'"):
        load_files(paths, {"nothing": None})
    for index in ("x", [1, 2], (0, [1]), 1.5, slice(None, None, -1), (0, 0, 0), 10**9):
        with pytest.raises(SafetensorError, match=r"'large'"):
            load_files(paths, {"large": index})
    for wrong in ("much", 0, -1, None):
        with pytest.raises((ValueError, TypeError), match="memory_budget"):
            load_files(paths, memory_budget=wrong)  # type: ignore[arg-type]
    with pytest.raises(SafetensorError, match="framework"):
        load_files(paths, framework="tf")
    for device in ("nope", "meta", True, 1.5):
        with pytest.raises(SafetensorError, match="device"):
            load_files(paths, device=device)
    with pytest.raises(TypeError, match="plan"):
        load_files(paths, ["large"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="files: the list is empty"):
        load_files([])


def test_verified_tensors_are_right_and_damaged_ones_are_not_given(directory: Path) -> None:
    paths, wanted = make(directory)
    with pytest.raises(FileNotFoundError):
        load_files(paths, verify=True)
    checksums.write(paths)
    found = dict(load_files(paths, memory_budget="14MiB", verify=True))
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert_same(tensor, wanted[name])
    plan = {
        "wide": (slice(None), slice(7, 300)),
        "deep": slice(1, 3),
        "a007": None,
        "long": slice(0, 9),
    }
    found = dict(load_files(paths, plan, verify=True))
    assert found.keys() == plan.keys()
    for name, tensor in found.items():
        assert_same(tensor, wanted[name] if plan[name] is None else wanted[name][plan[name]])
    content = bytearray(paths[1].read_bytes())
    content[-3_000_000] ^= 1
    paths[1].write_bytes(content)
    damaged = load_files(paths, verify=True)
    with pytest.raises(tensorferry.ChecksumError, match=r"2\.safetensors"):
        list(damaged)
    assert list(damaged) == []
    assert len(dict(load_files(paths))) == len(wanted)


def test_a_tensor_kept_keeps_no_other_one(directory: Path) -> None:
    paths, _ = make(directory)
    found = dict(load_files(paths, {f"a{number:03}": None for number in range(1, 100)}))
    assert len(found) == 99
    for name, tensor in found.items():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, name


def test_memory_stays_within_the_budget(directory: Path) -> None:
    big = {f"t{number}": torch.zeros(4 * MIB) for number in range(20)}
    save_file(big, directory / "big.safetensors")
    del big
    growth = child.call(
        "tests.safetensors.test_plans:growth_of_a_load",
        path=directory / "big.safetensors",
        imports=["torch"],
    ).result
    assert growth < 64 * MIB + 16 * MIB + 32 * MIB  # with the tensor that is looked at


def growth_of_a_load(path: str) -> int:
    list(load_files(path, {"t0": None}))
    before = peak = _resident_nbytes()
    for _, tensor in load_files(path, memory_budget="64MiB"):
        time.sleep(0.02)  # the read-ahead reaches its limit in this time
        assert not tensor[0]
        peak = max(peak, _resident_nbytes())
    return peak - before


def _resident_nbytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_reading_goes_ahead_of_the_consumer(directory: Path) -> None:
    paths, wanted = make(directory)
    tensors = load_files(paths)
    next(tensors)
    assert tensors.nbytes_read >= sum(tensor.nbytes for tensor in wanted.values())
    tensors.close()
    narrow = load_files(paths, memory_budget="13MiB")
    next(narrow)
    assert narrow.nbytes_read <= 2 * 13 * MIB
    narrow.close()


def test_what_ends_in_the_middle_leaves_nothing(directory: Path) -> None:
    paths, _ = make(directory)

    def closed() -> None:
        tensors = load_files(paths)
        next(tensors)
        tensors.close()
        tensors.close()
        assert list(tensors) == []

    def dropped() -> None:
        next(load_files(paths))

    def failed() -> None:
        with suppress(ZeroDivisionError), load_files(paths) as tensors:
            for _ in tensors:
                raise ZeroDivisionError

    for work in (closed, dropped, failed):
        for _ in range(5):
            work()
        gc.collect()
        # A leak would be 20 times the memory of a group; abandoned reads and malloc keep less.
        with leaks.nothing_leaks(resident_slack_nbytes=96 * MIB):
            for _ in range(20):
                work()


def test_a_file_cut_short_meanwhile_fails_with_its_name(directory: Path) -> None:
    paths, _ = make(directory)
    tensors = load_files(paths, memory_budget="13MiB")
    os.truncate(paths[1], paths[1].stat().st_size - 20 * MIB)
    with pytest.raises(SafetensorError, match=r"2\.safetensors.*changed"):
        list(tensors)
    assert list(tensors) == []


def test_a_file_cut_short_while_it_is_read_fails_with_its_name(directory: Path) -> None:
    paths, _ = make(directory)
    tensors = load_files(paths[1], memory_budget="13MiB")
    next(tensors)
    os.truncate(paths[1], 4096)
    with pytest.raises(OSError, match=r"2\.safetensors"):
        list(tensors)


def test_a_signal_handler_may_take_the_tensor_that_is_waited_for(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = directory / "x.safetensors"
    save_file({f"t{at}": torch.full((MIB,), float(at)) for at in range(4)}, path)
    loaded = load_files(path)
    given = []
    wait = pipeline.Read.wait

    def handled(read: pipeline.Read) -> None:
        monkeypatch.setattr(pipeline.Read, "wait", wait)
        given.append(next(loaded))
        wait(read)

    monkeypatch.setattr(pipeline.Read, "wait", handled)
    given += loaded
    assert [name for name, _ in given] == [f"t{at}" for at in range(4)]
    assert all(tensor.unique().tolist() == [float(name[1:])] for name, tensor in given)


def test_closed_it_keeps_nothing(directory: Path) -> None:
    """Also while the iterator still exists."""
    path = directory / "x.safetensors"
    save_file({f"t{at}": torch.ones(MIB) for at in range(8)}, path)
    loaded = load_files(path, memory_budget="13MiB")
    next(loaded)
    parts = [weakref.ref(part) for read in loaded.pipeline.held for part in read.parts]
    loaded.close()
    gc.collect()
    assert parts
    assert not any(part() for part in parts)
    assert list(loaded) == []


def test_a_later_file_that_is_replaced_is_refused_whenever_it_is_opened(directory: Path) -> None:
    """The first read happens while an earlier tensor is returned, and its error is not raised then."""
    paths = [directory / f"{number}.safetensors" for number in range(2)]
    for path in paths:
        tensors = {f"{path.stem}{at}": torch.ones(MIB) for at in range(2)}
        save_file(tensors, path)
    loaded = load_files(paths, memory_budget="8MiB")
    save_file({f"1{at}": torch.zeros(MIB) for at in range(2)}, directory / "new")
    (directory / "new").replace(paths[1])
    given: list[str] = []
    with pytest.raises(SafetensorError, match=r"1\.safetensors': it was replaced or changed"):
        given.extend(name for name, _ in loaded)
    assert not any(name.startswith("1") for name in given)
    assert list(loaded) == []


def test_a_file_that_is_replaced_after_its_header_was_read_is_refused(directory: Path) -> None:
    """Its tensors are at the offsets of other tensors in another file."""
    path = directory / "x.safetensors"
    save_file({"a": torch.ones(1000), "b": torch.ones(1000)}, path)
    tensors = load_files(path)
    save_file({"a": torch.zeros(1000), "b": torch.zeros(999), "c" * 500: torch.ones(3)}, path)
    with pytest.raises(SafetensorError, match=r"x\.safetensors': it was replaced or changed"):
        next(tensors)
    assert list(tensors) == []
    opened = load_files(path)
    names = [next(opened)[0]]
    path.unlink()
    names += [name for name, _ in opened]  # open files do not change
    assert sorted(names) == ["a", "b", "c" * 500]


def test_half_bytes_need_an_even_last_dimension(directory: Path) -> None:
    path = written(directory / "f4", {"x": ("F4", [2, 3], b"abc"), "y": ("F4", [3, 2], b"abc")})
    ((_, tensor),) = load_files(path, {"y": None})
    assert list(tensor.shape) == [3, 1]
    for index in (None, 0):
        with pytest.raises(SafetensorError, match=r"'x'.*even"):
            load_files(path, {"x": index})


def test_many_small_tensors_and_a_budget_that_holds_few(directory: Path) -> None:
    wanted = {f"t{number:05}": torch.full((number % 40,), number) for number in range(3000)}
    save_file(wanted, directory / "x.safetensors")
    for budget in (400, 5000, 100_000, "1GiB"):
        found = dict(load_files(directory / "x.safetensors", memory_budget=budget))
        assert len(found) == len(wanted)
        for name, tensor in found.items():
            assert_same(tensor, wanted[name])


def test_interrupted_at_any_moment_it_goes_on(directory: Path) -> None:
    paths, wanted = make(directory)
    names = dict.fromkeys(["a001", "a002", "large", "deep", "scalar"])

    def interrupt() -> None:
        raise KeyboardInterrupt

    for number in itertools.count(1, 3):
        found = {}
        with load_files(paths, names, memory_budget="3MiB") as tensors:
            with (
                interrupts.At(number, (plans.__file__, pipeline.__file__), interrupt) as at,
                suppress(KeyboardInterrupt),
            ):
                for name, tensor in tensors:
                    found[name] = tensor
            found |= dict(tensors)
        # One may be lost, between the moment that it is given and that in which the caller has it.
        assert len(found) >= len(names) - (at.happened_in is not None), at.happened_in
        for name, tensor in found.items():
            assert_same(tensor, wanted[name])
        if at.happened_in is None:
            break
    assert number > 30


def test_a_forked_child_is_refused_and_the_parent_goes_on(directory: Path) -> None:
    paths, wanted = make(directory)
    tensors = load_files(paths)
    next(tensors)

    def work() -> None:
        with pytest.raises(RuntimeError, match="fork"):
            next(tensors)
        tensors.close()
        assert len(list(load_files(paths))) == len(wanted)

    passes_in_child(work)
    assert len(list(tensors)) == len(wanted) - 1


RULES = {"*.rows": 0, "*.columns": -1, "*.one_column": 1, "unused": 0}


@pytest.mark.parametrize("world", [1, 2, 8])
def test_ranks_read_a_tensor_parallel_model_once(directory: Path, world: int) -> None:
    """Rows and long columns are read by their ranks alone; short columns through the page cache that they share."""
    whole = {
        "1.rows": torch.randn(64, 10_000),
        "1.columns": torch.randn(4, 8 * 30_000),
        "norm": torch.randn(1000),
    }
    save_file(whole, directory / "m.safetensors")
    rules = {name: dim for name, dim in RULES.items() if name != "*.one_column"}
    read, found = 0, []
    for rank in range(world):
        plan = tensor_parallel_plan(directory, rules, rank, world)
        tensors = load_files(directory, plan)
        found.append(dict(tensors))
        read += tensors.nbytes_read
    assert torch.equal(torch.cat([one["1.rows"] for one in found]), whole["1.rows"])
    assert torch.equal(torch.cat([one["1.columns"] for one in found], 1), whole["1.columns"])
    assert all(torch.equal(one["norm"], whole["norm"]) for one in found)
    needed = sum(tensor.nbytes for one in found for tensor in one.values())
    assert read <= 1.1 * needed


def test_short_columns_are_read_from_the_drive_once_for_all_ranks(directory: Path) -> None:
    whole = torch.randn(2000, 2048)
    path = directory / "m.safetensors"
    save_file({"columns": whole, "rows": whole.clone()}, path)
    read = child.call(
        "tests.safetensors.test_plans:bytes_from_the_drive", path=path, imports=["torch"]
    ).result
    if read < path.stat().st_size // 2:
        pytest.skip("this file system does not tell what it reads")
    assert read <= 1.5 * path.stat().st_size  # each rank for itself would read half of it again


def bytes_from_the_drive(path: str) -> int:
    """Return the bytes that eight ranks read, the least of several tries: the kernel may drop pages between ranks."""
    return min(_bytes_from_the_drive(Path(path)) for _ in range(3))


def _bytes_from_the_drive(path: Path) -> int:
    make_cold(path)
    before = _drive_nbytes()
    found = []
    for rank in range(8):
        plan = tensor_parallel_plan(path, {"columns": 1, "rows": 0}, rank, 8)
        found.append(dict(load_files(path, plan)))
    after = _drive_nbytes()
    rows = torch.cat([one["rows"] for one in found])
    assert torch.equal(torch.cat([one["columns"] for one in found], 1), rows)
    return after - before


def _drive_nbytes() -> int:
    with open("/proc/self/io") as file:
        return int(dict(line.split(": ") for line in file)["read_bytes"])


def test_half_bytes_are_divided_among_ranks_without_loss(directory: Path) -> None:
    """torch packs two elements of F4 in one, and a plan's indices count torch's elements."""
    path = written(directory / "f4", {"x": ("F4", [4, 8], bytes(range(16)))})
    for dim in (0, 1):
        plans_of_ranks = [tensor_parallel_plan(path, {"x": dim}, rank, 2) for rank in range(2)]
        found = [dict(load_files(path, plan))["x"].view(torch.uint8) for plan in plans_of_ranks]
        assert torch.cat(found, dim).reshape(-1).tolist() == list(range(16))
    with safe_open(path, "pt") as file:
        part = file.get_slice("x")
        half = part.get_shape()[1] // 2
        found = [part[:, :half].view(torch.uint8), part[:, half:].view(torch.uint8)]
    assert torch.cat(found, 1).reshape(-1).tolist() == list(range(16))
    with pytest.raises(SafetensorError, match=r"'x'.*cannot be divided among 8"):
        tensor_parallel_plan(path, {"x": 1}, 0, 8)


def test_plans_of_ranks_are_checked(directory: Path) -> None:
    save_file({"x": torch.zeros(6, 5)}, directory / "m.safetensors")
    with pytest.raises(SafetensorError, match=r"'x'.*cannot be divided among 4"):
        tensor_parallel_plan(directory, {"x": 0}, 0, 4)
    with pytest.raises(SafetensorError, match=r"'x'.*no dimension 2"):
        tensor_parallel_plan(directory, {"x": 2}, 0, 2)
    with pytest.raises(ValueError, match="rank: 2"):
        tensor_parallel_plan(directory, {}, 2, 2)
    with pytest.raises(ValueError, match="not initialized"):
        tensor_parallel_plan(directory, {})
    assert plans.tensor_parallel_plan(directory, {"*": 0}, 1, 2) == {"x": (slice(3, 6),)}
