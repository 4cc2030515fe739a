"""Counters of several schedulers, added up.

A scheduler is the core's object that owns worker threads and their queues, and counts what they transfer.
"""

from __future__ import annotations

from typing import Any


def summed_stats(every: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the sums of several schedulers' counters.

    Percentiles of the latency cannot be added: for each of them the result has the highest value of any scheduler.
    """
    latencies = [counted["block_latency_microseconds"] for counted in every]
    return {
        "engine": ", ".join(dict.fromkeys(counted["engine"] for counted in every)),
        **{
            name: sum(counted[name] for counted in every)
            for name, value in every[0].items()
            if isinstance(value, int)
        },
        "block_latency_microseconds": {
            name: max(latency[name] for latency in latencies) for name in latencies[0]
        },
    }
