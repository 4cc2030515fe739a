"""Counters of several schedulers, added up."""

from __future__ import annotations

from typing import Any


def summed_stats(every: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the sums of several schedulers' counters.

    Percentiles cannot be added: a percentile of the result is the highest value that a scheduler has for it.
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
