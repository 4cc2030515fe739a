"""Shared reads: a tensor that several ranks of a node need is read once, and the process group distributes it.

The coordinator, which has the plans of all ranks, cuts such tensors into pieces in the order of their file offsets, and
assigns the pieces to rounds. In each round, every rank that needs the pieces reads some of them (its part) into its own
memory, and verifies the part. Then all ranks agree that none has failed, and the parts are broadcast while those of the
next round are read. So a failure ends the load on all ranks, and damaged data is never distributed.

Before that, each rank sends the coordinator an :class:`Offer` in its load plan, which says what the rank can share. The
coordinator answers, in the same way, with the rank's :class:`Share`: the rounds that the rank takes part in.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from tensorferry.base.ranges import slabs
from tensorferry.base.ranks import Relay, device_of, is_worthwhile, node_identity
from tensorferry.checkpoint.storage.destinations import copy_values, is_plain

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch.distributed.checkpoint.metadata import MetadataIndex

    from tensorferry.base.ranks import Broadcast
    from tensorferry.checkpoint.storage.contents import ItemLocator

# A round has PART_NBYTES bytes for each of its member ranks, but at most _ROUND_NBYTES. A rank needs memory for one
# round and for its own part of the next round. A data file has a checksum for each chunk, and only whole chunks can be
# verified. So the chunk in which the part of one rank ends and the part of the next rank begins is read by both ranks.
PART_NBYTES = 8 << 20
_ROUND_NBYTES = 32 << 20
# Each rank's part of a full round consists of about this many pieces or more. A piece has only one reader, so small
# pieces keep the parts about equal.
_PIECES = 4
_ALIGNMENT = 64  # of each piece in the buffers for parts; enough for a view of any dtype


class RequestedSlice(NamedTuple):
    """A slice of a stored tensor that an item of a plan requests; equal on all ranks that request the same slice."""

    tensor: MetadataIndex
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


# A slice to share: the stored tensor's file and offset, by which slices are sorted into the order of the files; the
# slice; and its dtype.
_Wanted: TypeAlias = tuple[tuple[str, int], RequestedSlice, torch.dtype]


class SharedBox(NamedTuple):
    """A piece of a shared tensor: a box within a requested slice, and the rank that reads it (``source``)."""

    source: int
    wanted: RequestedSlice
    dtype: torch.dtype
    offsets: tuple[int, ...]  # within the requested slice
    lengths: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The size of the box in bytes."""
        return math.prod(self.lengths) * self.dtype.itemsize

    @property
    def request(self) -> ReadItem:
        """An item of a load plan that requests only this box."""
        wanted = self.wanted
        begin = torch.Size(a + b for a, b in zip(wanted.offsets, self.offsets, strict=True))
        place = torch.Size(self.offsets)
        lengths = torch.Size(self.lengths)
        return ReadItem(LoadItemType.TENSOR, wanted.tensor, place, wanted.tensor, begin, lengths)


class Round(NamedTuple):
    """The pieces that the ranks in ``members`` exchange together; every member receives every piece."""

    members: tuple[int, ...]
    pieces: list[SharedBox]


@dataclasses.dataclass
class Offer:
    """A rank's message to the coordinator, sent in the rank's load plan."""

    broadcast: Broadcast
    rank: int
    nranks: int
    node: str
    is_worthwhile: bool
    # The versions of the files that the rank has opened, to detect a replacement between the ranks' opens. Empty where
    # the metadata identifies the files.
    versions: Mapping[str, tuple[int, ...]]


@dataclasses.dataclass
class Share:
    """The coordinator's answer to a rank, sent in the rank's load plan.

    For each round number it has the Round that the rank is a member of, or None.
    """

    rounds: list[Round | None]


def nbytes_of(share: Share) -> int:
    """Return the number of bytes that the rounds of a share deliver, including those that the rank reads."""
    return sum(piece.nbytes for each in share.rounds if each for piece in each.pieces)


def shared_items(share: Share, plan: LoadPlan) -> list[ReadItem]:
    """Return the items of a plan that arrive through rounds."""
    coming = {piece.wanted for each in share.rounds if each for piece in each.pieces}
    by_wanted = {slice_of(item): item for item in plan.items}
    return [item for wanted, item in by_wanted.items() if wanted in coming]


