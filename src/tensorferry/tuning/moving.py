"""A worker process of `tensorferry bench`: its memory, its files, and the methods that transfer bytes between them.

A method is a way to write or read a file: tensorferry's handles or files, torch, or plain Python. Operations that users
perform once, such as creating a handle or calling ``tensorferry.open``, happen in a method's constructor or in
``prepare``, outside the measured time. Only ``move`` is measured.
"""

from __future__ import annotations

import array
import contextlib
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
    from collections.abc import Iterator
    from pathlib import Path

    from tensorferry.tuning.bench import Files, Job

_PAGE_NBYTES = 4096
_CHUNK_NBYTES = 8 << 20
# The names of all settings except the last one, the engine.
_SETTINGS = Settings._fields[:-1]


class ValidationError(Exception):
    """After a transfer, the content of the file differs from that of the memory."""


class Memory:
    """The memory of a transfer: host memory, or a tensor on a GPU, with or without a copy through host memory.

    Parameters
    ----------
    nbytes : int
        The size.
    kind : str
        The kind of host memory: "locked" (from ``tensorferry.empty``), "ordinary", or "accelerator" (pinned by torch).
        With "gpu", the GPU tensor is passed to the handle directly, and host memory is used only by methods that do not
        support GPU memory.
    device : torch.Tensor, optional
        A tensor of bytes on a GPU. Unless the kind is "gpu", each transfer includes a copy between this tensor and the
        host memory.
    """

    def __init__(self, nbytes: int, kind: str, device: Any = None) -> None:
        self.nbytes = nbytes
        self.device = device
        self.notes: list[str] = []
        self._uses_device_memory = kind == "gpu"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.host = _allocate(nbytes, kind)
        self.notes += [str(warning.message) for warning in caught]

    def tensor(self) -> Any:
        """Return the memory as a torch tensor, on the GPU if one is used."""
        return self.device if self.device is not None else _tensor_on(self.host)

    @contextlib.contextmanager
    def buffer_for(self, write: bool, *, on_host: bool = False) -> Any:
        """Yield the buffer for a write or read, and copy between host memory and the GPU where necessary."""
        if self.device is None:
            yield self.host
        elif self._uses_device_memory and not on_host:
            yield self.device
        else:
            if write:
                _tensor_on(self.host).copy_(self.device)
            yield self.host
            if not write:
                self.device.copy_(_tensor_on(self.host))
                self._synchronize()

    def fill(self, stamp: int) -> None:
        """Fill the memory with incompressible bytes that differ between pages and between stamps.

        A stamp is a number that the caller changes to get new content. Each page begins with its number and the stamp,
        so a validation detects stale, lost and misplaced pages. With stamp 0, fill the memory with zeros instead.
        """
        for begin, part in pattern(self.nbytes, stamp):
            self.host[begin : begin + len(part)] = part
            if self.device is not None:
                self.device[begin : begin + len(part)].copy_(_tensor_on(memoryview(part)))
        self._synchronize()

    def check(self, path: Path) -> None:
        """Compare the memory with a file, which plain Python reads. Raise ValidationError if they differ."""
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


