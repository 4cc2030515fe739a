"""A process of `tensorferry bench`: its memory, its files, and the ways in which it moves bytes between them.

A way is made once. What users do once (make a handle, open a file) is done there or in ``prepare``, outside the clock;
``move`` is what is measured.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import os
import random
import warnings
from io import FileIO
from typing import TYPE_CHECKING, Any

import tensorferry
from tensorferry.transfer.memory import locked_memory
from tensorferry.transfer.settings import Settings
from tensorferry.tuning.scratch import make_cold, remove
from tensorferry.tuning.stopwatch import Stopwatch

if TYPE_CHECKING:
    from pathlib import Path

    from tensorferry.tuning.bench import Files, Job

_PAGE_NBYTES = 4096
_CHUNK_NBYTES = 8 << 20
_SETTINGS = [field.name for field in dataclasses.fields(Settings)][:-1]


class ValidationError(Exception):
    """A file and the memory that should equal it differ."""


class Memory:
    """What a transfer reads into or writes from: host memory, or a tensor on a GPU, perhaps by way of host memory.

    Parameters
    ----------
    nbytes : int
        Its size.
    kind : str
        Host memory: "locked" (as ``tensorferry.empty`` gives it), "ordinary", or "accelerator" (pinned by torch).
        "gpu": the device's memory goes to the handle as it is; host memory is only for those who cannot use it.
    device : torch.Tensor, optional
        Bytes on a GPU. With a kind of host memory, each transfer includes the copy of all of them between both.
    """

    def __init__(self, nbytes: int, kind: str, device: Any = None) -> None:
        self.nbytes = nbytes
        self.device = device
        self.notes: list[str] = []
        self._as_it_is = kind == "gpu"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.host = _allocate(nbytes, kind)
        self.notes += [str(warning.message) for warning in caught]

    def tensor(self) -> Any:
        """Return what a program would hold: a torch tensor of the bytes, on the GPU if there is one."""
        return self.device if self.device is not None else _tensor_on(self.host)

    @contextlib.contextmanager
    def given(self, write: bool, *, on_host: bool = False) -> Any:
        """Give what a write or read of a file is to use, and do the part between that and the GPU, if any."""
        if self.device is None:
            yield self.host
        elif self._as_it_is and not on_host:
            yield self.device
        else:
            if write:
                _tensor_on(self.host).copy_(self.device)
            yield self.host
            if not write:
                self.device.copy_(_tensor_on(self.host))
                self._synchronize()

    def fill(self, stamp: int) -> None:
        """Fill it with bytes that differ between pages and between stamps, and do not compress.

        Each page is marked with its number and the stamp: stale, lost and misplaced pages show. Stamp 0 is all zeros.
        """
        block = random.Random(0).randbytes(1 << 20) * (_CHUNK_NBYTES >> 20)
        for begin in range(0, self.nbytes, _CHUNK_NBYTES):
            part = bytearray(
                block[: self.nbytes - begin] if stamp else min(_CHUNK_NBYTES, self.nbytes - begin)
            )
            words = memoryview(part)[: len(part) // 8 * 8].cast("Q")
            if stamp and len(words):
                first = (stamp << 32) + begin // _PAGE_NBYTES
                count = len(words[:: _PAGE_NBYTES // 8])
                words[:: _PAGE_NBYTES // 8] = memoryview(
                    array.array("Q", range(first, first + count))
                )
            self.host[begin : begin + len(part)] = part
            if self.device is not None:
                self.device[begin : begin + len(part)].copy_(_tensor_on(memoryview(part)))
        self._synchronize()

    def check(self, path: Path) -> None:
        """Compare it with a file, which is read by plain Python; raise ValidationError where they differ."""
        with path.open("rb", buffering=0) as file:
            for begin in range(0, self.nbytes, _CHUNK_NBYTES):
                expected = self.host[begin : begin + _CHUNK_NBYTES]
                if self.device is not None:
                    part = self.device[begin : begin + _CHUNK_NBYTES].cpu()
                    expected = memoryview(part.numpy()).cast("B")
                if file.read(len(expected)) != expected:
                    raise ValidationError(
                        f"validation failed: {str(path)!r} and the memory differ within {len(expected)} bytes "
                        f"from offset {begin} on"
                    )

    def _synchronize(self) -> None:
        if self.device is not None and self.device.is_cuda:
            import torch

            torch.cuda.synchronize(self.device.device)


def _tensor_on(view: memoryview) -> Any:
    import torch

    return torch.frombuffer(view, dtype=torch.uint8)


def _allocate(nbytes: int, kind: str) -> memoryview:
    if kind == "locked":
        return memoryview(locked_memory(nbytes)[0])
    if kind == "accelerator":
        import torch

        pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return memoryview(pinned.numpy())  # type: ignore[arg-type]
    return memoryview(bytearray(nbytes))


class Way:
    """``open`` with ``readinto``, or with ``write`` and ``os.fsync``: plain Python. The others differ in parts."""

    stats: dict[str, Any] | None = None  # a handle's or file's, after the last transfer

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def prepare(self, path: Path, write: bool) -> None:
        """Get ready for one transfer."""
        self.path, self.write = path, write

    def move(self) -> None:
        """Write the memory to the file, or read it from there."""
        mode = "r" if not self.write else "r+" if self.path.exists() else "w"
        with self.memory.given(self.write, on_host=True) as rest, FileIO(self.path, mode) as file:
            while rest:
                count = file.write(rest) if self.write else file.readinto(rest)
                if not count:
                    raise EOFError(f"{str(self.path)!r} is shorter than it was")
                rest = rest[count:]
            if self.write:
                os.fsync(file.fileno())

    def check(self) -> None:
        """Raise a ValidationError where the file and what was written or read differ."""
        self.memory.check(self.path)

    def settings(self) -> dict[str, Any]:
        """Return the settings that the last transfer went by, as far as it has any."""
        return {}

    def close(self) -> None:
        """Let go of what it has."""


class HandleWay(Way):
    """Asynchronous calls of ``aio_handle``, or of ``gds_handle`` with the GPU's memory registered once, as in ds_io."""

    def __init__(self, memory: Memory, kind: str, settings: dict[str, Any]) -> None:
        super().__init__(memory)
        self._handle = getattr(tensorferry, kind)(**settings)
        self._pinned = kind == "gds_handle"
        if self._pinned:
            self._handle.pin_device_tensor(memory.device)

    def move(self) -> None:
        """Write or read by one asynchronous call, and wait for it."""
        handle = self._handle
        with self.memory.given(self.write) as given:
            (handle.async_pwrite if self.write else handle.async_pread)(given, self.path)
            handle.wait()
        self.stats = handle.stats()

    def settings(self) -> dict[str, Any]:
        """Return the handle's settings, which may be a profile's."""
        used = {name: getattr(self._handle, f"get_{name}")() for name in _SETTINGS}
        return used | {"engine": self._handle.engine}

    def close(self) -> None:
        """Close the handle."""
        if self._pinned:
            self._handle.unpin_device_tensor(self.memory.device)
        self._handle.close()


