"""One large tensor to a file and back: compared with fio, plain Python and DeepSpeed, and in segments.

Rules: all contenders use O_DIRECT and no fsync. Every write uses a new preallocated file, and the file is dropped from
the page cache before each read. Only "plain Python write + fsync, readinto" uses the page cache. The same rows show
the memory that a contender needs in addition to the tensor. The fast block device is ext4 on a loop device over memory
(root only).
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from benchmarks import peers
from benchmarks.bench import GIB, LARGE, MIB, Config, measured, reads, scenario, writes
from benchmarks.memory import write_pattern
from tensorferry.tuning.scratch import make_warm, remove

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.bench import Bench, Measure
    from tensorferry.tuning.rounds import Comparison

    Ways = dict[str, dict[str, Measure]]  # by kind and label

SEED = 7
LOOP_DEPTH = 32
LOOP_FIOS = [config for config in LARGE if config.queue_depth == LOOP_DEPTH]
ODD_NBYTES, ODD_OFFSET = 1_000_003, 7
_GROWTH_NBYTES_MAX = 16 * MIB  # in addition to the bounce pool

LOCKED = "tensorferry handle, locked"
PLAIN = "tensorferry handle, torch.empty"
ODD = f"tensorferry handle, torch.empty, + {ODD_NBYTES:,} bytes at offset {ODD_OFFSET}"
FUNCTIONS = "tensorferry.write/read, torch.empty"
DIRECT = "plain Python, O_DIRECT 8 MiB blocks"


def fresh_and_cold(
    bench: Bench,
    name: str,
    ways: Callable[[Callable[..., Measure]], Ways],
    configs: list[Config],
    source_nbytes: int = 0,
) -> list[tuple[Comparison, str]]:
    """Compare writes of fresh files, then cold reads of one file, with fio; return each comparison and its title.

    ``ways`` receives :func:`writes` or :func:`reads` with its file, and returns the contenders by kind and label.
    """
    target, source = bench.directory / "target", bench.directory / "source"
    by_fio = bench.fio(configs, target, "write", bench.nbytes)
    rules = "fresh preallocated files, O_DIRECT, no fsync"
    written = bench.compare(f"{name} write", rules, **ways(writes(target, seed=SEED)), more=by_fio)
    remove(target)
    # All contenders read the same file, because the position of a file on the drive influences the speed.
    write_pattern(source, source_nbytes or bench.nbytes, SEED)
    by_fio = bench.fio(configs, source, "read", bench.nbytes)
    rules = "cold file, O_DIRECT"
    was_read = bench.compare(f"{name} read", rules, **ways(reads(source, seed=SEED)), more=by_fio)
    remove(source)
    what = f"{name}: {bench.nbytes / GIB:.3g} GiB"
    return [(written, f"{what} write"), (was_read, f"{what} cold read")]


@scenario
def large(bench: Bench) -> None:
    """Compare the default handle with fio's best configuration. The targets are fractions of fio's speed."""
    nbytes, odd_nbytes = bench.nbytes, bench.nbytes + ODD_NBYTES
    worker = bench.worker
    ours = {
        LOCKED: worker(peers.Handle, nbytes=nbytes, locked=True),
        PLAIN: worker(peers.Handle, nbytes=nbytes, locked=False),
        ODD: worker(peers.Handle, nbytes=odd_nbytes, locked=False),
        "tensorferry.write/read, tensorferry.empty": worker(
            peers.Functions, nbytes=nbytes, aligned=True
        ),
        FUNCTIONS: worker(peers.Functions, nbytes=nbytes, aligned=False),
    }
    theirs = {
        "plain Python write + fsync, readinto": worker(peers.Buffered, nbytes=nbytes),
        DIRECT: worker(peers.Direct, nbytes=nbytes),
    }

    def ways(action: Callable[..., Measure]) -> Ways:
        at = {ODD: {"offset": ODD_OFFSET}}
        return {
            "ours": {label: action(w, **at.get(label, {})) for label, w in ours.items()},
            "peer": {label: action(w) for label, w in theirs.items()},
        }

    # The source has room for the longest read, which begins at an offset.
    found = fresh_and_cold(bench, "large", ways, LARGE, ODD_OFFSET + odd_nbytes)
    if not any(config.huge_pages for config in bench.usable(LARGE)):
        bench.note("no free huge pages: fio's configurations with huge pages are missing")
    pool_nbytes = ours[FUNCTIONS].call("pool_nbytes")
    for comparison, what in found:
        for label, target in {LOCKED: 0.97, PLAIN: 0.92, ODD: 0.92}.items():
            short = label.removeprefix("tensorferry handle, ")
            bench.over_fio(f"{what}, {short}", target, comparison, label)
        peak = f"{what}, growth of peak memory, bounce pool ({pool_nbytes // MIB} MiB) + 16 MiB"
        bench.peak(peak, pool_nbytes + _GROWTH_NBYTES_MAX, comparison, FUNCTIONS)
        for tag, limit in (("unregistered", 1.1), ("registered", 1.5)):
            least = comparison.least_cpu("fio", "io_uring", "1M", tag)  # our block size
            over = comparison.cpu_over(LOCKED, least)
            note = f"{least.label}, {least.cpu_seconds_per_gb or 0:.4f} s/GB" if least else "no fio"
            bench.at_most(f"{what}, locked: CPU over fio io_uring {tag}", limit, over, note)


# Our handle compared with DeepSpeed's, in each of its configurations, with locked and ordinary memory


def _configurations(smoke: bool) -> list[dict[str, Any]]:
    """Return the options of each configuration.

    The parallelism is not 3, because DeepSpeed's handle rejects sizes that its parallelism does not divide.
    """
    switches = (False,) if smoke else (False, True)
    names = ("single_submit", "overlap_events", "intra_op_parallelism")
    every = itertools.product(switches, switches, (1,) if smoke else (1, 2, 4))
    return [dict(zip(names, each, strict=True)) for each in every]


def _label(product: str, options: dict[str, Any]) -> str:
    words = [product, f"T{options['intra_op_parallelism']}"]
    words += ["single"] * options["single_submit"] + ["overlap"] * options["overlap_events"]
    return " ".join(words)


@scenario
def deepspeed(bench: Bench) -> None:
    """Compare writes of fresh files, overwrites of existing files (as a swapper does), and cold reads."""
    if not bench.deepspeed_wanted():
        return
    source, target = bench.directory / "source", bench.directory / "target"
    write_pattern(source, bench.nbytes, SEED)
    actions = {
        "write": writes(target, seed=SEED),
        "overwrite": writes(target, lambda path: None, seed=SEED),
        "read": reads(source, seed=SEED),
    }
    for memory, wanted in (("locked", 1.0), ("unpinned", 1.5)):
        how = {"nbytes": bench.nbytes, "locked": memory == "locked"}
        products = {
            "tensorferry": ("ours", bench.worker(peers.Handle, **how)),
            "DeepSpeed": ("peer", bench.worker(peers.DeepSpeedHandle, **how)),
        }
        for name, action in actions.items():
            ways: Ways = {"ours": {}, "peer": {}}
            for options in _configurations(bench.smoke):
                for product, (kind, worker) in products.items():
                    ways[kind][_label(product, options)] = action(worker, **options)
            found = bench.compare(f"deepspeed {name}, {memory}", "O_DIRECT, no fsync", **ways)
            _worst(bench, found, wanted)
        for _, worker in products.values():
            worker.close()


def _worst(bench: Bench, comparison: Comparison, wanted: float) -> None:
    """Promise the worst ratio of all configurations, and note which contenders failed."""
    ratios = {
        _label("", options).strip(): value
        for options in _configurations(bench.smoke)
        if (value := comparison.over(*(_label(p, options) for p in ("tensorferry", "DeepSpeed"))))
        is not None
    }
    failed = [f"{r.label}: {r.failure}" for r in comparison.rows if r.failure]
    worst = min(ratios, key=lambda name: ratios[name]) if ratios else None
    note = f"worst: {worst}; best: {max(ratios.values()):.2f}" if worst else ""
    note += f"; failed: {failed[0]} (and {len(failed) - 1} more)" if failed else ""
    what = f"{comparison.name} over DeepSpeed, every configuration"
    bench.at_least(what, wanted, ratios[worst] if worst else None, note.strip("; "))


# Many segments of memory as one transfer, with and without checksums, compared with one array of the same size

SEGMENT_NBYTES = (16 << 10, 64 << 10, MIB)
ONE = "one array"
LIMIT = "one copy and one CRC-32, one thread"


@scenario
def segments(bench: Bench) -> None:
    """Compare segments of ordinary memory in ``--directory``, and on a fast device, where the processor limits."""
    _segments(bench, "segments:", {}, LARGE, 0.95)
    with bench.on_drive(3 * bench.nbytes + 64 * MIB) as quick:
        name, options = "segments, fast device:", {"queue_depth": LOOP_DEPTH}
        for comparison, what in _segments(quick, name, options, LOOP_FIOS, 0.85):
            for label, target in ((ONE, 0.85), (_pieces(0, True), 0.75)):
                bench.over_fio(f"{what}, {label} over fio", target, comparison, label)


def _pieces(segment_nbytes: int, checked: bool) -> str:
    what = f"{segment_nbytes >> 10} KiB" if segment_nbytes else ONE
    return f"{what}, checksums" if checked else what


def _segments(
    bench: Bench, name: str, options: dict[str, Any], configs: list[Config], wanted: float
) -> list[tuple[Comparison, str]]:
    how = {"nbytes": bench.nbytes, "options": options}
    workers = {
        each: bench.worker(peers.Segments, segment_nbytes=each or bench.nbytes, **how)
        for each in (0, *SEGMENT_NBYTES)
    }
    limit = measured(bench.worker(peers.CopyAndChecksum, nbytes=bench.nbytes), "run")

    def ways(action: Callable[..., Measure]) -> Ways:
        moves = {
            _pieces(each, checked): action(worker, checked=checked)
            for each, worker in workers.items()
            for checked in (False, True)
        }
        return {"ours": moves, "limit": {LIMIT: limit}}

    found = fresh_and_cold(bench, name, ways, configs)
    for comparison, what in found:
        for nbytes in SEGMENT_NBYTES:
            plain, checked = _pieces(nbytes, False), _pieces(nbytes, True)
            bench.at_least(f"{what}, {plain} over {ONE}", wanted, comparison.over(plain, ONE))
            over_plain = comparison.over(checked, plain)
            bench.at_least(f"{what}, {checked} over no checksums", wanted, over_plain)
            cpu = comparison.cpu_over(checked, LIMIT)
            bench.at_most(f"{what}, {checked}: CPU over {LIMIT}", 1.4, cpu)
    return found


# A file in the page cache: tensorferry must choose the faster of buffered and direct reads automatically

READINTO = "plain Python readinto"
TOLD = "tensorferry.read direct=True"


@scenario
def warm(bench: Bench) -> None:
    """Compare reads of one file, which is read into the page cache before each measurement."""
    nbytes, worker, path = bench.nbytes, bench.worker, bench.directory / "source"
    write_pattern(path, nbytes, SEED)
    read = reads(path, make_warm, seed=SEED)
    aligned = worker(peers.Functions, nbytes=nbytes, aligned=True)
    by_itself = {
        "tensorferry.read, torch.empty": read(
            worker(peers.Functions, nbytes=nbytes, aligned=False)
        ),
        "tensorferry.read, tensorferry.empty": read(aligned),
        "tensorferry handle, locked": read(worker(peers.Handle, nbytes=nbytes, locked=True)),
    }
    comparison = bench.compare(
        "warm read",
        "the whole file in the page cache",
        ours=by_itself
        | {
            TOLD: read(aligned, direct=True),
            "tensorferry.read direct=False": read(aligned, direct=False),
        },
        peer={
            READINTO: read(worker(peers.Buffered, nbytes=nbytes)),
            DIRECT: read(worker(peers.Direct, nbytes=nbytes)),
        },
        more=bench.fio([Config("psync", MIB, 1, direct=False)], path, "read", nbytes, make_warm),
    )
    known = [row for label in (READINTO, TOLD, DIRECT) if (row := comparison.row(label))]
    better = max(known, key=lambda row: row.median, default=None)
    for label in by_itself:
        over = comparison.over(label, better)
        bench.at_least(f"warm: {label}", 0.95, over, comparison.describe(better, "faster way"))
