"""safe_open: the interface of safetensors' own, with several threads, forked children, early closes, and drops."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import os
import pathlib
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import safetensors
import tensorferry
from tensorferry import StorageError
from tensorferry.safetensors import SafetensorError, SliceError, opened, safe_open
from tensorferry.safetensors.dtypes import DTYPES
from tensorferry.safetensors.parts import PartsRead
from tensorferry.transfer import pipeline
from tests.safetensors.files import (
    assert_same,
    counting,
    descriptors_of,
    saved,
    tensor_of,
    written,
)
from tests.support import interrupts, leaks
from tests.support.faultfs import Fault, FaultFS
from tests.support.forks import held_by_another_thread, passes_in_child
from tests.support.leaks import settled
from tests.support.page_cache import make_cold, make_warm

if TYPE_CHECKING:
    from tests.support.data import RandomBytes

MIB = 1 << 20
MODES = ["cold", "warm"]


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    return {
        **{f"layers.{at}.weight": tensor_of(torch.bfloat16, 1000, 1111) for at in range(12)},
        **{f"layers.{at}.norm": tensor_of(torch.float32, 1111) for at in range(12)},
        "empty": torch.empty(0, 4),
        "step": torch.tensor(3),
        "mask": tensor_of(torch.bool, 77),
    }


@pytest.fixture
def path(directory: pathlib.Path, tensors: dict[str, torch.Tensor]) -> pathlib.Path:
    path = saved(directory / "model.safetensors", tensors, metadata={"format": "pt"})
    make_cold(path)
    return path


def test_it_says_of_the_header_what_safetensors_says(path: pathlib.Path) -> None:
    with safe_open(path, "pt") as ours, safetensors.safe_open(path, "pt") as theirs:
        assert ours.keys() == theirs.keys()
        assert ours.offset_keys() == theirs.offset_keys()
        assert ours.metadata() == theirs.metadata() == {"format": "pt"}
        for name in ours.keys():  # noqa: SIM118
            weights, same = ours.get_slice(name), theirs.get_slice(name)
            assert weights.get_shape() == same.get_shape()
            assert weights.get_dtype() == same.get_dtype() == ours.get_tensor_meta(name).dtype
    header = int.from_bytes(path.read_bytes()[:8], "little") + 8
    begin, end = ours_meta(path, "step").data_offsets
    assert path.read_bytes()[header + begin : header + end] == (3).to_bytes(8, "little")


def ours_meta(path: pathlib.Path, name: str) -> Any:
    with safe_open(path, "np") as file:
        return file.get_tensor_meta(name)


def test_without_metadata_there_is_none(directory: pathlib.Path) -> None:
    with safe_open(saved(directory / "m", {"a": torch.zeros(1)}), "pt") as file:
        assert file.metadata() is None


@pytest.mark.parametrize("framework", ["pt", "torch", "pytorch", "np", "numpy"])
@pytest.mark.parametrize("direct", ["auto", "always", "never"])
@pytest.mark.parametrize("state", MODES)
def test_tensors_one_by_one_and_all(
    path: pathlib.Path, tensors: dict[str, torch.Tensor], framework: str, direct: str, state: str
) -> None:
    numpy = framework.startswith("n")
    if numpy:
        tensors = {k: v for k, v in tensors.items() if v.dtype != torch.bfloat16}
        path = saved(path.with_name("numpy"), tensors)
    (make_warm if state == "warm" else make_cold)(path)
    with safe_open(path, framework, direct=direct) as file:
        one_by_one = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        together = file.get_tensors()
        assert list(together) == file.offset_keys()
        prefetched = dict(file.prefetch())
    for name, expected in tensors.items():
        for found in (one_by_one[name], together[name], prefetched[name]):
            assert isinstance(found, np.ndarray if numpy else torch.Tensor)
            assert_same(torch.from_numpy(found) if numpy else found, expected)
            if found.size if numpy else found.numel():
                found[...] = (
                    0  # does not change other callers' tensors, except maps of the same handle
                )
    with safetensors.safe_open(path, "pt") as file:
        for name, expected in tensors.items():
            assert_same(file.get_tensor(name), expected)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("pad", [0, 1, 5])
@pytest.mark.parametrize("state", MODES)
def test_every_dtype_wherever_it_lies(
    directory: pathlib.Path, random_bytes: RandomBytes, name: str, pad: int, state: str
) -> None:
    """In the format tensors may begin at any offset; loaded tensors are aligned as torch requires."""
    dtype = DTYPES[name]
    content = random_bytes(96).tobytes() if name != "BOOL" else bytes([1, 0, 1] * 32)
    shape = [4, 96 * 8 // dtype.bits // 4]
    path = written(directory / "odd", {"x": ("U8", [3], b"abc"), "y": (name, shape, content)}, pad)
    (make_warm if state == "warm" else make_cold)(path)
    with safe_open(path, "np") as file:
        if dtype.numpy is None:
            with pytest.raises(SafetensorError, match=name):
                file.get_tensor("y")
        else:
            array = file.get_tensor("y")
            assert array.tobytes() == content
            assert array.flags.aligned
            assert list(array.shape) == shape
    with safe_open(path, "pt") as file:
        of_torch = [4, shape[1] // (2 if dtype.bits == 4 else 1)]
        assert file.get_slice("y").get_shape() == of_torch  # what an index applies to
        if dtype.torch is None:
            for ask in (file.get_tensor, file.prefetch, lambda _: file.get_tensors()):
                with pytest.raises(SafetensorError, match=name):
                    ask({"y": None} if ask == file.prefetch else "y")
            return
        for tensor in (file.get_tensor("y"), file.get_tensors()["y"], file.prefetch().take("y")):
            assert tensor.dtype == getattr(torch, dtype.torch)
            assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == content
            assert tensor.data_ptr() % tensor.element_size() == 0
            assert list(tensor.shape) == of_torch
        last = file.get_slice("y")[-1, 1:]
        assert last.view(torch.uint8).numpy().tobytes() == content[72 + last.element_size() :]


def test_half_bytes_need_an_even_last_dimension(directory: pathlib.Path) -> None:
    path = written(directory / "f4", {"x": ("F4", [2, 3], b"abc")})
    with safe_open(path, "pt") as file, pytest.raises(SafetensorError, match="even"):
        file.get_tensor("x")


def test_misuse_is_refused_with_what_is_wrong(path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError) as missing:
        safe_open("nosuchfile", "pt")
    assert str(missing.value) == "No such file or directory: nosuchfile"
    with pytest.raises(OSError, match="directory"):
        safe_open(path.parent, "pt")
    for framework in ("jax", "tf", "nope", None):
        with pytest.raises(SafetensorError, match="framework"):
            safe_open(path, framework)  # type: ignore[arg-type]
    with pytest.raises(SafetensorError, match="Device cuda:0 is not supported"):
        safe_open(path, "np", "cuda:0")
    for device in ("nope", -1, 1.5, True):
        with pytest.raises(SafetensorError, match="device"):
            safe_open(path, "pt", device)
    with pytest.raises(SafetensorError, match="backend 'nope' is invalid"):
        safe_open(path, "pt", backend="nope")
    with pytest.raises(ValueError, match="direct: 'nope'"):
        safe_open(path, "pt", direct="nope")
    with pytest.raises(TypeError, match="filename"):
        safe_open(3, "pt")  # type: ignore[arg-type]
    with safe_open(path, "pt") as file:
        for ask in (file.get_tensor, file.get_slice, file.get_tensor_meta):
            with pytest.raises(SafetensorError, match="File does not contain tensor zz"):
                ask("zz")


def test_after_its_end_it_is_closed_and_slices_go_on(
    path: pathlib.Path, tensors: dict[str, torch.Tensor]
) -> None:
    with safe_open(path, "pt") as file:
        weights = file.get_slice("layers.3.weight")
        loader = file.prefetch({"layers.4.weight": None})
        kept = file.get_tensor("step")
    asks = [file.keys, file.offset_keys, file.metadata, file.get_tensors, file.prefetch]
    for ask in [*asks, lambda: file.get_tensor("step"), lambda: file.get_slice("step")]:
        with pytest.raises(SafetensorError, match="File is closed"):
            ask()
    with pytest.raises(SafetensorError), file:
        pass
    assert_same(weights[5:7], tensors["layers.3.weight"][5:7])
    assert_same(loader.take("layers.4.weight"), tensors["layers.4.weight"])
    assert_same(kept, tensors["step"])


@pytest.mark.parametrize("state", MODES)
def test_no_descriptor_is_left_behind(path: pathlib.Path, state: str) -> None:
    (make_warm if state == "warm" else make_cold)(path)
    for _ in range(3):
        with safe_open(path, "pt") as file:
            file.get_tensors()
        dropped = safe_open(path, "pt")
        kept = dropped.get_tensor("layers.1.weight")
        part = dropped.get_slice("layers.2.weight")[:, :4]
        loader = dropped.prefetch()
        loader.take("layers.5.weight")
        loader.close()
    del dropped, loader, file
    assert settled(lambda: descriptors_of(path) == 0)
    assert kept.numel() > part.numel() > 0


@pytest.mark.parametrize("direct", ["auto", "always", "never"])
def test_threads_share_one(
    path: pathlib.Path, tensors: dict[str, torch.Tensor], direct: str
) -> None:
    """As transformers: slices and tensors by four threads."""
    with safe_open(path, "pt", direct=direct) as file, ThreadPoolExecutor(4) as pool:

        def load(at: int) -> None:
            name = list(tensors)[at % len(tensors)]
            if at % 3 and tensors[name].dim():
                assert_same(file.get_slice(name)[..., 1:], tensors[name][..., 1:])
            else:
                assert_same(file.get_tensor(name), tensors[name])

        list(pool.map(load, range(120)))


def test_closed_by_another_thread(path: pathlib.Path, tensors: dict[str, torch.Tensor]) -> None:
    for _ in range(5):
        file = safe_open(path, "pt", direct="always")
        begun = threading.Barrier(3)

        def load(file: Any = file, begun: Any = begun) -> str:
            begun.wait()
            try:
                while True:
                    assert_same(file.get_tensor("layers.7.weight"), tensors["layers.7.weight"])
            except SafetensorError as error:
                return str(error)

        with ThreadPoolExecutor(2) as pool:
            ended = [pool.submit(load) for _ in range(2)]
            begun.wait()
            file.__exit__(None, None, None)
            assert {each.result() for each in ended} == {"File is closed"}


@pytest.mark.parametrize("state", MODES)
def test_a_forked_child_goes_on_with_the_same_file(
    path: pathlib.Path, tensors: dict[str, torch.Tensor], state: str
) -> None:
    """As a data loader's workers do; whatever has the name by then."""
    (make_warm if state == "warm" else make_cold)(path)
    file = safe_open(path, "pt")
    weights = file.get_slice("layers.2.weight")
    assert_same(file.get_tensor("layers.1.weight"), tensors["layers.1.weight"])
    saved(path.with_name("other"), {"other": torch.ones(5)}).replace(path)

    def child() -> None:
        torch.set_num_threads(1)  # threads of torch's pool do not exist in the child
        assert_same(file.get_tensor("layers.5.weight"), tensors["layers.5.weight"])
        assert_same(weights[3:], tensors["layers.2.weight"][3:])
        assert_same(dict(file.prefetch())["step"], tensors["step"])

    passes_in_child(child)
    assert_same(file.get_tensor("layers.6.weight"), tensors["layers.6.weight"])