def pattern(nbytes: int, stamp: int) -> Iterator[tuple[int, bytearray]]:
    """Yield the offsets and the bytes of chunks of the pattern with which :meth:`Memory.fill` fills memory."""
    block = random.Random(0).randbytes(1 << 20) * (_CHUNK_NBYTES >> 20)
    for begin in range(0, nbytes, _CHUNK_NBYTES):
        length = min(_CHUNK_NBYTES, nbytes - begin)
        part = bytearray(block[:length] if stamp else length)
        words = memoryview(part)[: length // 8 * 8].cast("Q")
        if stamp and len(words):
            first = (stamp << 32) + begin // _PAGE_NBYTES
            count = len(words[:: _PAGE_NBYTES // 8])
            words[:: _PAGE_NBYTES // 8] = memoryview(array.array("Q", range(first, first + count)))
        yield begin, part


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


class Method:
    """Plain Python: ``FileIO`` with ``readinto``, or with ``write`` and ``os.fsync``.

    This is also the base class of the other methods.
    """

    stats: dict[str, Any] | None = None  # the counters of a handle or file after the last transfer

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def prepare(self, path: Path, write: bool) -> None:
        """Prepare one transfer."""
        self.path, self.write = path, write

    def move(self) -> None:
        """Write the memory to the file, or read the file into the memory."""
        mode = "r" if not self.write else "r+" if self.path.exists() else "w"
        with (
            self.memory.buffer_for(self.write, on_host=True) as rest,
            FileIO(self.path, mode) as file,
        ):
            while rest:
                count = file.write(rest) if self.write else file.readinto(rest)
                if not count:
                    raise EOFError(f"{str(self.path)!r} is shorter than it was")
                rest = rest[count:]
            if self.write:
                os.fsync(file.fileno())

    def check(self) -> None:
        """Raise ValidationError if the file and the memory differ."""
        self.memory.check(self.path)

    def settings(self) -> dict[str, Any]:
        """Return the settings of the last transfer, or an empty dict."""
        return {}

    def close(self) -> None:
        """Release all resources."""


class HandleMethod(Method):
    """Asynchronous calls of ``aio_handle``, or of ``gds_handle`` with pinned GPU memory, as in ds_io."""

    def __init__(self, memory: Memory, kind: str, settings: dict[str, Any]) -> None:
        super().__init__(memory)
        self._handle = getattr(tensorferry, kind)(**settings)
        self._pinned = kind == "gds_handle"
        if self._pinned:
            self._handle.pin_device_tensor(memory.device)

    def move(self) -> None:
        """Write or read with one asynchronous call, and wait for it."""
        handle = self._handle
        with self.memory.buffer_for(self.write) as buffer:
            (handle.async_pwrite if self.write else handle.async_pread)(buffer, self.path)
            handle.wait()
        self.stats = handle.stats()

    def settings(self) -> dict[str, Any]:
        """Return the handle's settings."""
        used = {name: getattr(self._handle, f"get_{name}")() for name in _SETTINGS}
        return used | {"engine": self._handle.engine}

    def close(self) -> None:
        """Close the handle."""
        if self._pinned:
            self._handle.unpin_device_tensor(self.memory.device)
        self._handle.close()


class FilesMethod(Method):
    """``tensorferry.open`` with ``read`` and ``write``. The file is opened outside the measured time."""

    def __init__(self, memory: Memory, settings: dict[str, Any]) -> None:
        super().__init__(memory)
        settings.pop("overlap_events", None)  # it has no effect: queues are always refilled
        self._settings = settings
        self._file: tensorferry.File | None = None
        self._gpu_nbytes = 0

    def prepare(self, path: Path, write: bool) -> None:
        """Open the file."""
        super().prepare(path, write)
        self.close()
        mode = "r" if not write else "r+" if path.exists() else "w"
        self._file = tensorferry.open(path, mode, **self._settings)

    def move(self) -> None:
        """Write or read with one blocking call."""
        file = self._file
        assert file is not None
        # Other files may share the counters: only the difference is of this file.
        before = file.stats()["gpu_nbytes"]
        with self.memory.buffer_for(self.write) as buffer:
            file.write(buffer) if self.write else file.read(buffer)
        stats = file.stats()
        self._gpu_nbytes += stats["gpu_nbytes"] - before
        self.stats = stats | {"gpu_nbytes": self._gpu_nbytes, "gds_nbytes": 0}

    def settings(self) -> dict[str, Any]:
        """Return the block size, the queue depth and the engine that the file uses."""
        assert self._file is not None
        used = Settings.of()._asdict() | self._settings
        return {name: used[name] for name in _SETTINGS[:2]} | {"engine": self._file.engine}

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


class TorchMethod(Method):
    """``torch.save`` and ``torch.load``."""

    def prepare(self, path: Path, write: bool) -> None:
        """Free the memory of the tensor that was loaded last."""
        super().prepare(path, write)
        self._loaded: Any = None

    def move(self) -> None:
        """Save or load the tensor."""
        import torch

        tensor = self.memory.tensor()
        if self.write:
            torch.save(tensor, self.path)
        else:
            self._loaded = torch.load(self.path, map_location=tensor.device)

    def check(self) -> None:
        """Raise ValidationError if the saved or loaded tensor differs."""
        import torch

        tensor = self.memory.tensor()
        found = torch.load(self.path, map_location=tensor.device) if self.write else self._loaded
        if not torch.equal(found, tensor):
            raise ValidationError(f"validation failed: {str(self.path)!r} has another tensor")


def make_method(name: str, job: Job, memory: Memory) -> Method:
    """Return the method for an engine of the job, for "gds_handle", or for "python"."""
    if name in ("aio_handle", "gds_handle"):
        return HandleMethod(memory, name, dict(job.settings))
    if name == "files":
        return FilesMethod(memory, dict(job.settings))
    return TorchMethod(memory) if name == "torch_io" else Method(memory)


class Task:
    """The work of one process of the benchmark.

    For each operation, the benchmark calls :meth:`begin`, :meth:`prepare` and :meth:`move` for each loop of each
    method, and :meth:`end`.
    """

    def __init__(self, job: Job, number: int, files: Files) -> None:
        self._job = job
        self._files = files
        all_paths = {path for paths in files.values() for path in paths}
        self._new_files = [path for path in all_paths if not path.exists()]
        device = None
        if job.gpu:
            import torch

            where = torch.device("cuda", job.places[number].device)
            device = torch.empty(job.io_nbytes, dtype=torch.uint8, device=where)
        self._memory = Memory(job.io_nbytes, job.memory, device)
        self._stamp = 1
        self._memory.fill(self._stamp)
        self._methods: dict[str, Method] = {}

    def begin(self, operation: str, methods: list[str]) -> list[str]:
        """Create the methods and, for reads, the files. Return notes on the memory for the user."""
        job = self._job
        for path in self._files[operation] if operation == "read" else ():
            # An existing file of the right size can be used, unless torch.load must be able to read it.
            usable = job.engine != "torch_io" and path.is_file()
            if not usable or path.stat().st_size != job.io_nbytes:
                writer = make_method(
                    "torch_io" if job.engine == "torch_io" else "python", job, self._memory
                )
                path.unlink(missing_ok=True)
                writer.prepare(path, True)
                writer.move()
        self._methods = {name: make_method(name, job, self._memory) for name in methods}
        return self._memory.notes

    def prepare(self, name: str, operation: str, loop: int) -> None:
        """Prepare file and memory for one transfer of any method, including fio's."""
        paths = self._files[operation]
        path, method = paths[loop % len(paths)], self._methods.get(name)
        if operation == "read":
            make_cold(path)
            if self._job.validate and method is not None:
                # Data that an earlier transfer left in the memory must not pass the validation of this transfer, so
                # the memory is cleared. torch.load reads into another tensor, which the validation compares with the
                # memory, so for TorchMethod the memory gets the content of the file instead.
                self._memory.fill(self._stamp if isinstance(method, TorchMethod) else 0)
        else:
            if self._job.engine == "torch_io":  # each write creates a new file, as in ds_io
                remove(path)
            if self._job.validate:
                self._stamp += 1
                self._memory.fill(self._stamp)
        if method is not None:
            method.prepare(path, operation == "write")

    def move(self, name: str) -> dict[str, Any]:
        """Run the transfer, and return its start and end on the system-wide monotonic clock, and its costs."""
        method = self._methods[name]
        with Stopwatch() as watch:
            method.move()
        if self._job.validate:
            method.check()
        stats = method.stats or {}
        # Percentiles cover only blocks of the engine, not those that the caller's thread served from the page cache.
        latency = stats["block_latency_microseconds"] if stats.get("engine_blocks") else None
        names = ("gpu_nbytes", "gds_nbytes", "compat")
        gpu = {each: stats[each] for each in names if each in stats}
        return {
            **{each: getattr(watch, each) for each in ("started", "ended", "cpu_seconds")},
            "peak_growth_nbytes": watch.peak_growth_nbytes,
            "latency_microseconds": latency,
            "gpu": gpu if gpu.get("gpu_nbytes") else None,
            "settings": method.settings(),
        }

    def end(self) -> None:
        """Close the methods."""
        for method in self._methods.values():
            method.close()
        self._methods = {}

    def on_orphaned(self) -> None:
        """Remove the new files, because the parent process, which would remove them, has died."""
        for path in self._new_files:
            with contextlib.suppress(OSError):
                path.unlink()
            if not self._job.keep_files:
                with contextlib.suppress(OSError):
                    path.parent.rmdir()
