"""Plain Python in the benchmark: buffered files, and ``preadv``/``pwritev`` past the page cache."""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from benchmarks.harness import MIB, MeasurementError
from benchmarks.peers.base import TransferPeer, byte_view, ordinary_tensor, timed_reads

_DIRECT_BLOCK_NBYTES = 8 * MIB


def move(path: str, memory: torch.Tensor, threads: int, *, write: bool) -> bool:
    """Move page-aligned memory to or from a file in blocks of 8 MiB; return whether the page cache was passed by."""
    descriptor, direct = _open(path, os.O_RDWR | os.O_CREAT if write else os.O_RDONLY)
    view = byte_view(memory)
    call = os.pwritev if write else os.preadv

    def move_block(begin: int) -> None:
        end = min(begin + _DIRECT_BLOCK_NBYTES, len(view))
        while begin < end:
            count = call(descriptor, [view[begin:end]], begin)
            if not count:
                raise MeasurementError(f"the file ends at {begin}")
            begin += count

    blocks = range(0, len(view), _DIRECT_BLOCK_NBYTES)
    try:
        if write:
            os.posix_fallocate(descriptor, 0, len(view))
        if threads == 1:
            for begin in blocks:
                move_block(begin)
        else:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(move_block, blocks))
    finally:
        os.close(descriptor)
    return direct


def _open(path: str, flags: int) -> tuple[int, bool]:
    try:
        return os.open(path, flags | os.O_DIRECT, 0o644), True
    except OSError:  # tmpfs before Linux 6.6
        return os.open(path, flags, 0o644), False


def sync(path: str) -> None:
    """Have the drive hold a file, or a directory's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Buffered(TransferPeer):
    """``open`` with ``write``, synced, and ``readinto``, as most programs have it."""

    def __init__(self, nbytes: int) -> None:
        self.tensor = ordinary_tensor(nbytes)

    def save(self, path: str) -> None:
        rest = byte_view(self.tensor)
        with open(path, "wb", buffering=0) as file:
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())

    def load(self, path: str) -> None:
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

    def save(self, path: str) -> None:
        move(path, self.tensor, 1, write=True)

    def load(self, path: str) -> None:
        move(path, self.tensor, 1, write=False)


class BlockingReads:
    """One ``os.preadv`` of 4 KiB after another, past the page cache."""

    def __init__(self, count: int, block_nbytes: int) -> None:
        self.count = count
        self.block = mmap.mmap(-1, block_nbytes)

    def read(self, path: str, file_nbytes: int, seed: int) -> dict[str, Any]:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            return timed_reads(
                lambda offset: os.preadv(descriptor, [self.block], offset),
                *(file_nbytes, len(self.block), self.count, seed),
            )
        finally:
            os.close(descriptor)