def slice_of(item: ReadItem) -> RequestedSlice:
    """Return the slice that an item of a plan requests."""
    return RequestedSlice(item.storage_index, tuple(item.storage_offsets), tuple(item.lengths))


def with_offer(
    plan: LoadPlan,
    broadcast: Broadcast,
    group: dist.ProcessGroup | None,
    path: str | os.PathLike[str],
    versions: Callable[[], Mapping[str, tuple[int, ...]]] = dict,
) -> LoadPlan:
    """Return a plan with this rank's offer; without a process group, return the plan unchanged."""
    if not (dist.is_available() and dist.is_initialized()):
        return plan
    device = device_of(group)
    if device is None and broadcast is True:
        backend = dist.get_backend_config(group)
        raise ValueError(
            f"broadcast: the process group's backend ({backend}) can broadcast neither CPU nor GPU tensors (remedy: "
            "gloo or NCCL)"
        )
    offer = Offer(
        broadcast,
        dist.get_rank(group),
        dist.get_world_size(group),
        node_identity(),
        device is not None and is_worthwhile(device.type, path),
        versions() if broadcast else {},
    )
    return dataclasses.replace(plan, storage_data=offer)


def with_shares(plans: list[LoadPlan], contents: Callable[[], ItemLocator]) -> list[LoadPlan]:
    """Return the plans of all ranks with their shares; the plans are unchanged if the ranks do not share reads.

    Raises
    ------
    ValueError
        Ranks have different values of broadcast or versions of a file, or the reader's group is not that of the load.
    """
    offers = [plan.storage_data for plan in plans]
    if len(plans) == 1 or not all(isinstance(each, Offer) for each in offers):
        return plans
    broadcast = offers[0].broadcast
    if any(each.broadcast != broadcast for each in offers):
        raise ValueError(
            f"broadcast: ranks differ: {', '.join(str(each.broadcast) for each in offers)}"
        )
    if not broadcast:
        return plans
    if [(each.rank, each.nranks) for each in offers] != [
        (k, len(plans)) for k in range(len(plans))
    ]:
        if broadcast == "auto":
            return plans
        raise ValueError(
            f"process_group: {len(plans)} ranks load, but the reader's group has {offers[0].nranks} ranks, or "
            "different ones; pass the process_group that load() has to the reader"
        )
    if broadcast == "auto" and not all(each.is_worthwhile for each in offers):
        return plans
    _check_versions(offers)
    rounds = _rounds(plans, [each.node for each in offers], contents())
    if not rounds:
        return plans
    return [
        dataclasses.replace(
            plan,
            storage_data=Share(
                [next((part for part in each if rank in part.members), None) for each in rounds]
            ),
        )
        for rank, plan in enumerate(plans)
    ]


def _check_versions(offers: list[Offer]) -> None:
    """Raise if ranks have opened different versions of a file: parts of different versions must not be combined."""
    seen: dict[tuple[str, str], tuple[int, ...]] = {}
    for offer in offers:
        for path, version in offer.versions.items():
            if seen.setdefault((offer.node, path), version) != version:
                raise ValueError(
                    f"path: ranks of a node have read the headers of different files at {path!r}; the file was "
                    "replaced or changed meanwhile, or differs for each rank (remedy: load again, or without broadcast)"
                )


