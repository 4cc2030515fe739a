"""Loads that the ranks of a node share: each reads a part of what all of them want, and the parts go from rank to rank.

Before anything is read ranks compare what they were asked for and what they have found; so they have the same groups of
tensors, in the same order. Of each group every rank reads its part, straight into the tensors. When the group is wanted
all ranks agree that nothing has failed, and hand on what they have read, while later groups are read. So a failure ends
the load on all ranks, and nothing of a group is given anywhere before all of it has been read.

Imports torch.distributed: only loads with ``broadcast=`` import this.
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
from tensorferry.base.ranks import Ranks, Relay, checked_broadcast, is_worthwhile, moves, node

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tensorferry.safetensors.plans import Group, Loading, Wanted

# Less is read by one rank.
_MIN_PART_NBYTES = 256 << 10


class _Offer(NamedTuple):
    """What a rank tells the others before they load together: what it was asked for, and what it has found."""

    options: dict[str, Any]
    wanted: str
    node: str
    versions: str
    is_worthwhile: bool


class Share(NamedTuple):
    """The part of a group's memory that a rank reads."""

    rank: int
    begin: int
    end: int


def meet(
    prepare: Callable[[], Loading], broadcast: Any, group: dist.ProcessGroup | None
) -> tuple[Loading, Sharers | None]:
    """Return what is to be loaded, and who shares it; None where everybody reads alone.

    Raises
    ------
    ValueError
        Ranks differ in what they want, or the group cannot move it.
    Exception
        What ``prepare`` raises on any rank.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        checked_broadcast(broadcast)
        return prepare(), None
    if dist.get_rank(group) < 0:
        raise ValueError("process_group: this rank is not one of it")
    ranks = Ranks(dist.group.WORLD if group is None else group)
    found: list[Loading] = []

    def offer() -> _Offer:
        checked_broadcast(broadcast)
        loading = prepare()
        found.append(loading)
        return _offer(loading, broadcast, group)

    offers = ranks.call(offer)
    (loading,) = found
    _check_options(offers)
    if any(each.wanted != offers[0].wanted for each in offers):
        _raise_difference(ranks.call(lambda: [_described(part) for part in loading.parts]))
    nodes = [each.node for each in offers]
    if len(set(nodes)) == len(nodes):
        return loading, None
    if broadcast == "auto" and not all(each.is_worthwhile for each in offers):
        return loading, None
    if len({(each.node, each.versions) for each in offers}) > len(set(nodes)):
        raise ValueError(
            "files: ranks of a node have read the headers of different files: one was replaced or changed meanwhile, "
            "or is another one in each (remedy: load again, or without broadcast)"
        )
    members = [rank for rank, each in enumerate(nodes) if each == nodes[ranks.rank]]
    return loading, Sharers(ranks.group, members, loading.where)


class Sharers(Owned):
    """The ranks that load the same, as one of them sees them.

    Parameters
    ----------
    group : ProcessGroup or None
        All of them.
    members : list of int
        Those of this node.
    where : torch.device or str
        Where tensors are.

    Attributes
    ----------
    steps : int
        How many groups are still to be handed on.
    """

    def __init__(self, group: dist.ProcessGroup | None, members: list[int], where: Any) -> None:
        self._belong_here()
        self.steps = 0
        self._relay = Relay(group, torch.device(where))
        self._members = members
        # Within a step nobody knows whether this rank has said something to the others.
        self._is_between = False

    def shares(self, pieces: list[tuple[int, Any]], alignment: int) -> list[Share]:
        """Return who reads what of a group, whose memory is in ``pieces`` with their places in the file."""
        total = sum(len(memory) for _, memory in pieces)
        count = max(1, min(len(self._members), total // _MIN_PART_NBYTES))
        begins = cuts(pieces, count, alignment)
        return [
            Share(rank, *each)
            for rank, each in zip(self._members, itertools.pairwise(begins), strict=False)
        ]

    def own(self, shares: list[Share], pieces: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
        """Return the pieces, or what of them, this rank reads."""
        found = []
        for _, begin, end in (share for share in shares if share.rank == self._relay.rank):
            at = 0
            for offset, memory in pieces:
                first, last = max(begin - at, 0), min(end - at, len(memory))
                if first < last:
                    found.append((offset + first, memory[first:last]))
                at += len(memory)
        return found

    def step(self, oldest: Callable[[], Group | None]) -> Group | None:
        """Return the oldest group, for which ``oldest`` waits, when all ranks have read and got their parts of it.

        Raises
        ------
        Exception
            What has failed on any rank.
        """
        if self._is_between:
            raise RuntimeError(
                "this load was interrupted while ranks exchanged what they had read: begin it again on all of them"
            )
        group, failure = None, None
        try:
            group = oldest()
        except Exception as error:
            if not self.steps:
                raise
            failure = error
        if failure is None and (group is None or group.is_handed_on):
            return group
        self._is_between = True
        self._relay.agree(failure)
        assert group is not None
        self._hand_on(group)
        group.is_handed_on = True
        self.steps -= 1
        self._is_between = False
        return group

    def leave(self) -> None:
        """Tell the other ranks that this one goes no further, if they would wait for it."""
        if self.steps and not self._is_between and not self.is_parents and dist.is_initialized():
            self._is_between = True
            self._relay.leave()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the interpreter's end
            self.leave()

    def _hand_on(self, group: Group) -> None:
        memories = [_as_torch(part.memory) for part in group.parts if part.nbytes]
        if not memories:
            return
        memory = memories[0] if len(memories) == 1 else torch.cat(memories)
        parts = {share.rank: memory[share.begin : share.end] for share in group.shares}
        own = parts.pop(self._relay.rank, memory[:0])
        for work in self._relay.hand_on(own, self._members, parts.items()):
            work.wait()
        if len(memories) > 1:
            ends = itertools.accumulate(map(len, memories))
            for each, end in zip(memories, ends, strict=True):
                each.copy_(memory[end - len(each) : end])


def cuts(pieces: list[tuple[int, Any]], count: int, alignment: int) -> list[int]:
    """Return where to cut memory, in which pieces of a file lie one behind the other, into about equal parts.

    These are the begins of the parts, and the end of the last. Cuts are at multiples of ``alignment`` of the file, or
    between pieces.
    """
    total = sum(len(memory) for _, memory in pieces)
    found, at = [0], 0
    for offset, memory in pieces:
        while len(found) < count and (wanted := total * len(found) // count) < at + len(memory):
            place = -(-(offset + wanted - at) // alignment) * alignment
            found.append(at + min(place - offset, len(memory)))
        at += len(memory)
    return found + [total] * (count + 1 - len(found))


def _offer(loading: Loading, broadcast: Any, group: dist.ProcessGroup | None) -> _Offer:
    kind = torch.device(loading.where).type
    is_moved = moves(group, kind)
    if broadcast is True and not is_moved:
        backends = dist.get_backend_config(group)
        raise ValueError(f"broadcast: the process group ({backends}) moves no memory of {kind!r}")
    versions = {part.stored.path: part.stored.version for part in loading.parts}
    # Mounts of the same storage may have other names and device numbers in other containers.
    found = (f"{version[1:]}" for version in versions.values())
    return _Offer(
        {"broadcast": broadcast, **loading.options},
        _digest(map(_described, loading.parts)),
        node(),
        _digest(found),
        is_moved and any(is_worthwhile(kind, path) for path in itertools.islice(versions, 1)),
    )


def _digest(lines: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode(errors="surrogatepass") + b"\n")
    return digest.hexdigest()


def _described(part: Wanted) -> str:
    """Return what a rank wants of a tensor: equal texts stand for equal bytes of equal files."""
    name, dtype, *_ = part.stored.tensor
    file_name = pathlib.Path(part.stored.path).name
    text = f"{list(part.shape)} of {name!r} ({dtype}) from byte {part.begin} of {file_name!r} on"
    if not part.outer and part.picks is None and part.basic == (...,):
        return text
    # Positions of a slice are evenly spaced.
    rows = [(len(each), *each[:1], *each[-1:]) for each in part.outer]
    return f"{text}, {part.row_nbytes} bytes each {rows} {part.picks} {part.basic}"


def _check_options(offers: list[_Offer]) -> None:
    for rank, each in enumerate(offers):
        for name, first in offers[0].options.items():
            if each.options[name] != first:
                raise ValueError(
                    f"{name}: ranks differ in it: {first!r} on rank 0, {each.options[name]!r} on rank {rank}"
                )


def _raise_difference(wanted: list[list[str]]) -> None:
    for rank, each in enumerate(wanted):
        for first, other in itertools.zip_longest(wanted[0], each):
            if first != other:
                raise ValueError(
                    f"files, plan: ranks differ in what they want: {first or 'no more'} on rank 0, "
                    f"{other or 'no more'} on rank {rank} (remedy: load what all want with broadcast, and the rest "
                    "without)"
                )


def _as_torch(memory: Any) -> torch.Tensor:
    if isinstance(memory, torch.Tensor):
        return memory
    return torch.frombuffer(memory, dtype=torch.uint8)
