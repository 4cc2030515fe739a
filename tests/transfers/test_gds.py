"""gds_handle: its arguments, refusals, modes and pins. tests/gpu tests its transfers."""

from __future__ import annotations

import gc
import inspect
import weakref
from typing import TYPE_CHECKING, Any

import pytest

import tensorferry
from tensorferry.deepnvme import gds
from tensorferry.deepnvme.gds import gds_handle
from tensorferry.transfer.runtime import make_scheduler
from tensorferry.transfer.settings import Settings
from tests.support.optional import torch
from tests.support.pretended import ADDRESS, GPU, CudaArray, pretend_driver, pretend_no_driver

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable

    Cufile = Callable[..., None]


@pytest.fixture
def cufile(monkeypatch: pytest.MonkeyPatch) -> Cufile:
    """Return a function that sets the result of opening cuFile; a pretended driver is available."""
    pretend_driver(monkeypatch)
    monkeypatch.delenv("TENSORFERRY_GDS", raising=False)

    def finds(refusal: str | None = None, *, native: bool = False, detail: str = "") -> None:
        monkeypatch.setattr(gds._core, "open_cufile", lambda *_: (refusal, native, detail))

    return finds


@pytest.fixture
def compatible(cufile: Cufile) -> None:
    cufile(detail="no nvidia-fs")


def array_at(begin: int, nbytes: int) -> CudaArray:
    return CudaArray(data=(ADDRESS + begin, False), shape=(nbytes,), typestr="|u1")


def test_signatures_are_those_of_deepnvme() -> None:
    def names(method: str) -> list[str]:
        return list(inspect.signature(getattr(gds_handle, method)).parameters)[1:]

    assert names("__init__") == [
        "block_size",
        "queue_depth",
        "single_submit",
        "overlap_events",
        "intra_op_parallelism",
        "num_threads",
    ]
    assert names("new_pinned_device_tensor") == ["num_elem", "example_tensor", "example_tenosr"]
    for method in ("free_pinned_device_tensor", "pin_device_tensor", "unpin_device_tensor"):
        assert names(method) == ["tensor"]


def test_without_cufile_the_refusal_says_what_moves_gpu_memory(cufile: Cufile) -> None:
    cufile("no libcufile; remedy: pip install nvidia-cufile")
    with pytest.raises(tensorferry.EngineUnavailableError, match="pip install nvidia-cufile") as it:
        gds_handle()
    assert "aio_handle supports CUDA tensors without it" in str(it.value)


def test_without_a_driver_the_refusal_says_so(
    cufile: Cufile, monkeypatch: pytest.MonkeyPatch
) -> None:
    cufile("no driver")
    pretend_no_driver(monkeypatch)
    with pytest.raises(tensorferry.EngineUnavailableError, match="no driver") as caught:
        gds_handle()
    assert "aio_handle supports host memory" in str(caught.value)


def test_settings_out_of_range_are_refused_before_cufile_is_opened() -> None:
    with pytest.raises(ValueError, match="queue_depth"):
        gds_handle(queue_depth=0)
    with pytest.raises(ValueError, match="num_threads"):
        gds_handle(intra_op_parallelism=2, num_threads=3)


@pytest.mark.usefixtures("compatible")
def test_where_cufile_would_copy_through_host_memory_we_do_and_say_so(
    directory: pathlib.Path,
) -> None:
    with gds_handle(4096, 8, False, True, 2) as handle, tensorferry.aio_handle(4096) as plain:
        assert handle.engine == f"{plain.engine} (compat)"
        assert handle.engine_refusals == plain.engine_refusals | {"cufile": "no nvidia-fs"}
        assert handle.get_intra_op_parallelism() == 2
        source = torch.arange(100_003, dtype=torch.int16)
        assert handle.sync_pwrite(source, directory / "file") == 1
        found = torch.zeros_like(source)
        assert handle.pread(found, directory / "file", True, False) == 1
        assert torch.equal(found, source)
        stats = handle.stats()
        assert stats["compat"] is True
        assert stats["engine"] == handle.engine
        assert stats["written_nbytes"] == source.nbytes
        assert (stats["gpu_nbytes"], stats["gds_nbytes"]) == (0, 0)
    with pytest.raises(ValueError, match="closed"):
        handle.sync_pwrite(source, directory / "file")


@pytest.mark.parametrize(
    ("native", "variable", "engine", "compat"),
    [
        (True, "", "cufile", False),
        (True, "cufile", "cufile", False),
        (False, "cufile", "cufile", True),
        (False, "", None, True),
    ],
)
def test_cufile_moves_gpu_memory_where_it_bypasses_host_memory_or_is_forced_to(
    cufile: Cufile,
    monkeypatch: pytest.MonkeyPatch,
    native: bool,
    variable: str,
    engine: str | None,
    compat: bool,
) -> None:
    started = []

    def start_scheduler(engine: str, settings: Settings) -> Any:
        started.append((engine, settings))
        return make_scheduler(settings._replace(engine="threads"))

    monkeypatch.setattr(gds, "start_scheduler", start_scheduler)
    cufile(native=native, detail="nvidia-fs or not")
    monkeypatch.setenv("TENSORFERRY_GDS", variable)
    with gds_handle(4096, 8, False, True, 2) as handle:
        assert started == (
            [] if engine is None else [("cufile", Settings(4096, 8, False, True, 2))]
        )
        assert handle.engine.endswith("(compat)") == compat
        assert handle.stats()["compat"] == compat
        assert handle.engine_refusals.get("cufile") == ("nvidia-fs or not" if compat else None)


