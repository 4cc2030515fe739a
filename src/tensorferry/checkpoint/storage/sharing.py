"""Reads that ranks share: what several ranks of a node want is read by one of them, and handed on by the process group.

The coordinator, which sees the plans of all ranks, cuts such tensors into pieces, in the order in which they lie in the
files, and deals these out to rounds. Within a round each rank that wants the pieces reads and verifies a part of them,
into memory of its own. Then all ranks agree that nobody has failed, and the parts go from rank to rank while those of
the next round are read; so a failure ends the load on all ranks, and nothing that is damaged is handed on.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from tensorferry.base.ranks import Relay, device_of, is_worthwhile, node
from tensorferry.checkpoint.storage.delivery import is_plain

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch.distributed.checkpoint.metadata import MetadataIndex

    from tensorferry.base.ranks import Broadcast
    from tensorferry.checkpoint.storage.contents import Located, StoredItem

# A round is so much for each of its ranks, and so much at most. A rank has in memory a round and its part of the next;
# at the edges of its part a chunk is read by others as well.
PART_NBYTES = 8 << 20
_ROUND_NBYTES = 32 << 20
# A rank's part of a round is at least so many pieces, so that parts are about equal.
_PIECES = 4
_ALIGNMENT = 64  # any dtype's


class Wanted(NamedTuple):
    """A slice of a stored tensor, as a plan's item asks for it: equal on all ranks that want the same."""

    tensor: MetadataIndex
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


class SharedBox(NamedTuple):
    """A box of what is wanted, and the rank that reads it."""

    source: int
    wanted: Wanted
    dtype: torch.dtype
    offsets: tuple[int, ...]  # within what is wanted
    lengths: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """How much memory it has."""
        return math.prod(self.lengths) * self.dtype.itemsize

    @property
    def request(self) -> ReadItem:
        """The item of a plan that asks for the piece alone."""
        wanted = self.wanted
        begin = torch.Size(a + b for a, b in zip(wanted.offsets, self.offsets, strict=True))
        place = torch.Size(self.offsets)
        lengths = torch.Size(self.lengths)
        return ReadItem(LoadItemType.TENSOR, wanted.tensor, place, wanted.tensor, begin, lengths)


class Round(NamedTuple):
    """What ranks (of the group) hand to each other at a time: every piece goes to all of them."""

    members: tuple[int, ...]
    pieces: list[SharedBox]


@dataclasses.dataclass
class Offer:
    """What a rank tells the coordinator, in its plan."""

    broadcast: Broadcast
    rank: int
    nranks: int
    node: str
    is_worthwhile: bool
    # Which files those are that it wants, where nothing else tells that another rank has found others in their places.
    versions: Mapping[str, tuple[int, ...]]


@dataclasses.dataclass
class Share:
    """What the coordinator tells a rank, in its plan: its part in each round, None where it has none."""

    rounds: list[Round | None]


def nbytes_of(share: Share) -> int:
    """Return how much comes by rounds."""
    return sum(piece.nbytes for each in share.rounds if each for piece in each.pieces)


def shared_items(share: Share, plan: LoadPlan) -> list[ReadItem]:
    """Return the items of a plan that come by rounds."""
    coming = {piece.wanted for each in share.rounds if each for piece in each.pieces}
    by_wanted = {wanted_by(item): item for item in plan.items}
    return [item for wanted, item in by_wanted.items() if wanted in coming]


def wanted_by(item: ReadItem) -> Wanted:
    """Return what an item of a plan wants."""
    return Wanted(item.storage_index, tuple(item.storage_offsets), tuple(item.lengths))


