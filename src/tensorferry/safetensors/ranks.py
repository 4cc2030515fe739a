"""Shared loads: each rank of a node reads a part of the tensors, and the ranks exchange the parts.

Before anything is read, the ranks compare their requests and the headers that they have found. They then have the same
reads, in the same order. Each rank reads its share of every read directly into the tensors. When the callers request a
tensor of a read, the ranks agree that no share of it failed, and exchange their shares, while later reads are in
progress. A failure on one rank therefore ends the load on all ranks, and no rank returns a tensor before all shares of
its read have arrived.

This module imports torch.distributed, so only loads with ``broadcast=`` import it.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import pathlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from tensorferry.base.processes import Owned
from tensorferry.base.ranks import (
    Ranks,
    Relay,
    can_move,
    checked_broadcast,
    is_worthwhile,
    node_identity,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tensorferry.safetensors.parts import PartsRead, TensorPart
    from tensorferry.safetensors.plans import LoadPlan

# The smallest share. If a read is too small for two of them, one rank reads it alone.
_MIN_PART_NBYTES = 256 << 10


class _Announcement(NamedTuple):
    """The request of a rank and digests of what it has found, which the ranks exchange before they load together.

    Attributes
    ----------
    options : dict of str to Any
        The arguments that must be equal on all ranks.
    requested : str
        The digest of the requested tensors.
    node : str
        The identity of the node.
    versions : str
        The digest of the versions of the files, which shows whether ranks of a node have read the same files.
    is_worthwhile : bool
        Whether sharing pays for this rank, where ``broadcast="auto"`` leaves the choice.
    """

    options: dict[str, Any]
    requested: str
    node: str
    versions: str
    is_worthwhile: bool


class Share(NamedTuple):
    """The part of a read that one rank does: a range of the concatenated memory of all its pieces."""

    rank: int
    begin: int
    end: int


def agree_on_load(
    prepare: Callable[[], LoadPlan], broadcast: Any, group: dist.ProcessGroup | None
) -> tuple[LoadPlan, Sharers | None]:
    """Return the load, and the ranks that share it, or None if each rank reads alone.

    Raises
    ------
    ValueError
        The ranks request different tensors, or the process group does not support the memory of the tensors.
    Exception
        The error that ``prepare`` raises on any rank.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        checked_broadcast(broadcast)
        return prepare(), None
    if dist.get_rank(group) < 0:
        raise ValueError("process_group: this rank does not belong to it")
    ranks = Ranks(dist.group.WORLD if group is None else group)
    found: list[LoadPlan] = []

    def announce() -> _Announcement:
        checked_broadcast(broadcast)
        loading = prepare()
        found.append(loading)
        return _announcement(loading, broadcast, group)

    announcements = ranks.call(announce)
    (loading,) = found
    _check_options(announcements)
    if any(each.requested != announcements[0].requested for each in announcements):
        _raise_difference(ranks.call(lambda: [_describe(part) for part in loading.parts]))
    nodes = [each.node for each in announcements]
    if len(set(nodes)) == len(nodes):
        return loading, None
    if broadcast == "auto" and not all(each.is_worthwhile for each in announcements):
        return loading, None
    if len({(each.node, each.versions) for each in announcements}) > len(set(nodes)):
        raise ValueError(
            "files: ranks of a node have read the headers of different files: a file was replaced or changed during "
            "the call, or the path is a different file for each rank (remedy: load again, or without broadcast)"
        )
    members = [rank for rank, each in enumerate(nodes) if each == nodes[ranks.rank]]
    return loading, Sharers(ranks.group, members, loading.framework.device)


