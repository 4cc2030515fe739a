"""Saving safetensors: save_file beside safetensors' own, torch's Hugging Face storage beside torch's, and fio.

Rules: one process, fresh files, all on the drive at the end: fsync inside everybody's clock. fio writes one file of as
many bytes with O_DIRECT. The Hugging Face storage saves a whole state by rank 0, and loads it cold and from the page
cache into tensors that are there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks import files, fio
from benchmarks.actions import measured
from benchmarks.bench import contenders, scenario, synced_fio_writes
from benchmarks.harness import MIB

if TYPE_CHECKING:
    from benchmarks.bench import Bench
    from benchmarks.harness import Contender

SAVE_FILE = "tensorferry.safetensors save_file, sync=True"
THEIR_SAVE_FILE = "safetensors.torch.save_file, fsync"
STORAGE = "tensorferry HuggingFaceStorageWriter/Reader"
THEIR_STORAGE = "torch HuggingFaceStorageWriter/Reader"

_PEER = "benchmarks.peers.safetensors:Saver"
_SAVE_ROUNDS_MAX = 3  # torch's storage takes 10 seconds for each
_FIOS = [
    fio.Config("io_uring", MIB, 32),
    fio.Config("libaio", MIB, 128),
    fio.Config("io_uring", 4 * MIB, 32, registered=True, huge_pages=True),
]


@scenario
def run(bench: Bench) -> None:
    """save_file."""
    path, nbytes = bench.directory / "target", 5 * bench.nbytes // 2

    def save(label: str) -> Any:
        worker = bench.worker(_PEER, nbytes=nbytes, ours=label == SAVE_FILE)
        return {label: measured(worker, "save", files.remove, [path], clean=True, path=str(path))}

    saving = bench.compare(
        "safetensors save_file",
        "fresh file, synced",
        [
            *contenders("ours", save(SAVE_FILE)),
            *contenders("peer", save(THEIR_SAVE_FILE)),
            *synced_fio_writes(bench, _FIOS, path, nbytes),
        ],
    )
    over_theirs = saving.over(SAVE_FILE, THEIR_SAVE_FILE)
    bench.at_least("save_file over safetensors", 2.0, over_theirs)
    bench.over_fio("save_file over fio", 0.92, saving, SAVE_FILE)


@scenario
def run_storage(bench: Bench) -> None:
    """torch.distributed.checkpoint's classes."""
    ours = bench.worker(_PEER, nbytes=bench.nbytes, ours=True)
    theirs = bench.worker(_PEER, nbytes=bench.nbytes, ours=False)
    saved, model = bench.directory / "saved", bench.directory / "model"
    ours.call("save_by_storage", path=str(model))
    (file,) = model.glob("*.safetensors")

    def both(call: str, *prepared: Any, **options: Any) -> list[Contender]:
        mine, other = (measured(w, call, *prepared, **options) for w in (ours, theirs))
        return contenders("ours", {STORAGE: mine}) + contenders("peer", {THEIR_STORAGE: other})

    remove, everything = files.remove_directory, list(model.iterdir())
    saves = both("save_by_storage", remove, [saved], clean=True, path=str(saved))
    saves += synced_fio_writes(bench, _FIOS, bench.directory / "target", bench.nbytes)
    few = bench.rounds_at_most(_SAVE_ROUNDS_MAX)
    save = bench.compare("Hugging Face storage save", "fresh directory, synced", saves, rounds=few)

    reads = both("load_by_storage", files.make_cold, everything, path=str(model))
    reads += fio.contenders(bench.settings, _FIOS, file, "read", file.stat().st_size)
    cold = bench.compare("Hugging Face storage cold load", "cold files", reads)
    reads = both("load_by_storage", files.make_warm, everything, path=str(model))
    warm = bench.compare("Hugging Face storage warm load", "cached files", reads)
    for name, comparison, target in (
        ("save", save, 8.0),
        ("cold load", cold, 2.5),
        ("warm load", warm, 1.0),
    ):
        over = comparison.over(STORAGE, THEIR_STORAGE)
        bench.at_least(f"Hugging Face {name} over torch", target, over)
        if comparison is not warm:
            bench.over_fio(f"Hugging Face {name} over fio", 0.9, comparison, STORAGE)