class FilesWay(Way):
    """``tensorferry.open`` with ``read`` and ``write``; the file is opened outside the clock."""

    def __init__(self, memory: Memory, settings: dict[str, Any]) -> None:
        super().__init__(memory)
        settings.pop("overlap_events", None)  # queues are always refilled
        self._given = settings
        self._file: tensorferry.File | None = None
        self._gpu_nbytes = 0

    def prepare(self, path: Path, write: bool) -> None:
        """Open the file."""
        super().prepare(path, write)
        self.close()
        mode = "r" if not write else "r+" if path.exists() else "w"
        self._file = tensorferry.open(path, mode, **self._given)

    def move(self) -> None:
        """Write or read by one blocking call."""
        file = self._file
        assert file is not None
        before = file.stats()["gpu_nbytes"]  # files may share a scheduler, and its counters
        with self.memory.given(self.write) as given:
            file.write(given) if self.write else file.read(given)
        stats = file.stats()
        self._gpu_nbytes += stats["gpu_nbytes"] - before
        self.stats = stats | {"gpu_nbytes": self._gpu_nbytes, "gds_nbytes": 0}

    def settings(self) -> dict[str, Any]:
        """Return what was given, or is a profile's."""
        assert self._file is not None
        serving = self._file._scheduler
        tuned = getattr(serving, "latest_settings", lambda: None)() or Settings()
        used = dataclasses.asdict(tuned) | self._given
        return {name: used[name] for name in _SETTINGS[:2]} | {"engine": self._file.engine}

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