class Sharers(Owned):
    """The ranks that share a load, as seen from one of them.

    Parameters
    ----------
    group : ProcessGroup or None
        The process group of all ranks.
    members : list of int
        The ranks on this node.
    where : torch.device or str
        The device of the tensors.

    Attributes
    ----------
    steps : int
        The number of reads that the ranks have not exchanged yet.
    """

    def __init__(self, group: dist.ProcessGroup | None, members: list[int], where: Any) -> None:
        self._set_owner()
        self.steps = 0
        self._relay = Relay(group, torch.device(where))
        self._members = members
        # True while step() exchanges a read, and permanently once an exchange was interrupted. It is then unknown
        # which messages this rank has sent, so the other ranks could not match further messages with theirs.
        self._is_exchanging = False

    def divide(self, pieces: list[tuple[int, Any]], alignment: int) -> list[Share]:
        """Divide a read among the ranks. ``pieces`` are its memory, each piece with its offset in the file."""
        total = sum(len(memory) for _, memory in pieces)
        count = max(1, min(len(self._members), total // _MIN_PART_NBYTES))
        begins = cuts(pieces, count, alignment)
        return [
            Share(rank, *each)
            for rank, each in zip(self._members, itertools.pairwise(begins), strict=False)
        ]

    def pieces_to_read(
        self, shares: list[Share], pieces: list[tuple[int, Any]]
    ) -> list[tuple[int, Any]]:
        """Return the pieces, or slices of them, that this rank reads."""
        found = []
        for _, begin, end in (share for share in shares if share.rank == self._relay.rank):
            at = 0
            for offset, memory in pieces:
                first, last = max(begin - at, 0), min(end - at, len(memory))
                if first < last:
                    found.append((offset + first, memory[first:last]))
                at += len(memory)
        return found

    def step(self, oldest: Callable[[], PartsRead | None]) -> PartsRead | None:
        """Return the oldest read, once all ranks have read and exchanged their shares of it.

        ``oldest`` is a function that waits for this rank's share and returns the read.

        Raises
        ------
        Exception
            The error of any rank.
        """
        if self._is_exchanging:
            raise RuntimeError(
                "this load was interrupted while ranks exchanged their data (remedy: begin it again on all ranks)"
            )
        read, failure = None, None
        try:
            read = oldest()
        except Exception as error:
            if not self.steps:
                raise
            failure = error
        if failure is None and (read is None or read.is_handed_on):
            return read
        self._is_exchanging = True
        self._relay.agree(failure)
        assert read is not None
        self._hand_on(read)
        read.finish()
        read.is_handed_on = True
        self.steps -= 1
        self._is_exchanging = False
        return read

    def leave(self) -> None:
        """Tell the other ranks that this one stops, if they have reads left for which they would wait for it."""
        if self.steps and not self._is_exchanging and not self.is_parents and dist.is_initialized():
            self._is_exchanging = True
            self._relay.leave()

    def __del__(self) -> None:
        # At interpreter shutdown, torch.distributed may be unusable.
        with contextlib.suppress(Exception):
            self.leave()

    def _hand_on(self, read: PartsRead) -> None:
        """Send this rank's share of a read to the other ranks of the node, and receive theirs."""
        memories = [torch.as_tensor(memory) for _, memory in read.pieces]
        if not memories:
            return
        memory = memories[0] if len(memories) == 1 else torch.cat(memories)
        parts = {share.rank: memory[share.begin : share.end] for share in read.shares}
        # A rank without a share has nothing to send: its slice is empty.
        own = parts.pop(self._relay.rank, memory[:0])
        for work in self._relay.exchange(own, self._members, parts.items()):
            work.wait()
        if len(memories) > 1:
            ends = itertools.accumulate(map(len, memories))
            for each, end in zip(memories, ends, strict=True):
                each.copy_(memory[end - len(each) : end])


def cuts(pieces: list[tuple[int, Any]], count: int, alignment: int) -> list[int]:
    """Return where to divide the concatenated pieces of a file into ``count`` parts of similar size.

    The result has the start of each part and the end of the last part. Each cut is between two pieces, or at a multiple
    of ``alignment`` in the file.
    """
    total = sum(len(memory) for _, memory in pieces)
    found, at = [0], 0
    for offset, memory in pieces:
        while len(found) < count and (ideal := total * len(found) // count) < at + len(memory):
            aligned = -(-(offset + ideal - at) // alignment) * alignment
            found.append(at + min(aligned - offset, len(memory)))
        at += len(memory)
    return found + [total] * (count + 1 - len(found))


def _announcement(
    loading: LoadPlan, broadcast: Any, group: dist.ProcessGroup | None
) -> _Announcement:
    kind = torch.device(loading.framework.device).type
    is_moved = can_move(group, kind)
    if broadcast is True and not is_moved:
        backends = dist.get_backend_config(group)
        raise ValueError(
            f"broadcast: the process group ({backends}) does not support memory of {kind!r}"
        )
    versions = {part.stored.path: part.stored.version for part in loading.parts}
    # The first field of a version, the device number, is left out: the same storage can have different device numbers
    # and paths in different containers of a node.
    found = (f"{version[1:]}" for version in versions.values())
    return _Announcement(
        {"broadcast": broadcast, **loading.options},
        _digest(map(_describe, loading.parts)),
        node_identity(),
        _digest(found),
        is_moved and any(is_worthwhile(kind, path) for path in itertools.islice(versions, 1)),
    )


def _digest(lines: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode(errors="surrogatepass") + b"\n")
    return digest.hexdigest()


def _describe(part: TensorPart) -> str:
    """Describe a requested tensor. Equal texts mean the same bytes of files with the same name."""
    name, dtype, _, begin, _ = part.stored.tensor
    file_name = pathlib.Path(part.stored.path).name
    text = f"{list(part.shape)} of {name!r} ({dtype}) from byte {begin} of {file_name!r} on"
    if part.selection is None:
        return text
    # Positions of a slice are evenly spaced, so the first and the last identify them.
    ends = [(*each[:1], *each[-1:]) for each in part.selection.positions]
    return f"{text}, positions {ends} {part.selection.basic}"


def _check_options(announcements: list[_Announcement]) -> None:
    for rank, each in enumerate(announcements):
        for name, first in announcements[0].options.items():
            if each.options[name] != first:
                raise ValueError(
                    f"{name}: ranks differ: {first!r} on rank 0, {each.options[name]!r} on rank {rank}"
                )


def _raise_difference(requested: list[list[str]]) -> None:
    """Raise ValueError with the first tensor in which the request of a rank differs from that of rank 0."""
    for rank, each in enumerate(requested):
        for first, other in itertools.zip_longest(requested[0], each):
            if first != other:
                raise ValueError(
                    f"files, plan: ranks request different tensors: {first or 'no more'} on rank 0, "
                    f"{other or 'no more'} on rank {rank} (remedy: load the tensors that all ranks need with "
                    "broadcast, and the others without)"
                )