def _rounds(plans: list[LoadPlan], nodes: list[str], contents: ItemLocator) -> list[list[Round]]:
    """Return the Rounds of each round number.

    The Rounds of one number have no common members, so they run at the same time.
    """
    ranks: dict[tuple[str, RequestedSlice], dict[int, ReadItem]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            ranks.setdefault((nodes[rank], slice_of(item)), {})[rank] = item
    by_members: dict[tuple[int, ...], list[_Wanted]] = {}
    for (_, wanted), items in ranks.items():
        if len(items) > 1 and math.prod(wanted.lengths) > 0:
            found = contents.item(next(iter(items.values())))
            # Share only tensors that have a payload here, which are plain. The metadata of torch's own checkpoints does
            # not tell plain tensors from subclasses (quantized ones, for example), so their items have none here.
            if found.payload is not None:
                by_members.setdefault(tuple(items), []).append(
                    ((found.info.relative_path, found.info.offset), wanted, found.payload.dtype)
                )
    rounds: list[list[Round]] = []
    free = [0] * len(plans)  # for each rank, the first round in which it has no part yet
    for members, all_wanted in by_members.items():
        for each in _assign_rounds(members, all_wanted):
            number = max(free[rank] for rank in members)
            rounds.extend([] for _ in range(number + 1 - len(rounds)))
            rounds[number].append(each)
            for rank in members:
                free[rank] = number + 1
    return rounds


def _assign_rounds(members: tuple[int, ...], all_wanted: list[_Wanted]) -> Iterator[Round]:
    """Assign the slices that ``members`` share to rounds.

    They are assigned in the order of their file offsets, which makes each rank's part of a round contiguous.
    """
    all_wanted.sort(key=lambda each: (each[0], each[1].offsets))
    nbytes_round = min(_ROUND_NBYTES, PART_NBYTES * len(members))
    nbytes_full = min(
        nbytes_round,
        sum(math.prod(wanted.lengths) * dtype.itemsize for _, wanted, dtype in all_wanted),
    )
    turn, nbytes = 0, 0
    pieces: list[SharedBox] = []
    max_nbytes = nbytes_full // len(members) // _PIECES
    for _, wanted, dtype in all_wanted:
        max_numel = max_nbytes // dtype.itemsize
        whole = (0,) * len(wanted.lengths), wanted.lengths
        for box in slabs(wanted.lengths, *whole, max_span=max(1, max_numel), max_gap=0):
            # Each round begins with the part of another rank: in a round that is not full the last parts are smaller,
            # and so no rank always reads less than the others.
            number = min(nbytes * len(members) // nbytes_full, len(members) - 1)
            source = members[(turn + number) % len(members)]
            piece = SharedBox(source, wanted, dtype, box.offsets, box.lengths)
            if pieces and nbytes + _padded(piece) > nbytes_round:
                yield Round(members, pieces)
                turn, nbytes, pieces = turn + 1, 0, []
                piece = piece._replace(source=members[turn % len(members)])
            pieces.append(piece)
            nbytes += _padded(piece)
    yield Round(members, pieces)


class Arrivals:
    """Copies pieces into the planner's tensors, one tensor after the other.

    Parameters
    ----------
    items : sequence of ReadItem
        The shared items of this rank's plan.
    resolve : function of (ReadItem, dtype)
        Returns the destination of stored elements of that dtype.
    commit : function of (ReadItem, Tensor)
        Called when the destination is filled.
    count : function of an int
        Called with the number of bytes that have arrived.
    """

    def __init__(
        self,
        items: Sequence[ReadItem],
        resolve: Callable[[ReadItem, torch.dtype], torch.Tensor],
        commit: Callable[[ReadItem, torch.Tensor], object],
        count: Callable[[int], object],
    ) -> None:
        self._items = {slice_of(item): item for item in items}
        self._resolve, self._commit, self._count = resolve, commit, count
        self._target = self._inner = torch.empty(0, device="cpu")
        self._missing = 0

    def add(self, piece: SharedBox, box: torch.Tensor) -> None:
        """Copy ``box``, the elements of a piece, to its destination. Add the pieces of a tensor in order."""
        item = self._items.get(piece.wanted)
        if item is None:  # the planner has dropped the item from the plan
            return
        if not any(piece.offsets):
            target = self._target = self._inner = self._resolve(item, piece.dtype)
            # A target that is not plain cannot be written in parts: collect its pieces in a plain tensor first.
            if piece.lengths != piece.wanted.lengths and not is_plain(target):
                self._inner = torch.empty(piece.wanted.lengths, dtype=piece.dtype, device="cpu")
            self._missing = math.prod(piece.wanted.lengths)
        places = zip(piece.offsets, piece.lengths, strict=True)
        place = tuple(slice(offset, offset + length) for offset, length in places)
        is_whole = piece.lengths == piece.wanted.lengths
        copy_values(self._inner if is_whole else self._inner[place], box)
        self._missing -= box.numel()
        if self._missing == 0 and self._inner is not self._target:
            copy_values(self._target, self._inner)
        self._count(piece.nbytes)
        if self._missing == 0:
            self._commit(item, self._target)


class Exchange:
    """Runs all rounds of a load on one rank.

    Parameters
    ----------
    share : Share
        This rank's part, as planned by the coordinator.
    group : ProcessGroup or None
        The process group of the load.
    read : function of a list of (SharedBox, Tensor)
        Reads each box from the data files into the tensor next to it, and verifies the bytes.
    deliver : function of (SharedBox, Tensor)
        Called with every piece, in the same order on all ranks.
    """

    def __init__(
        self,
        share: Share,
        group: dist.ProcessGroup | None,
        read: Callable[[list[tuple[SharedBox, torch.Tensor]]], None],
        deliver: Callable[[SharedBox, torch.Tensor], None],
    ) -> None:
        device = device_of(group)
        assert device is not None
        self._rounds = share.rounds
        self._relay = Relay(group, device)
        self._read, self._deliver = read, deliver
        self._failure: BaseException | None = None
        nbytes = [
            (sum(map(_padded, own)), sum(map(_padded, others)))
            for own, others in map(self._own_and_others, self._rounds)
        ]
        own, others = (max(each, default=0) for each in zip(*nbytes, strict=True))
        # Two buffers for this rank's parts: while one is sent, the next part is read into the other.
        self._own = [torch.empty(own, dtype=torch.uint8, device=device) for _ in range(2)]
        self._others = torch.empty(others, dtype=torch.uint8, device=device)

    def run(self, failure: BaseException | None) -> None:
        """Run all rounds; ``failure`` is an earlier error of this rank, which the first round reports to all ranks.

        Raises
        ------
        Exception
            The error of the first rank that has one. An error in the delivery of the last round is raised on its rank
            only, because the ranks do not agree on anything after it.
        """
        self._failure = failure
        try:
            boxes = self._attempt(0)
            for number, each in enumerate(self._rounds):
                self._relay.agree(self._failure)
                works, others = self._transmit(number)
                following = self._attempt(number + 1)
                for work in works:
                    work.wait()
                self._deliver_all(each, boxes | others)
                boxes = following
            if self._failure is not None:
                raise self._failure
        finally:
            self._failure = (
                None  # its traceback refers to this frame, and so to this object: a reference cycle
            )

    def _attempt(self, number: int) -> dict[SharedBox, torch.Tensor]:
        """Read this rank's part of a round."""
        if number >= len(self._rounds) or self._failure is not None:
            return {}
        own, _ = self._own_and_others(self._rounds[number])
        boxes = _lay_out(own, self._own[number % 2])
        try:
            self._read(list(boxes.items()))
        except BaseException as error:
            self._failure = error  # reported to all ranks by the next agree()
        return boxes

    def _transmit(self, number: int) -> tuple[list[Any], dict[SharedBox, torch.Tensor]]:
        """Begin to send this rank's part of a round, and to receive the parts of the other members.

        Return the transfers to wait for, and a tensor for each piece that they receive.
        """
        each = self._rounds[number]
        own, others = self._own_and_others(each)
        received, begin = [], 0
        for source in dict.fromkeys(piece.source for piece in others):
            end = begin + sum(_padded(piece) for piece in others if piece.source == source)
            received.append((source, self._others[begin:end]))
            begin = end
        memory = self._own[number % 2][: sum(map(_padded, own))]
        works = self._relay.exchange(memory, () if each is None else each.members, received)
        return works, _lay_out(others, self._others)

    def _deliver_all(self, each: Round | None, boxes: dict[SharedBox, torch.Tensor]) -> None:
        if each is None or self._failure is not None:
            return
        try:
            for piece in each.pieces:
                self._deliver(piece, boxes[piece])
        except BaseException as error:
            self._failure = error

    def _own_and_others(self, each: Round | None) -> tuple[list[SharedBox], list[SharedBox]]:
        """Return the pieces of a round that this rank reads, and those that it receives."""
        pieces = [] if each is None else each.pieces
        rank = self._relay.rank
        own = [piece for piece in pieces if piece.source == rank]
        return own, [piece for piece in pieces if piece.source != rank]


def _lay_out(pieces: list[SharedBox], memory: torch.Tensor) -> dict[SharedBox, torch.Tensor]:
    """Return a tensor in ``memory`` for each piece, one after the other."""
    boxes, begin = {}, 0
    for piece in pieces:
        box = memory[begin : begin + piece.nbytes].view(piece.dtype).view(piece.lengths)
        boxes[piece] = box
        begin += _padded(piece)
    return boxes


def _padded(piece: SharedBox) -> int:
    return -(-piece.nbytes // _ALIGNMENT) * _ALIGNMENT