class TorchWay(Way):
    """``torch.save`` and ``torch.load``."""

    def prepare(self, path: Path, write: bool) -> None:
        """Give back the memory of what was loaded last."""
        super().prepare(path, write)
        self._loaded: Any = None

    def move(self) -> None:
        """Save or load."""
        import torch

        tensor = self.memory.tensor()
        if self.write:
            torch.save(tensor, self.path)
        else:
            self._loaded = torch.load(self.path, map_location=tensor.device)

    def check(self) -> None:
        """Compare tensors."""
        import torch

        tensor = self.memory.tensor()
        found = torch.load(self.path, map_location=tensor.device) if self.write else self._loaded
        if not torch.equal(found, tensor):
            raise ValidationError(f"validation failed: {str(self.path)!r} has another tensor")


def make_way(name: str, job: Job, memory: Memory) -> Way:
    """Return one of the engines, "gds_handle", or "python"."""
    if name in ("aio_handle", "gds_handle"):
        return HandleWay(memory, name, dict(job.settings))
    if name == "files":
        return FilesWay(memory, dict(job.settings))
    return TorchWay(memory) if name == "torch_io" else Way(memory)


class Task:
    """What a process of the benchmark does; its methods are called in the order in which they stand here."""

    def __init__(self, job: Job, number: int, files: Files) -> None:
        self._job = job
        self._files = files
        every = {path for paths in files.values() for path in paths}
        self._new_files = [path for path in every if not path.exists()]
        device = None
        if job.gpu:
            import torch

            where = torch.device("cuda", job.places[number].device)
            device = torch.empty(job.io_nbytes, dtype=torch.uint8, device=where)
        self._memory = Memory(job.io_nbytes, job.memory, device)
        self._stamp = 1
        self._memory.fill(self._stamp)
        self._ways: dict[str, Way] = {}

    def begin(self, operation: str, ways: list[str]) -> list[str]:
        """Make the ways, and for reading the files. Return what the user should know of the memory."""
        job = self._job
        for path in self._files[operation] if operation == "read" else ():
            # What is there under ds_io's names was made by it or by us; torch.load needs a file that we saved.
            usable = job.engine != "torch_io" and path.is_file()
            if not usable or path.stat().st_size != job.io_nbytes:
                maker = make_way(
                    "torch_io" if job.engine == "torch_io" else "python", job, self._memory
                )
                path.unlink(missing_ok=True)
                maker.prepare(path, True)
                maker.move()
        self._ways = {name: make_way(name, job, self._memory) for name in ways}
        return self._memory.notes

    def prepare(self, name: str, operation: str, loop: int) -> None:
        """Get file and memory ready for one transfer of any way, also of one that is not ours."""
        paths = self._files[operation]
        path, way = paths[loop % len(paths)], self._ways.get(name)
        if operation == "read":
            make_cold(path)
            if self._job.validate and way is not None:
                # What an earlier transfer has left there must not pass for what this one reads.
                self._memory.fill(self._stamp if isinstance(way, TorchWay) else 0)
        else:
            if self._job.engine == "torch_io":  # each write makes its file, as in ds_io
                remove(path)
            if self._job.validate:
                self._stamp += 1
                self._memory.fill(self._stamp)
        if way is not None:
            way.prepare(path, operation == "write")

    def move(self, name: str) -> dict[str, Any]:
        """Do it, and tell what it took: times of the clock that all processes of a machine share, and costs."""
        way = self._ways[name]
        with Stopwatch() as watch:
            way.move()
        if self._job.validate:
            way.check()
        stats = way.stats or {}
        # Blocks that the caller's thread or the page cache served are not in percentiles.
        latency = stats["block_latency_microseconds"] if stats.get("engine_blocks") else None
        names = ("gpu_nbytes", "gds_nbytes", "compat")
        gpu = {each: stats[each] for each in names if each in stats}
        return {
            **{each: getattr(watch, each) for each in ("started", "ended", "cpu_seconds")},
            "peak_growth_nbytes": watch.peak_growth_nbytes,
            "latency_microseconds": latency,
            "gpu": gpu if gpu.get("gpu_nbytes") else None,
            "settings": way.settings(),
        }

    def end(self) -> None:
        """Close the ways."""
        for way in self._ways.values():
            way.close()
        self._ways = {}

    def orphaned(self) -> None:
        """Remove the new files: the process that would do that is gone."""
        for path in self._new_files:
            with contextlib.suppress(OSError):
                path.unlink()
            if not self._job.keep_files:
                with contextlib.suppress(OSError):
                    path.parent.rmdir()