def test_a_file_cut_short_later_is_an_error_not_a_signal(path: pathlib.Path) -> None:
    with safe_open(path, "pt") as file:
        os.truncate(path, path.stat().st_size // 3)
        make_warm(path)
        last = file.offset_keys()[-10]
        for ask in (lambda: file.get_tensor(last), file.get_tensors):
            with pytest.raises((SafetensorError, StorageError)):
                ask()
        with pytest.raises((SafetensorError, StorageError)):
            dict(file.prefetch())


# Reading ahead


@pytest.fixture
def many(directory: pathlib.Path) -> tuple[pathlib.Path, dict[str, torch.Tensor]]:
    """Tensors of a megabyte, and smaller and larger ones, and their cold file."""
    sizes = [1 << 20, 700, 300_000, 5 << 20, 1 << 20, 4096, 0, 200_000] * 6
    tensors = {
        f"t{at:02}": torch.randint(0, 256, (size,), dtype=torch.uint8)
        for at, size in enumerate(sizes)
    }
    path = saved(directory / "many", tensors)
    make_cold(path)
    return path, tensors


@pytest.mark.parametrize("seed", range(3))
def test_in_whatever_order_tensors_are_asked_for_they_are_the_files(
    many: tuple[pathlib.Path, dict[str, torch.Tensor]], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests in file order, backward and forward jumps, repeated requests, and writes to loaded tensors."""
    monkeypatch.setenv("TENSORFERRY_READ_AHEAD", "3MiB")
    path, tensors = many
    order = random.Random(seed)
    with safe_open(path, "pt") as file:
        names = file.offset_keys()
        at = 0
        for _ in range(15):
            for _ in range(order.choice([1, 2, 9])):
                found = file.get_tensor(names[at % len(names)])
                assert_same(found, tensors[names[at % len(names)]])
                found.fill_(7)  # does not change other tensors
                at += order.choice([1, 1, 1, 2])
            at = order.choice([at - 3, order.randrange(len(names)), at])
            make_cold(path)


def test_neighbours_are_read_ahead_and_only_they(
    many: tuple[pathlib.Path, dict[str, torch.Tensor]],
) -> None:
    path, tensors = many
    total = sum(tensor.nbytes for tensor in tensors.values())
    with safe_open(path, "pt") as file:
        names = [name for name in file.offset_keys() if tensors[name].nbytes]
        with counting(path) as read:  # single requests: no other tensor is read
            for name in names[::-2]:
                file.get_tensor(name)
        wanted = sum(tensors[name].nbytes for name in names[::-2])
        assert wanted <= read.nbytes <= wanted + (128 << 10)
        before = read_calls(file)
        for name in names[:6]:
            file.get_tensor(name)
        assert read_calls(file) > before  # later tensors have been read ahead, or are being read
        with counting(path) as read:
            for name in names[6:]:
                file.get_tensor(name)
        assert read.nbytes < total  # no tensor is read twice
    assert read_calls(file) == 0


def read_calls(file: Any) -> int:
    """Return how many tensors a handle has read ahead, or is reading ahead."""
    ahead = file._held and file._held._ahead
    held = ahead.pipeline.held if ahead else ()
    return sum(not part.is_given for read in held for part in read.parts)


def test_what_is_read_ahead_is_bounded_and_goes_with_the_handle(directory: pathlib.Path) -> None:
    tensors = {f"t{at}": torch.ones(8 << 20, dtype=torch.uint8) for at in range(20)}
    path = saved(directory / "model", tensors)
    make_cold(path)
    files = [safe_open(path, "pt"), safe_open(path, "pt")]
    for file in files:
        names = file.offset_keys()
        for at in range(8):
            file.get_tensor(names[at])
            assert read_calls(file) * (8 << 20) <= 64 << 20
        assert (
            read_calls(file) == 7
        )  # eight, and the beginnings of their first pages, are more than 64 MiB
    descriptors = descriptors_of(path)
    files.pop().__exit__(None, None, None)
    assert descriptors_of(path) == descriptors // 2
    files.clear()
    del file
    assert settled(lambda: descriptors_of(path) == 0)  # after the end of the reads in flight


def test_a_tensor_that_is_larger_than_the_bound_is_not_read_ahead(
    many: tuple[pathlib.Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORFERRY_READ_AHEAD", "1")
    path, tensors = many
    with safe_open(path, "pt", direct="always") as file:
        for name in file.offset_keys():
            assert_same(file.get_tensor(name), tensors[name])
            assert read_calls(file) == 0


@pytest.mark.parametrize("step", [1, 3])
def test_nothing_is_kept_of_a_tensor_that_the_caller_drops(
    directory: pathlib.Path, step: int
) -> None:
    """Whether it was read ahead, or asked for out of order."""
    tensors = {f"t{at}": np.full(96 * MIB, at, np.uint8) for at in range(7)}
    path = saved(directory / "model", {name: torch.from_numpy(t) for name, t in tensors.items()})
    del tensors
    make_cold(path)
    with safe_open(path, "np", direct="always") as file:
        file.get_tensor("t0")
        with leaks.nothing_leaks(resident_slack_nbytes=80 * MIB):
            for at in range(step, 7, step):
                file.get_tensor(f"t{at}")


def test_the_end_waits_for_what_is_read_ahead(
    faultfs: FaultFS, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Afterwards file and memory are free."""
    tensors = {f"t{at}": torch.full((4 << 20,), at, dtype=torch.uint8) for at in range(6)}
    path = saved(faultfs.path / "model", tensors)
    make_cold(path)
    file = safe_open(path, "pt", direct="always")
    file.get_tensor("t0")
    begin = path.stat().st_size - (24 << 20)
    faultfs.order(Fault("read", start=begin + (9 << 20), hold=True))
    file.get_tensor("t1")
    faultfs.await_held()
    futures = [each for read in file._held._ahead.pipeline.held for each in read.futures]  # type: ignore[union-attr]
    cancel = pipeline.Read.cancel

    def released_when_waited_for(self: pipeline.Read, *, wait: bool = False) -> None:
        if wait:
            faultfs.release()
        cancel(self, wait=wait)

    monkeypatch.setattr(pipeline.Read, "cancel", released_when_waited_for)
    file.__exit__()
    assert futures
    assert all(future.done() for future in futures)
    del futures
    assert descriptors_of(path) == 0


@pytest.mark.parametrize("direct", ["auto", "always", "never"])
@pytest.mark.parametrize("state", MODES)
def test_a_file_that_is_changed_in_place_is_refused(
    directory: pathlib.Path, direct: str, state: str
) -> None:
    """Its tensors may be at other places than the header said, or of another version than those given before."""
    tensors = {f"t{at}": torch.ones(1 << 20, dtype=torch.uint8) for at in range(8)}
    path = saved(directory / "model", tensors)
    (make_warm if state == "warm" else make_cold)(path)
    with safe_open(path, "pt", direct=direct) as file:
        names = file.offset_keys()
        for name in names[:3]:
            assert_same(file.get_tensor(name), tensors[name])
        weights, loader = file.get_slice(names[7]), file.prefetch({names[6]: None, names[7]: None})
        begin = path.stat().st_size - sum(tensor.nbytes for tensor in tensors.values())
        tensorferry.write(path, torch.full((8 << 20,), 7, dtype=torch.uint8), begin)
        asks: list[Any] = [lambda: file.get_tensor(names[0]), lambda: weights[3:], file.get_tensors]
        for ask in [*asks, lambda: weights[...]]:
            with pytest.raises(SafetensorError, match="replaced or changed"):
                ask()
        # What was read before the change may be given.
        given: dict[str, torch.Tensor] = {}
        with contextlib.suppress(SafetensorError):
            given |= {name: loader.take(name) for name in names[6:]}
        assert all(tensor.unique().tolist() == [1] for tensor in given.values())
    with safe_open(path, "pt", direct=direct) as file:
        assert file.get_tensor("t0").unique().tolist() == [7]


def test_a_fault_ahead_is_that_of_its_tensor_and_can_be_tried_again(faultfs: FaultFS) -> None:
    tensors = {f"t{at}": torch.full((4 << 20,), at, dtype=torch.uint8) for at in range(8)}
    path = saved(faultfs.path / "model", tensors)
    make_cold(path)
    with safe_open(path, "pt", direct="always") as file:
        names = file.offset_keys()
        begin = file.get_tensor_meta(names[3]).data_offsets[0]
        fault = Fault("read", start=begin + MIB, end=begin + MIB + 1, error=errno.EIO)
        faultfs.order(fault)
        for name in names[:3]:
            assert_same(file.get_tensor(name), tensors[name])
        with pytest.raises(StorageError, match="model"):
            file.get_tensor(names[3])
        faultfs.clear()
        for name in names[3:]:
            assert_same(file.get_tensor(name), tensors[name])


def test_a_forked_child_has_nothing_that_its_parent_reads_ahead(
    many: tuple[pathlib.Path, dict[str, torch.Tensor]],
) -> None:
    path, tensors = many
    file = safe_open(path, "pt")
    names = [name for name in file.offset_keys() if tensors[name].nbytes]
    for name in names[:4]:
        file.get_tensor(name)
    assert read_calls(file) > 0

    def child() -> None:
        torch.set_num_threads(1)
        for name in names[4:]:
            assert_same(file.get_tensor(name), tensors[name])

    passes_in_child(child)
    for name in names[4:]:
        assert_same(file.get_tensor(name), tensors[name])


def test_threads_take_neighbours_from_one_handle(
    many: tuple[pathlib.Path, dict[str, torch.Tensor]],
) -> None:
    path, tensors = many
    for _ in range(3):
        make_cold(path)
        with safe_open(path, "pt") as file, ThreadPoolExecutor(4) as pool:
            for name, found in zip(tensors, pool.map(file.get_tensor, list(tensors)), strict=True):
                assert_same(found, tensors[name])


# Prefetching


@pytest.mark.parametrize("state", MODES)
@pytest.mark.parametrize("framework", ["pt", "np"])
def test_a_plan_is_loaded_and_nothing_else(
    path: pathlib.Path, tensors: dict[str, torch.Tensor], state: str, framework: str
) -> None:
    (make_warm if state == "warm" else make_cold)(path)
    plan: dict[str, Any] = {
        "layers.3.norm": slice(5, 100),
        "layers.9.norm": slice(None),
        "layers.0.norm": None,
        "layers.1.norm": (slice(None, None, 9),),
        "mask": slice(2, 2),
    }
    with safe_open(path, framework) as file, file.prefetch(plan, threads=2) as loader:
        assert len(loader) == 5
        assert sorted(loader.names()) == sorted(plan)
        order = {name: at for at, name in enumerate(file.offset_keys())}
        assert loader.names() == sorted(plan, key=order.__getitem__)
        taken = loader.take("layers.1.norm")
        found = {"layers.1.norm": taken, **dict(loader)}
        assert list(loader) == []
    assert sorted(found) == sorted(plan)
    for name, index in plan.items():
        expected = tensors[name] if index is None else tensors[name][index]
        array = found[name]
        assert_same(torch.from_numpy(array) if framework == "np" else array, expected)


def test_each_tensor_is_handed_out_once(path: pathlib.Path) -> None:
    with safe_open(path, "pt") as file:
        loader = file.prefetch({"step": None, "mask": None})
        loader.take("step")
        with pytest.raises(SafetensorError, match="already delivered"):
            loader.take("step")
        with pytest.raises(SafetensorError, match="not in the prefetch plan"):
            loader.take("empty")
        loader.close()
        for ask in (lambda: loader.take("mask"), lambda: list(loader)):
            with pytest.raises(SafetensorError, match="prefetch loader closed"):
                ask()
        loader.close()


def test_a_read_that_could_not_begin_is_begun_again(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many files were open, for example."""
    tensors = {name: torch.full((3,), number) for number, name in enumerate("ab")}

    def refuses(*_: Any) -> Any:
        raise StorageError(errno.EMFILE, os.strerror(errno.EMFILE))

    with safe_open(saved(directory / "two", tensors), "pt", direct="always") as file:
        with monkeypatch.context() as patch:
            patch.setattr(PartsRead, "begin", refuses)
            loader = file.prefetch()
            with pytest.raises(StorageError, match="Too many open files"):
                loader.take("a")
        for name, tensor in loader:
            assert_same(tensor, tensors.pop(name))
    assert not tensors


def test_a_signal_handler_takes_another_tensor_of_the_same_read(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {name: torch.full((3,), number) for number, name in enumerate("abc")}
    wait, handled = PartsRead.wait, []

    def interrupted(read: PartsRead) -> None:
        if not handled:
            handled.append("b")
            handled.append(loader.take("b"))
        wait(read)

    monkeypatch.setattr(PartsRead, "wait", interrupted)
    with safe_open(saved(directory / "three", tensors), "pt", direct="always") as file:
        loader = file.prefetch()
        found: dict[str, Any] = {}
        taking = threading.Thread(target=lambda: found.update(a=loader.take("a")), daemon=True)
        taking.start()
        taking.join(60)
        assert found.keys() == {"a"}
        found |= {"b": handled[1], **dict(loader)}
    assert found.keys() == tensors.keys()
    for name, tensor in found.items():
        assert_same(tensor, tensors[name])


def test_plans_that_cannot_be_are_refused_before_anything_is_read(path: pathlib.Path) -> None:
    with safe_open(path, "pt") as file:
        with pytest.raises(SafetensorError, match="File does not contain tensor zz"):
            file.prefetch({"step": None, "zz": None})
        with pytest.raises(SafetensorError, match="no tensors"):
            file.prefetch({})
        with pytest.raises(SliceError):
            file.prefetch({"step": slice(0, 1)})
        with pytest.raises(SafetensorError, match="is not a tensor"):
            file.prefetch({3: None})  # type: ignore[dict-item]
        with pytest.raises(ValueError, match="threads"):
            file.prefetch(threads=0)


def test_more_than_is_loaded_at_a_time(directory: pathlib.Path) -> None:
    tensors = {f"{at:02}": tensor_of(torch.uint8, (33 << 20) + at) for at in range(11)}
    path = saved(directory / "large", tensors)
    make_cold(path)
    with safe_open(path, "pt") as file:
        loader = file.prefetch()
        assert_same(loader.take("09"), tensors["09"])
        for name, tensor in loader:
            assert_same(tensor, tensors[name])


def test_threads_that_take_get_each_tensor_once(
    path: pathlib.Path, tensors: dict[str, torch.Tensor]
) -> None:
    with safe_open(path, "pt") as file:
        loader = file.prefetch()
        with ThreadPoolExecutor(4) as pool:
            found = [pool.submit(list, loader) for _ in range(4)]
        pairs = [pair for each in found for pair in each.result()]
    assert sorted(name for name, _ in pairs) == sorted(tensors)
    for name, tensor in pairs:
        assert_same(tensor, tensors[name])


def test_who_drops_a_loader_wants_no_more(faultfs: FaultFS) -> None:
    """The reads in flight are cancelled, and no other one begins."""
    tensors = {f"{at:02}": tensor_of(torch.uint8, (33 << 20) + at) for at in range(6)}
    path = saved(faultfs.path / "large", tensors)
    with counting(path) as read, safe_open(path, "pt", direct="always") as file:
        faultfs.order(Fault("read", hold=True))  # no read ends before the loader is dropped
        loader = file.prefetch()
        begun = loader.pipeline.held
        assert 2 <= len(begun) < 6
        del loader
        gc.collect()
        faultfs.release()
        for read in begun:
            read.cancel(wait=True)
        done = threading.Event()
        with tensorferry.open(path) as other:
            # One thread runs the callbacks, one after the other.
            future = other.read_into(bytearray(MIB), 0)
            future.add_done_callback(lambda _: done.set())
            assert done.wait(120)
            assert settled(lambda: not other._scheduler.outstanding())
    assert read.nbytes < 5 * (33 << 20)


def test_a_loader_that_is_closed_under_who_takes_says_so(path: pathlib.Path) -> None:
    with safe_open(path, "pt", direct="always") as file:
        loader = file.prefetch({name: None for name in file.keys() if "weight" in name})  # noqa: SIM118
        job = loader.pipeline.held[-1]
        name, wait = job.parts[0].name, job.wait

        def closed_meanwhile() -> None:
            loader.close()
            wait()

        job.wait = closed_meanwhile  # type: ignore[method-assign]
        with pytest.raises(SafetensorError, match="prefetch loader closed"):
            loader.take(name)


def test_a_forked_child_has_no_loaders_of_its_parents(path: pathlib.Path) -> None:
    """Also if another thread was in a call at that time."""
    with safe_open(path, "pt") as file:
        loader = file.prefetch()

        def child() -> None:
            for ask in (lambda: loader.take("step"), lambda: next(iter(loader))):
                with pytest.raises(RuntimeError, match="fork"):
                    ask()
            loader.close()

        with held_by_another_thread(loader.pipeline.lock):
            passes_in_child(child)
        assert loader.take("step") == 3


@pytest.mark.parametrize("wanted", [slice(3, 700), slice(None, None, 7), None], ids=str)
def test_a_tensor_whose_taking_is_interrupted_can_be_taken_again(
    path: pathlib.Path, tensors: dict[str, torch.Tensor], wanted: slice | None
) -> None:
    """Its bytes are right: dropped arrays have returned their pages."""
    name = "layers.1.weight"
    expected = tensors[name] if wanted is None else tensors[name][wanted]
    source = str(pathlib.Path(opened.__file__).parent), pipeline.__file__

    def interrupt() -> None:
        raise KeyboardInterrupt

    plan = {"step": None, name: wanted, "layers.2.weight": None, "mask": None}
    with safe_open(path, "pt") as file:
        for number in itertools.count(1):
            loader = file.prefetch(plan)
            with (
                interrupts.At(number, source, interrupt) as at,
                contextlib.suppress(KeyboardInterrupt),
            ):
                loader.take(name)
            # Otherwise the tensor is lost between the return of the call and the assignment.
            if at.happened_in is not None and loader.has(name):
                assert_same(loader.take(name), expected)
            others = dict(loader)
            assert_same(others["mask"], tensors["mask"])
            assert_same(others["layers.2.weight"], tensors["layers.2.weight"])
            if at.happened_in is None:
                break
        assert number > 10