@pytest.mark.usefixtures("compatible")
def test_the_variable_has_one_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORFERRY_GDS", "yes")
    with pytest.raises(ValueError, match="TENSORFERRY_GDS: 'yes'"):
        gds_handle()


@pytest.mark.usefixtures("compatible")
def test_pins_are_known_to_all_handles_and_end_with_the_one_that_made_them() -> None:
    whole, middle, apart = array_at(0, 100), array_at(50, 10), array_at(100, 10)
    with gds_handle() as other:
        with gds_handle() as handle:
            assert not handle.is_pinned(whole)
            assert handle.pin_device_tensor(whole) is True
            assert other.is_pinned(whole)
            assert other.is_pinned(middle)
            assert not other.is_pinned(apart)
            assert not other.is_pinned(array_at(95, 10))
            assert not other.unpin_device_tensor(middle)
            for again in (whole, middle, array_at(99, 2)):
                with pytest.raises(ValueError, match=r"tensor: .*pinned already"):
                    other.pin_device_tensor(again)
            assert other.pin_device_tensor(apart)
            assert other.unpin_device_tensor(array_at(0, 7))  # begins at the same address
            assert not handle.unpin_device_tensor(whole)
            assert handle.pin_device_tensor(whole)
        assert not other.is_pinned(whole)
        assert other.is_pinned(apart)
        assert other.free_pinned_device_tensor(apart)
        assert not other.free_pinned_device_tensor(apart)
    assert gds._pins == {}


@pytest.mark.usefixtures("compatible")
def test_pinned_memory_is_kept_until_it_is_unpinned() -> None:
    with gds_handle() as handle:
        array = array_at(0, 100)
        gone = weakref.ref(array)
        handle.pin_device_tensor(array)
        del array
        gc.collect()
        assert gone() is not None
        assert handle.unpin_device_tensor(array_at(0, 100))
        assert gone() is None


@pytest.mark.usefixtures("compatible")
def test_only_gpu_memory_can_be_pinned() -> None:
    with gds_handle() as handle:
        with pytest.raises(ValueError, match="tensor: expected GPU memory, got host memory"):
            handle.pin_device_tensor(torch.zeros(3))
        with pytest.raises(ValueError, match="tensor: an empty tensor cannot be pinned"):
            handle.pin_device_tensor(array_at(0, 0))
        with pytest.raises(TypeError, match="tensor"):
            handle.pin_device_tensor([1, 2])
        assert not handle.unpin_device_tensor(torch.zeros(3))
        locked = handle.new_cpu_locked_tensor(10, torch.zeros(1))
        assert handle.is_pinned(locked) == tensorferry.aio_handle().is_pinned(locked)
        assert handle.free_cpu_locked_tensor(locked)
    with pytest.raises(ValueError, match="closed"):
        handle.pin_device_tensor(array_at(0, 10))


def test_what_is_pinned_is_registered_with_cufile_once(
    cufile: Cufile, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[object, ...]] = []

    def register(*arguments: int) -> None:
        if arguments[1] == 13:
            raise tensorferry.StorageError(5, "cuFileBufRegister: no")
        calls.append(("register", *arguments))

    def deregister(address: int) -> bool:
        calls.append(("deregister", address))
        return True

    def start_scheduler(_: str, settings: Settings) -> Any:
        return make_scheduler(settings._replace(engine="threads"))

    monkeypatch.setattr(gds._core, "register_gpu_buffer", register)
    monkeypatch.setattr(gds._core, "deregister_gpu_buffer", deregister)
    monkeypatch.setattr(gds, "start_scheduler", start_scheduler)
    cufile(native=True)
    with gds_handle() as handle:
        with pytest.raises(tensorferry.StorageError, match="cuFileBufRegister"):
            handle.pin_device_tensor(array_at(0, 13))
        handle.pin_device_tensor(array_at(0, 100))
        handle.pin_device_tensor(array_at(200, 50))
        assert handle.unpin_device_tensor(array_at(0, 100))
    assert calls == [
        ("register", ADDRESS, 100, GPU),
        ("register", ADDRESS + 200, 50, GPU),
        ("deregister", ADDRESS),
        ("deregister", ADDRESS + 200),
    ]


@pytest.mark.usefixtures("compatible")
def test_new_pinned_tensors_need_a_torch_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with gds_handle() as handle:
        with pytest.raises(tensorferry.EngineUnavailableError, match="torch has no CUDA device"):
            handle.new_pinned_device_tensor(10, torch.zeros(1))
        with pytest.raises(TypeError, match="example_tensor"):
            handle.new_pinned_device_tensor(10)
        with pytest.raises(ValueError, match="num_elem"):
            handle.new_pinned_device_tensor(-1, example_tenosr=torch.zeros(1))
