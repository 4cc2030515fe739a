"""Plain Python in the benchmark: buffered files, and ``preadv``/``pwritev`` past the page cache."""

from __future__ import annotations

import mmap
import os
from typing import Any

import torch

from benchmarks.harness import MIB
from benchmarks.peers.base import TransferPeer, byte_view, ordinary_tensor, timed_reads

_DIRECT_BLOCK_NBYTES = 8 * MIB


class Buffered(TransferPeer):
    """``open`` with ``write`` and ``readinto``, as most programs have it."""

    def __init__(self, nbytes: int) -> None:
        self.tensor = ordinary_tensor(nbytes)

    def write(self, path: str, seed: int, check: bool, sync: bool = True) -> dict[str, Any]:
        return self._write(path, seed, check, lambda: self._write_file(path, sync))

    def read(self, path: str, seed: int) -> dict[str, Any]:
        return self._read(seed, lambda: self._read_file(path))

    def _write_file(self, path: str, sync: bool) -> None:
        rest = byte_view(self.tensor)
        with open(path, "wb", buffering=0) as file:
            while rest:
                rest = rest[file.write(rest) :]
            if sync:
                os.fsync(file.fileno())

    def _read_file(self, path: str) -> None:
        rest = byte_view(self.tensor)
        with open(path, "rb", buffering=0) as file:
            while rest:
                rest = rest[file.readinto(rest) :]


class Direct(TransferPeer):
    """``os.pwritev`` and ``os.preadv`` with O_DIRECT, 8 MiB after 8 MiB, page-aligned memory."""

    def __init__(self, nbytes: int) -> None:
        self.memory = mmap.mmap(-1, -(-nbytes // 4096) * 4096)
        whole: torch.Tensor = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.tensor = whole[:nbytes].fill_(1)

    def write(self, path: str, seed: int, check: bool) -> dict[str, Any]:
        return self._write(path, seed, check, lambda: self._transfer(path, os.O_RDWR | os.O_CREAT))

    def read(self, path: str, seed: int) -> dict[str, Any]:
        return self._read(seed, lambda: self._transfer(path, os.O_RDONLY))

    def _transfer(self, path: str, flags: int) -> None:
        view = byte_view(self.tensor)
        call = os.pwritev if flags & os.O_CREAT else os.preadv
        descriptor = os.open(path, flags | os.O_DIRECT, 0o644)
        try:
            if flags & os.O_CREAT:
                os.posix_fallocate(descriptor, 0, len(view))
            position = 0
            while position < len(view):
                part = view[position : position + _DIRECT_BLOCK_NBYTES]
                position += call(descriptor, [part], position)
        finally:
            os.close(descriptor)


class BlockingReads:
    """One ``os.preadv`` of 4 KiB after another, past the page cache."""

    def __init__(self, block_nbytes: int) -> None:
        self.block = mmap.mmap(-1, block_nbytes)

    def read(self, path: str, file_nbytes: int, count: int, seed: int) -> dict[str, Any]:
        """Answer with every call's microseconds."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            return timed_reads(
                lambda offset: os.preadv(descriptor, [self.block], offset),
                *(file_nbytes, len(self.block), count, seed),
            )
        finally:
            os.close(descriptor)
