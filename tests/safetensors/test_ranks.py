"""load_files(broadcast=): each rank of a node reads a part and gets all; a failure on one rank ends all alike."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tensorferry.base.ranks import Relay
from tensorferry.safetensors import checksums, ranks
from tensorferry.safetensors.dtypes import DTYPES
from tensorferry.safetensors.errors import SafetensorError
from tensorferry.safetensors.plans import load_files
from tensorferry.serving import weights
from tensorferry.transfer.pipeline import Read
from tests.safetensors.files import written
from tests.support import child, effort
from tests.support.forks import passes_in_child
from tests.support.page_cache import make_cold
from tests.support.ranks import NOT_MET, Answer, call_on_ranks, started

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.faultfs import FaultFS

MIB = 1 << 20


def sharded(directory: Path) -> int:
    """Save a model of 90 MB in three files; return their bytes."""
    generator = torch.Generator().manual_seed(3)
    paths = [directory / f"model-{number}.safetensors" for number in range(3)]
    for number, path in enumerate(paths):
        tensors = {f"{number}.small{k}": torch.full((k * 7,), float(k)) for k in range(200)}
        tensors[f"{number}.large"] = torch.randn(5 * MIB + number, generator=generator)
        tensors[f"{number}.half"] = torch.randn(999, 1001, generator=generator).bfloat16()
        tensors[f"{number}.norm"] = torch.randn(3, generator=generator)
        save_file(tensors, path)
    return sum(path.stat().st_size for path in paths)


def equal(found: Any, wanted: Any) -> bool:
    """Whether all bytes are."""
    if isinstance(found, np.ndarray):
        return found.dtype == wanted.dtype and np.array_equal(
            found.reshape(-1).view(np.uint8), wanted.reshape(-1).view(np.uint8)
        )
    same = found.dtype == wanted.dtype and found.shape == wanted.shape
    return same and torch.equal(
        found.reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8)
    )


def loaded(files: Any, plan: Any = None, **options: Any) -> int:
    """Load, compare with a load without sharing, and return the bytes that this rank has read."""
    alone = list(load_files(files, plan, framework=options.get("framework", "pt")))
    with load_files(files, plan, **options) as tensors:
        shared = list(tensors)
    assert [name for name, _ in shared] == [name for name, _ in alone]
    assert all(equal(found, wanted) for (_, found), (_, wanted) in zip(shared, alone, strict=True))
    return tensors.nbytes_read


# --- reads, and their ranks ---


def load_in_each_way(rank: int, path: str) -> list[int]:
    ways: list[Any] = [
        {"broadcast": True},
        {"broadcast": True, "memory_budget": "21MiB", "framework": "pt"},
        {"broadcast": True, "verify": True},
        {"broadcast": False},
        {"broadcast": "auto"},
    ]
    return [loaded(path, **options) for options in ways]


@pytest.mark.parametrize("world_size", [2, 3])
def test_each_byte_of_a_sharded_model_is_read_once(directory: Path, world_size: int) -> None:
    nbytes = sharded(directory)
    checksums.write(sorted(directory.glob("*.safetensors")))
    read = call_on_ranks(world_size, load_in_each_way, str(directory))
    *shared, alone, auto = zip(*read, strict=True)
    for each in shared:
        assert 0.9 * nbytes <= sum(each) <= 1.1 * nbytes
        assert max(each) <= 1.2 * nbytes / world_size
    assert min(alone) >= 0.9 * nbytes
    assert auto == alone  # gloo, and a drive of this machine


def bytes_from_the_drive(rank: int, path: str) -> int:
    """Return the bytes that this rank reads, the least of several tries: the kernel may charge it for other reads."""
    found = []
    for _ in range(3):
        if rank == 0:
            for file in Path(path).glob("*.safetensors"):
                make_cold(file)
        dist.barrier()
        before = drive_nbytes()
        names = [name for name, _ in load_files(path, broadcast=True)]
        assert len(names) == 3 * 203
        found.append(drive_nbytes() - before)
        dist.barrier()
    return min(found)


def drive_nbytes() -> int:
    with open("/proc/self/io") as file:
        return int(dict(line.split(": ") for line in file)["read_bytes"])


def test_two_ranks_read_a_cold_model_from_the_drive_once(directory: Path) -> None:
    nbytes = sharded(directory)
    read = sum(call_on_ranks(2, bytes_from_the_drive, str(directory)))
    if read < nbytes // 2:
        pytest.skip("this file system does not tell what it reads")
    assert read <= 1.1 * nbytes


def load_by_default(rank: int, path: str) -> int:
    return loaded(path, broadcast="auto")


def test_ranks_share_where_the_drive_may_be_far_away(faultfs: FaultFS) -> None:
    nbytes = sharded(faultfs.path)
    assert sum(call_on_ranks(2, load_by_default, str(faultfs.path))) <= 1.1 * nbytes


def load_on_nodes(rank: int, path: str, nodes: str) -> int:
    ranks.node_identity = lambda: nodes[rank]
    return loaded(path, broadcast=True)


@pytest.mark.parametrize(("nodes", "times"), [("abab", 2), ("aab", 2), ("ab", 2), ("aaa", 1)])
def test_each_node_reads_for_itself(directory: Path, nodes: str, times: int) -> None:
    nbytes = sharded(directory)
    read = call_on_ranks(len(nodes), load_on_nodes, str(directory), nodes)
    assert 0.9 * times * nbytes <= sum(read) <= 1.1 * times * nbytes
    for rank, node in enumerate(nodes):
        assert read[rank] <= 1.2 * nbytes / nodes.count(node)


def load_by_some(rank: int, path: str) -> int:
    group = dist.new_group([2, 0])
    if rank != 1:
        return loaded(path, broadcast=True, process_group=group)
    with pytest.raises(ValueError, match=r"process_group: this rank does not belong"):
        load_files(path, broadcast=True, process_group=dist.GroupMember.NON_GROUP_MEMBER)
    return 0


def test_a_group_of_some_ranks_shares(directory: Path) -> None:
    nbytes = sharded(directory)
    assert sum(call_on_ranks(3, load_by_some, str(directory))) <= 1.1 * nbytes


def load_alone(rank: int, path: str) -> int:
    return loaded(path, broadcast=True)


def test_without_other_ranks_all_is_read(directory: Path) -> None:
    nbytes = sharded(directory)
    assert loaded(directory, broadcast=True) >= 0.9 * nbytes
    assert call_on_ranks(1, load_alone, str(directory))[0] >= 0.9 * nbytes


def test_loads_that_are_not_shared_do_without_torch(directory: Path) -> None:
    save_file({"x": torch.ones(3)}, directory / "x.safetensors")
    function = "tests.safetensors.programs:load_numpy"
    assert child.call(function, path=directory / "x.safetensors").result is False


# --- any model, any plan ---


def any_model(directory: Path, seed: int) -> dict[str, tuple[int, ...]]:
    """Write some files with tensors of all dtypes; return their shapes."""
    rng = random.Random(seed)
    kinds = [each for each in DTYPES.values() if each.torch and hasattr(torch, each.torch)]
    shapes: dict[str, tuple[int, ...]] = {}
    for number in range(rng.randint(1, 4)):
        entries = {}
        for k in range(rng.choice([1, 3, 60])):
            kind, name = rng.choice(kinds), f"{number}.{k}"
            shape = [rng.choice([1, 2, 3, 40, 1100]) for _ in range(rng.randint(0, 3))]
            if rng.random() < 0.1:
                shape = [rng.randint(0, 150) * 4096, rng.choice([1, 2])]
            if kind.bits == 4:
                shape = [*shape, 2]
            while (nbytes := torch.Size(shape).numel() * kind.bits // 8) > 8 * MIB:
                shape = shape[1:]
            data = rng.randbytes(nbytes)
            if kind.name == "BOOL":
                data = bytes(byte & 1 for byte in data)
            entries[name] = (kind.name, shape, data)
            shapes[name] = (*shape[:-1], shape[-1] // 2) if kind.bits == 4 else tuple(shape)
        written(directory / f"{number}.safetensors", entries)
    return shapes


def any_plan(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Any] | None:
    rng = random.Random(seed)
    if rng.random() < 0.3:
        return None
    plan: dict[str, Any] = {}
    for name, shape in shapes.items():
        if rng.random() < 0.3:
            plan[name] = None
        elif rng.random() < 0.8:
            ends = [sorted(rng.randint(0, size) for _ in range(2)) for size in shape]
            plan[name] = tuple(slice(*each, rng.choice([1, 1, 1, 3])) for each in ends)
    return plan


def load_any(rank: int, path: str, seeds: list[int], shapes: list[Any]) -> None:
    ranks._MIN_PART_NBYTES = random.Random(sum(seeds)).choice([1, 5000, 256 << 10])
    for seed, of_model in zip(seeds, shapes, strict=True):
        budget = random.Random(seed).choice(["17MiB", "40MiB", "1GiB"])
        options: dict[str, Any] = {"memory_budget": budget, "verify": seed % 2 == 0}
        plan = any_plan(of_model, seed)
        loaded(Path(path) / str(seed), plan, broadcast=True, **options)


@pytest.mark.parametrize(
    ("begin", "world_size"),
    [
        (begin, world_size)
        for begin, world_size in itertools.product(range(0, 24, 8), (2, 3))
        if effort.EVERY_COMBINATION or (begin // 8 + world_size) % 2
    ],
)
def test_any_plan_gives_what_it_gives_alone(directory: Path, begin: int, world_size: int) -> None:
    """All 24 by 2 and by 3 ranks: TENSORFERRY_TEST_EFFORT=3."""
    seeds, shapes = list(range(begin, begin + min(round(3 * effort.EFFORT) or 1, 8))), []
    for seed in seeds:
        (directory / str(seed)).mkdir()
        shapes.append(any_model(directory / str(seed), seed))
        checksums.write(sorted((directory / str(seed)).glob("*.safetensors")))
    call_on_ranks(world_size, load_any, str(directory), seeds, shapes)


def load_as_numpy(rank: int, path: str) -> int:
    plan = {"wide": (slice(None), slice(5, 9000)), "deep": (1, slice(None, None, 3)), "tiny": None}
    loaded(path, plan, framework="np", broadcast=True)
    return loaded(path, framework="np", broadcast=True)


def test_arrays_of_numpy_are_shared(directory: Path) -> None:
    tensors = {"wide": torch.randn(64, 50_000), "deep": torch.randn(5, 300, 70)}
    path = directory / "x.safetensors"
    save_file(tensors | {"tiny": torch.ones(3)}, path)
    assert sum(call_on_ranks(2, load_as_numpy, str(path))) <= 1.1 * path.stat().st_size


@pytest.mark.parametrize("seed", range(50))
def test_cuts_are_in_order_and_at_places_of_the_file(seed: int) -> None:
    rng = random.Random(seed)
    pieces, offset = [], rng.randrange(10_000)
    for _ in range(rng.randint(1, 30)):
        pieces.append((offset, bytes(rng.choice([1, 7, 5000, 100_000]))))
        offset += len(pieces[-1][1]) + rng.choice([0, 0, 3, 9000])
    count, alignment = rng.randint(1, 9), rng.choice([1, 512, 4096])
    found = ranks.cuts(pieces, count, alignment)
    total = sum(len(memory) for _, memory in pieces)
    assert (len(found), found[0], found[-1]) == (count + 1, 0, total)
    assert found == sorted(found)
    at, places = 0, {}
    for begin, memory in pieces:
        places |= {cut: begin + cut - at for cut in found if at < cut < at + len(memory)}
        at += len(memory)
    assert all(place % alignment == 0 for place in places.values())
    for number, cut in enumerate(found[:-1]):
        assert 0 <= cut - total * number // count < alignment


def peak_of_load(rank: int, path: str) -> int:
    from tensorferry.tuning.stopwatch import Stopwatch

    os.environ["TENSORFERRY_READ_AHEAD"] = "1GiB"  # only the budget limits the read-ahead
    with Stopwatch() as watch:
        for _, tensor in load_files(path, broadcast=True, memory_budget="20MiB"):
            assert not tensor[0]
    assert watch.peak_growth_nbytes is not None
    return watch.peak_growth_nbytes


def test_memory_stays_within_the_budget(directory: Path) -> None:
    tensors = {f"large{number}": torch.zeros(2 * MIB) for number in range(48)}
    tensors |= {f"small{number}": torch.zeros(16 << 10) for number in range(900)}
    save_file(tensors, directory / "x.safetensors")
    peaks = call_on_ranks(2, peak_of_load, str(directory))
    # The budget excludes the current tensor, the tensors in transit between ranks, and free memory of the C library.
    assert max(peaks) < 120 * MIB  # it is 50, and above 200 without a budget


# --- failures on one rank ---


def raised(work: Callable[[], Any]) -> str:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def go_on(path: str) -> bool:
    """Whether the same ranks load the next time."""
    return loaded(path, broadcast=True) > 0


def copies(directory: Path) -> list[str]:
    """Save a model of three files, and link it for another rank; return both places."""
    for name in ("0", "1"):
        (directory / name).mkdir()
    sharded(directory / "0")
    for path in (directory / "0").iterdir():
        (directory / "1" / path.name).hardlink_to(path)
    return [str(directory / "0"), str(directory / "1")]


def load_where_one_rank_has_less(rank: int, paths: list[str]) -> list[str]:
    found = [raised(lambda: load_files(paths[rank], broadcast=True))]
    return [*found, str(go_on(paths[0]))]


def test_a_file_that_is_cut_short_on_one_rank_is_an_error_on_all(directory: Path) -> None:
    paths = copies(directory)
    last = directory / "1" / "model-2.safetensors"
    content = last.read_bytes()
    last.unlink()
    last.write_bytes(content[: len(content) // 2])
    first, second = call_on_ranks(2, load_where_one_rank_has_less, paths)
    assert first == second
    assert first[0].startswith(f"SafetensorError: {str(last)!r}: ")
    assert first[1] == "True"


def serve_where_one_rank_has_less(rank: int, paths: list[str]) -> str:
    files = sorted(map(str, Path(paths[rank]).iterdir()))
    group = dist.group.WORLD
    return raised(lambda: list(weights.tensors(files, weights.Options(), process_group=group)))


def test_a_program_that_serves_is_told_on_all_ranks_of_a_file_that_one_has_not(
    directory: Path,
) -> None:
    paths = copies(directory)
    last = directory / "1" / "model-2.safetensors"
    last.unlink()
    last.write_bytes(b"")
    first, second = call_on_ranks(2, serve_where_one_rank_has_less, paths)
    assert first == second
    assert str(last) in first


def load_while_one_rank_finds_another_file(rank: int, paths: list[str]) -> list[Any]:
    tensors = load_files(paths[rank], broadcast=True, memory_budget="24MiB")
    last = Path(paths[1]) / "model-2.safetensors"
    if rank == 1:
        content = last.read_bytes()
        last.unlink()  # the other rank's link stays
        last.write_bytes(content)
    dist.barrier()
    names: list[str] = []
    found = raised(lambda: names.extend(name for name, _ in tensors))
    return [found, [name for name in names if name.startswith("2")], list(tensors), go_on(paths[0])]


def test_a_file_that_is_replaced_for_one_rank_meanwhile_is_an_error_on_all(directory: Path) -> None:
    first, second = call_on_ranks(2, load_while_one_rank_finds_another_file, copies(directory))
    assert first == second
    assert "1/model-2.safetensors" in first[0]
    assert first[0].startswith("SafetensorError: ")
    assert "replaced or changed" in first[0]
    assert first[1:] == [[], [], True]


def load_what_is_cut_meanwhile(rank: int, path: str) -> list[Any]:
    tensors = load_files(path, broadcast=True, memory_budget="5MiB")
    next(tensors)
    dist.barrier()
    if rank == 1:
        os.truncate(path, 4096)
    dist.barrier()
    return [raised(lambda: list(tensors)), list(tensors)]


def test_what_fails_while_it_is_read_is_an_error_on_all(directory: Path) -> None:
    path = directory / "x.safetensors"
    save_file({str(number): torch.ones(MIB) for number in range(9)}, path)
    first, second = call_on_ranks(2, load_what_is_cut_meanwhile, str(path))
    assert first == second
    assert "x.safetensors" in first[0]
    assert first[1] == []


def load_damaged(rank: int, path: str) -> list[Any]:
    names: list[str] = []
    tensors = load_files(path, broadcast=True, verify=True)
    found = raised(lambda: names.extend(name for name, _ in tensors))
    return [found, names]


@pytest.mark.parametrize("place", [0.1, 0.3, 0.6, 0.97])
def test_damage_that_one_rank_reads_is_not_handed_on(directory: Path, place: float) -> None:
    sharded(directory)
    checksums.write(sorted(directory.glob("*.safetensors")))
    path = directory / "model-1.safetensors"
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1
    path.write_bytes(content)
    first, second = call_on_ranks(2, load_damaged, str(directory))
    assert first == second
    assert first[0].startswith("ChecksumError: ")
    assert "model-1.safetensors" in first[0]
    assert not any(name.startswith("2") for name in first[1])
    undamaged = dict(load_files(directory))
    assert set(first[1]) < set(undamaged)


# --- ranks that do not go together ---


def load_other_things(rank: int, path: str) -> list[str]:
    here = Path(path)
    first, all_of_it = here / "model-0.safetensors", sorted(here.glob("*.safetensors"))
    both: list[Any] = [
        ({"plan": {"0.norm": None}}, {"plan": {"0.norm": None}, "framework": "np"}),
        ({}, {"memory_budget": "64MiB"}),
        ({}, {"verify": True}),
        ({}, {"broadcast": "auto"}),
        ({}, {"broadcast": "yes"}),
        ({"plan": {"0.norm": None}}, {"plan": {"1.norm": None}}),
        ({"plan": {"0.norm": None}}, {"plan": {"0.norm": None, "1.norm": None}}),
        ({"plan": {"0.half": slice(0, 9)}}, {"plan": {"0.half": slice(1, 10)}}),
        ({"plan": {"0.half": slice(0, 9)}}, {"plan": {"0.half": slice(0, 9, 2)}}),
        ({"plan": {"0.half": None}}, {"plan": {"nothing": None}}),
        ({"files": [first]}, {"files": all_of_it}),
        ({"files": all_of_it}, {"files": all_of_it[::-1]}),
    ]
    found = [
        raised(lambda o=options[rank]: load_files(**({"files": path, "broadcast": True} | o)))
        for options in both
    ]
    return [*found, str(go_on(path))]


def test_ranks_that_want_different_things_are_told_so(directory: Path) -> None:
    sharded(directory)
    checksums.write(sorted(directory.glob("*.safetensors")))
    first, second = call_on_ranks(2, load_other_things, str(directory))
    assert first == second
    begins = [
        "ValueError: framework: ranks differ: 'pt' on rank 0, 'np' on rank 1",
        f"ValueError: memory_budget: ranks differ: {1 << 30} on rank 0, {64 << 20} on rank 1",
        "ValueError: verify: ranks differ: False on rank 0, True on rank 1",
        "ValueError: broadcast: ranks differ: True on rank 0, 'auto' on rank 1",
        "ValueError: broadcast: 'yes' is not one of",
        *["ValueError: files, plan: ranks request different tensors: [3] of '0.norm' (F32)"],
        "ValueError: files, plan: ranks request different tensors: no more on rank 0, [3] of '1.norm'",
        *["ValueError: files, plan: ranks request different tensors: [9, 1001] of '0.half'"] * 2,
        "SafetensorError: tensor 'nothing'",
        "ValueError: files, plan: ranks request different tensors: no more on rank 0, ",
        "ValueError: files, plan: ranks request different tensors: ",
        "True",
    ]
    for found, begin in zip(first, begins, strict=True):
        assert found.startswith(begin)


def load_other_files_of_the_same_names(rank: int, paths: list[str]) -> list[str]:
    return [raised(lambda: load_files(paths[rank], broadcast=True)), str(go_on(paths[0]))]


def test_files_that_look_alike_are_not_mixed(directory: Path) -> None:
    paths = copies(directory)
    other = directory / "1" / "model-1.safetensors"
    content = other.read_bytes()
    other.unlink()
    other.write_bytes(content)
    first, second = call_on_ranks(2, load_other_files_of_the_same_names, paths)
    assert first == second
    assert first[0].startswith("ValueError: files: ranks of a node have read the headers of diff")
    assert first[1] == "True"


def stop_in_each_way(rank: int, path: str) -> list[str]:
    def closes() -> None:
        with load_files(path, broadcast=True) as tensors:
            next(tensors)

    def breaks() -> None:
        for _ in load_files(path, broadcast=True):
            break

    def drops() -> None:
        load_files(path, broadcast=True)

    def fails() -> None:
        with contextlib.suppress(ZeroDivisionError), load_files(path, broadcast=True) as tensors:
            for _ in tensors:
                raise ZeroDivisionError

    found = []
    for way in (closes, breaks, drops, fails):
        for of_whom in ([1], [0, 1]):
            work = way if rank in of_whom else lambda: list(load_files(path, broadcast=True))
            found.append(raised(work))
            gc.collect()
            found.append(str(go_on(path)))
    return found


def test_a_rank_that_stops_early_ends_the_load_of_the_others(directory: Path) -> None:
    sharded(directory)
    first, second = call_on_ranks(2, stop_in_each_way, str(directory))
    told = "RuntimeError: rank 1 ended its load early, but the other ranks need its part"
    assert first == [told, "True", "nothing", "True"] * 4
    assert second == ["nothing", "True"] * 8


def stop_behind_the_last(rank: int, path: str) -> int:
    """The ranks do not wait for a rank that has sent all its data, even if it does not take all tensors itself."""
    with load_files(path, {"0.norm": None, "0.small9": None}, broadcast=True) as tensors:
        names = [next(tensors)[0]] if rank else [name for name, _ in tensors]
    assert go_on(path)
    return len(names)


def test_a_rank_may_leave_what_has_been_handed_on(directory: Path) -> None:
    sharded(directory)
    assert call_on_ranks(2, stop_behind_the_last, str(directory)) == [2, 1]


def kill_one(rank: int, path: str) -> str:
    tensors = load_files(path, broadcast=True, memory_budget="24MiB")
    next(tensors)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return raised(lambda: list(tensors))


def test_a_rank_that_is_killed_ends_the_load_of_the_others(directory: Path) -> None:
    sharded(directory)
    with started(2, kill_one, str(directory)) as both:
        assert both[0].answers.poll(200)
        answer: Answer = both[0].answers.recv()
    if NOT_MET in str(answer.failure):
        pytest.skip("the ranks have not met")
    assert answer.result is not None, answer.failure
    assert answer.result != "nothing"


def fork_meanwhile(rank: int, path: str) -> int:
    tensors = load_files(path, broadcast=True)
    names = [next(tensors)[0]]

    def work() -> None:
        with pytest.raises(RuntimeError, match="fork"):
            next(tensors)
        tensors.close()

    passes_in_child(work)
    names += [name for name, _ in tensors]
    return len(names)


def test_a_forked_child_says_nothing_to_the_other_ranks(directory: Path) -> None:
    sharded(directory)
    assert call_on_ranks(2, fork_meanwhile, str(directory)) == [609, 609]


def interrupted(holder: Any, name: str) -> Iterator[None]:
    """Have the next call of a method end by Ctrl-C."""
    original = getattr(holder, name)

    def interrupt(*_arguments: Any, **_options: Any) -> Any:
        setattr(holder, name, original)
        raise KeyboardInterrupt

    setattr(holder, name, interrupt)
    yield
    setattr(holder, name, original)


def interrupt_each(rank: int, path: str) -> list[Any]:
    found = []
    for holder, name, whom in ((Read, "wait", [1]), (Relay, "exchange", [0, 1])):
        tensors = load_files(path, broadcast=True)
        if rank in whom:
            with (
                contextlib.contextmanager(interrupted)(holder, name),
                pytest.raises(KeyboardInterrupt),
            ):
                next(tensors)
        found.append(raised(lambda: [*tensors]))  # noqa: B023
        found.append(go_on(path))
    return found


def test_ctrl_c_while_a_rank_reads_loses_nothing_and_in_an_exchange_ends_the_load(
    directory: Path,
) -> None:
    sharded(directory)
    for found in call_on_ranks(2, interrupt_each, str(directory)):
        assert found[:2] == ["nothing", True]
        assert found[2].startswith("RuntimeError: this load was interrupted while ranks exchanged")
        assert found[3] is True


def refuse_gpus(rank: int, path: str) -> str:
    ranks.can_move = lambda *_: False
    assert loaded(path, broadcast="auto") > 0
    return raised(lambda: load_files(path, broadcast=True))


def test_a_group_that_cannot_move_the_memory_is_refused(directory: Path) -> None:
    sharded(directory)
    for found in call_on_ranks(2, refuse_gpus, str(directory)):
        assert found.startswith("ValueError: broadcast: the process group (")
        assert found.endswith("does not support memory of 'cpu'")


def test_what_broadcast_may_be(directory: Path) -> None:
    save_file({"x": torch.ones(3)}, directory / "x.safetensors")
    for wrong in ("yes", 1, None, 0):
        with pytest.raises(ValueError, match="broadcast: "):
            load_files(directory, broadcast=wrong)  # type: ignore[arg-type]
    with pytest.raises(SafetensorError, match="nothing"):
        load_files(directory, {"nothing": None}, broadcast=True)