def offered(
    plan: LoadPlan,
    broadcast: Broadcast,
    group: dist.ProcessGroup | None,
    path: str | os.PathLike[str],
    versions: Callable[[], Mapping[str, tuple[int, ...]]] = dict,
) -> LoadPlan:
    """Return a plan with what its rank offers, where there is a process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return plan
    device = device_of(group)
    if device is None and broadcast is True:
        backend = dist.get_backend_config(group)
        raise ValueError(
            f"broadcast: the process group ({backend}) moves no memory of CPUs or GPUs"
        )
    offer = Offer(
        broadcast,
        dist.get_rank(group),
        dist.get_world_size(group),
        node(),
        device is not None and is_worthwhile(device.type, path),
        versions() if broadcast else {},
    )
    return dataclasses.replace(plan, storage_data=offer)


def shared(plans: list[LoadPlan], contents: Callable[[], Located]) -> list[LoadPlan]:
    """Return the plans of all ranks with what they share, if they are to.

    Raises
    ------
    ValueError
        Ranks differ in what they ask for or have found, or their process group is not the one that loads.
    """
    offers = [plan.storage_data for plan in plans]
    if len(plans) == 1 or not all(isinstance(each, Offer) for each in offers):
        return plans
    broadcast = offers[0].broadcast
    if any(each.broadcast != broadcast for each in offers):
        raise ValueError(
            f"broadcast: ranks differ in it: {', '.join(str(each.broadcast) for each in offers)}"
        )
    if not broadcast:
        return plans
    if [(each.rank, each.nranks) for each in offers] != [
        (k, len(plans)) for k in range(len(plans))
    ]:
        if broadcast == "auto":
            return plans
        raise ValueError(
            f"process_group: the load is by {len(plans)} ranks, and the reader's group has "
            f"{offers[0].nranks}, or others; give it the process_group that load() has"
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
    """Refuse to put tensors together from what ranks have taken for the same file."""
    seen: dict[tuple[str, str], tuple[int, ...]] = {}
    for offer in offers:
        for path, version in offer.versions.items():
            if seen.setdefault((offer.node, path), version) != version:
                raise ValueError(
                    f"path: ranks of a node have read the headers of different files {path!r}, which was replaced or "
                    "changed meanwhile, or is another one in each (remedy: load again, or without broadcast)"
                )


def _rounds(plans: list[LoadPlan], nodes: list[str], contents: Located) -> list[list[Round]]:
    """Return the rounds; in each of them a rank has a part once at most."""
    ranks: dict[tuple[str, Wanted], dict[int, ReadItem]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            ranks.setdefault((nodes[rank], wanted_by(item)), {})[rank] = item
    by_members: dict[tuple[int, ...], list[tuple[StoredItem, Wanted]]] = {}
    for (_, wanted), items in ranks.items():
        if len(items) > 1 and (stored := contents.stored(next(iter(items.values())))) is not None:
            nbytes = math.prod(wanted.lengths) * stored.dtype.itemsize
            if nbytes > 0:
                by_members.setdefault(tuple(items), []).append((stored, wanted))
    rounds: list[list[Round]] = []
    free = [0] * len(plans)  # from which round on a rank has no part yet
    for members, all_wanted in by_members.items():
        for each in _dealt(members, all_wanted):
            number = max(free[rank] for rank in members)
            rounds.extend([] for _ in range(number + 1 - len(rounds)))
            rounds[number].append(each)
            for rank in members:
                free[rank] = number + 1
    return rounds


def _dealt(
    members: tuple[int, ...], all_wanted: list[tuple[StoredItem, Wanted]]
) -> Iterator[Round]:
    """Deal out what ranks want, in the order in which it lies: a rank's part of a round is in one place."""
    all_wanted.sort(key=lambda each: (each[0].place, each[1].offsets))
    nbytes_round = min(_ROUND_NBYTES, PART_NBYTES * len(members))
    nbytes_full = min(
        nbytes_round,
        sum(math.prod(wanted.lengths) * stored.dtype.itemsize for stored, wanted in all_wanted),
    )
    turn, nbytes = 0, 0
    pieces: list[SharedBox] = []
    max_nbytes = nbytes_full // len(members) // _PIECES
    for stored, wanted in all_wanted:
        max_numel = max_nbytes // stored.dtype.itemsize
        for offsets, lengths in _boxes(wanted.lengths, max(1, max_numel)):
            # Ranks begin in turn, as the last ones have less of a round that is not full.
            number = min(nbytes * len(members) // nbytes_full, len(members) - 1)
            source = members[(turn + number) % len(members)]
            piece = SharedBox(source, wanted, stored.dtype, offsets, lengths)
            if pieces and nbytes + _padded(piece) > nbytes_round:
                yield Round(members, pieces)
                turn, nbytes, pieces = turn + 1, 0, []
                piece = piece._replace(source=members[turn % len(members)])
            pieces.append(piece)
            nbytes += _padded(piece)
    yield Round(members, pieces)


def _boxes(
    lengths: tuple[int, ...], max_numel: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a box that is not empty into (offsets, lengths) of at most so many elements, in row-major order."""
    numel = math.prod(lengths)
    if numel <= max_numel:
        yield (0,) * len(lengths), lengths
        return
    rows = max_numel * lengths[0] // numel
    if rows > 0:
        for begin in range(0, lengths[0], rows):
            yield (
                (begin,) + (0,) * (len(lengths) - 1),
                (min(rows, lengths[0] - begin), *lengths[1:]),
            )
        return
    inner = list(_boxes(lengths[1:], max_numel))
    for index in range(lengths[0]):
        yield from (((index, *offsets), (1, *sizes)) for offsets, sizes in inner)


class Arrivals:
    """Puts pieces where the planner wants them, one tensor after the other.

    Parameters
    ----------
    items : sequence of ReadItem
        Those of this rank's plan that are shared.
    resolve : function of (ReadItem, dtype)
        Returns the destination of stored elements of that dtype.
    commit : function of (ReadItem, Tensor)
        Told when it is filled.
    count : function of an int
        Told of bytes that have arrived.
    """

    def __init__(
        self,
        items: Sequence[ReadItem],
        resolve: Callable[[ReadItem, torch.dtype], torch.Tensor],
        commit: Callable[[ReadItem, torch.Tensor], object],
        count: Callable[[int], object],
    ) -> None:
        self._items = {wanted_by(item): item for item in items}
        self._resolve, self._commit, self._count = resolve, commit, count
        self._target = self._inner = torch.empty(0, device="cpu")
        self._missing = 0

    def add(self, piece: SharedBox, box: torch.Tensor) -> None:
        """Copy a piece."""
        item = self._items.get(piece.wanted)
        if item is None:  # the planner has dropped it
            return
        if not any(piece.offsets):
            target = self._target = self._inner = self._resolve(item, piece.dtype)
            if piece.lengths != piece.wanted.lengths and not is_plain(target):
                self._inner = torch.empty(piece.wanted.lengths, dtype=piece.dtype, device="cpu")
            self._missing = math.prod(piece.wanted.lengths)
        places = zip(piece.offsets, piece.lengths, strict=True)
        place = tuple(slice(offset, offset + length) for offset, length in places)
        is_whole = piece.lengths == piece.wanted.lengths
        with torch.no_grad():
            (self._inner if is_whole else self._inner[place]).copy_(box)
            self._missing -= box.numel()
            if self._missing == 0 and self._inner is not self._target:
                self._target.copy_(self._inner)
        self._count(piece.nbytes)
        if self._missing == 0:
            self._commit(item, self._target)


class Exchange:
    """What a rank does in all rounds of a load.

    Parameters
    ----------
    share : Share
        The coordinator's plan for it.
    group : ProcessGroup or None
        The one that loads.
    read : function of a list of (SharedBox, Tensor)
        Fills the tensors, verified.
    give : function of (SharedBox, Tensor)
        Called with all pieces, in the same order on all ranks.
    """

    def __init__(
        self,
        share: Share,
        group: dist.ProcessGroup | None,
        read: Callable[[list[tuple[SharedBox, torch.Tensor]]], None],
        give: Callable[[SharedBox, torch.Tensor], None],
    ) -> None:
        device = device_of(group)
        assert device is not None
        self._rounds = share.rounds
        self._relay = Relay(group, device)
        self._read, self._give = read, give
        self._failure: BaseException | None = None
        nbytes = [
            (sum(map(_padded, own)), sum(map(_padded, others)))
            for own, others in map(self._own_and_others, self._rounds)
        ]
        own, others = (max(each, default=0) for each in zip(*nbytes, strict=True))
        # Two for its own parts: while one goes to others, the next is read.
        self._own = [torch.empty(own, dtype=torch.uint8, device=device) for _ in range(2)]
        self._others = torch.empty(others, dtype=torch.uint8, device=device)

    def run(self, failure: BaseException | None) -> None:
        """Go through all rounds; ``failure`` is what has gone wrong on this rank before.

        Raises
        ------
        Exception
            The failure of the first rank that has one; of what comes after the last round, this rank's alone.
        """
        self._failure = failure
        try:
            boxes = self._attempt(0)
            for number, each in enumerate(self._rounds):
                self._relay.agree(self._failure)
                works, others = self._hand_on(number)
                following = self._attempt(number + 1)
                for work in works:
                    work.wait()
                self._give_all(each, boxes | others)
                boxes = following
            if self._failure is not None:
                raise self._failure
        finally:
            self._failure = None  # its traceback holds this frame

    def _attempt(self, number: int) -> dict[SharedBox, torch.Tensor]:
        """Read this rank's part of a round."""
        if number >= len(self._rounds) or self._failure is not None:
            return {}
        own, _ = self._own_and_others(self._rounds[number])
        boxes = _laid_out(own, self._own[number % 2])
        try:
            self._read(list(boxes.items()))
        except BaseException as error:
            self._failure = error  # all ranks hear of it when they agree
        return boxes

    def _hand_on(self, number: int) -> tuple[list[Any], dict[SharedBox, torch.Tensor]]:
        """Begin to send this rank's part of a round, and to receive those of others; return their pieces."""
        each = self._rounds[number]
        own, others = self._own_and_others(each)
        received, begin = [], 0
        for source in dict.fromkeys(piece.source for piece in others):
            end = begin + sum(_padded(piece) for piece in others if piece.source == source)
            received.append((source, self._others[begin:end]))
            begin = end
        memory = self._own[number % 2][: sum(map(_padded, own))]
        works = self._relay.hand_on(memory, () if each is None else each.members, received)
        return works, _laid_out(others, self._others)

    def _give_all(self, each: Round | None, boxes: dict[SharedBox, torch.Tensor]) -> None:
        if each is None or self._failure is not None:
            return
        try:
            for piece in each.pieces:
                self._give(piece, boxes[piece])
        except BaseException as error:
            self._failure = error

    def _own_and_others(self, each: Round | None) -> tuple[list[SharedBox], list[SharedBox]]:
        """Return the pieces of a round that this rank reads, and those that it receives."""
        pieces = [] if each is None else each.pieces
        rank = self._relay.rank
        own = [piece for piece in pieces if piece.source == rank]
        return own, [piece for piece in pieces if piece.source != rank]


def _laid_out(pieces: list[SharedBox], memory: torch.Tensor) -> dict[SharedBox, torch.Tensor]:
    """Return tensors for pieces, one behind the other in memory."""
    boxes, begin = {}, 0
    for piece in pieces:
        box = memory[begin : begin + piece.nbytes].view(piece.dtype).view(piece.lengths)
        boxes[piece] = box
        begin += _padded(piece)
    return boxes


def _padded(piece: SharedBox) -> int:
    return -(-piece.nbytes // _ALIGNMENT) * _ALIGNMENT
