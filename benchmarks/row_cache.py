"""``python -m benchmarks.row_cache``: hit rates of the row cache compared with LRU and the ideal policy.

A trace has batches of 4,096 ids of a table of a million rows. The hit rate is the fraction of the distinct ids of a
batch that the cache holds. The first half of a trace only warms the cache. Each policy is a function that yields the
number of hits of each batch, with a cache that has places for a number of rows.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorferry.offload.row_cache import RowCache

if TYPE_CHECKING:
    from collections.abc import Iterator

ROWS, BATCH_IDS, BATCHES, PLACES = 1_000_000, 4096, 120, (10_000, 50_000)
TRACES = [*((kind, a) for kind in ("zipf", "drift", "scan", "again") for a in (0.8, 1.0, 1.2))]


def trace(kind: str, a: float) -> Iterator[Any]:
    """Yield batches of ids with a Zipf-like distribution: the k-th most popular row has a share of k**-a.

    "zipf" is that distribution alone. With "drift" the popularity of rows changes between batches. With "scan" half of
    each batch is a sequential scan of the table. With "again" half of each batch repeats ids of the last eight batches.
    """
    draw = np.random.default_rng(1)
    shares = np.cumsum(np.arange(1, ROWS + 1) ** -a)
    row_of, recent = draw.permutation(ROWS), deque[Any](maxlen=8)
    for number in range(BATCHES):
        ids = row_of[np.searchsorted(shares, draw.random(BATCH_IDS) * shares[-1])]
        half = BATCH_IDS // 2
        if kind == "drift":
            some, others = draw.integers(0, ROWS // 50, 400), draw.integers(0, ROWS, 400)
            row_of[some], row_of[others] = row_of[others], row_of[some]
        elif kind == "scan":
            ids[half:] = np.arange(number * half, (number + 1) * half) % ROWS
        elif kind == "again" and recent:
            ids[half:] = draw.choice(np.concatenate(recent), half)
        recent.append(ids)
        yield np.unique(ids)


def ours(batches: list[Any], places: int) -> Iterator[int]:
    # Rows of 8 bytes; the cache needs 25 more bytes for each.
    cache = RowCache(places * (8 + 25), 8)
    for ids in batches:
        rows = ids.view(np.uint8).reshape(-1, 8)
        here = cache.look_up(ids, np.empty_like(rows))
        cache.offer(ids[~here], rows[~here])
        yield int(here.sum())


def lru(batches: list[Any], places: int) -> Iterator[int]:
    held: OrderedDict[int, None] = OrderedDict()
    for ids in batches:
        hits = 0
        for one in ids.tolist():
            hits += one in held
            held[one] = None
            held.move_to_end(one)
            if len(held) > places:
                held.popitem(last=False)
        yield hits


def ideal(batches: list[Any], places: int) -> Iterator[int]:
    """Keep the rows that are used again soonest, which needs the future ids (Belady's policy)."""
    following: list[list[int]] = []
    seen: dict[int, int] = {}
    for number in reversed(range(len(batches))):
        ids = batches[number].tolist()
        following.append([seen.get(one, BATCHES) for one in ids])
        seen.update(dict.fromkeys(ids, number))
    kept: dict[int, int] = {}
    heap: list[tuple[int, int]] = []
    for ids, when in zip(batches, reversed(following), strict=True):
        yield sum(one in kept for one in ids.tolist())
        for one, next_time in zip(ids.tolist(), when, strict=True):
            kept[one] = next_time
            heapq.heappush(heap, (-next_time, one))
        while len(kept) > places:
            next_time, one = heapq.heappop(heap)
            if kept.get(one) == -next_time:
                del kept[one]


POLICIES = {"ours": ours, "LRU": lru, "ideal": ideal}


def main() -> None:
    print("| trace | places |", " | ".join(POLICIES), "|")
    for kind, a in TRACES:
        batches = list(trace(kind, a))
        last = batches[BATCHES // 2 :]
        for places in PLACES:
            hits = [sum([*policy(batches, places)][BATCHES // 2 :]) for policy in POLICIES.values()]
            shares = (f"{100 * hit / sum(map(len, last)):.0f} %" for hit in hits)
            print(f"| {kind} {a} | {places:,} |", " | ".join(shares), "|", flush=True)


if __name__ == "__main__":
    main()
