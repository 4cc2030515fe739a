"""DeepSpeed's checkpoints, saved and loaded by its own checkpoint engines and by tensorferry's.

Each contender is a separate process with one rank; all of them are alive and take turns. The time of a save includes
fsync. DeepSpeed's default engine does not sync, so the benchmark syncs all its files and folders within the clock; its
fast writer syncs its files. Without a GPU the fast writer needs ops that DeepSpeed lacks and tensorferry supplies.

The blocking time of a decoupled save is the time of the save and of the next step, minus the time of a step without a
save. It is measured without ZeRO, because DeepSpeed 0.19.8 fails to send ZeRO's states to its other process.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

from benchmarks.bench import measured, scenario
from benchmarks.memory import Stopwatch
from benchmarks.scenarios.offload import _begin
from tensorferry.tuning.scratch import make_cold

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.bench import Bench, Measure

OURS, DEFAULT, FAST = "tensorferry", "DeepSpeed's default, and fsync", 'DeepSpeed, "type": "fast"'
# Without "data_parallel" DeepSpeed 0.19.8 raises an AttributeError.
FAST_WRITER = {"type": "fast", "data_parallel": "replica"}
NBYTES_PER_PARAMETER = {0: 12, 2: 14}


class Keeper:
    """An engine that saves and loads checkpoints, in a worker."""

    def __init__(
        self, parameters: int, stage: int, served: bool, writer: dict[str, Any] | None
    ) -> None:
        # DeepSpeed's fast writer reads the CROSS_ variables. "native" is its backend for locked memory without a GPU.
        os.environ |= {"CROSS_SIZE": "1", "CROSS_RANK": "0", "DS_PIN_MEMORY_BACKEND": "native"}
        if not served:
            os.environ["TENSORFERRY_DEEPSPEED_CHECKPOINTS"] = "0"
        _, self._scratch = _begin(served or writer is not None)
        from benchmarks.training import Kept

        self._training = Kept(parameters, stage, writer)
        self._served, self._syncs = served, not served and writer is None

    def save(self, path: Path) -> dict[str, Any]:
        """Save a checkpoint, including fsync."""
        shutil.rmtree(path, ignore_errors=True)
        os.sync()
        with Stopwatch() as watch:
            self._training.engine.save_checkpoint(str(path), tag="tag")
            if self._syncs:
                for each in (path, path / "tag", *(path / "tag").iterdir(), path / "latest"):
                    descriptor = os.open(each, os.O_RDONLY)
                    os.fsync(descriptor)
                    os.close(descriptor)
        return watch.result(self._nbytes(path))

    def blocked(self, path: Path) -> dict[str, Any]:
        """Measure how long a decoupled save blocks training."""
        shutil.rmtree(path, ignore_errors=True)
        engine = self._training.engine
        with Stopwatch() as alone:
            self._training.step()
        with Stopwatch() as watch:
            engine.save_checkpoint(str(path), tag="tag")
            self._training.step()
        if self._served:
            engine.checkpoint_engine.cleanup()
        return watch.as_value(watch.seconds - alone.seconds)

    def load(self, path: Path) -> dict[str, Any]:
        """Load the checkpoint."""
        with Stopwatch() as watch:
            loaded, _ = self._training.engine.load_checkpoint(str(path), tag="tag")
        assert loaded is not None
        return watch.result(self._nbytes(path))

    def _nbytes(self, path: Path) -> int:
        return sum(each.stat().st_size for each in (path / "tag").iterdir())


@scenario
def checkpoint(bench: Bench) -> None:
    """Save and load the states of DeepSpeed trainings."""
    if not bench.deepspeed_wanted():
        return

    def keeper(*, served: bool, stage: int = 2, writer: dict[str, Any] | None = None) -> Any:
        parameters = 2 * bench.nbytes // NBYTES_PER_PARAMETER[stage]
        how = {"stage": stage, "served": served, "writer": writer}
        return bench.worker(Keeper, parameters=parameters, **how)

    ways = {
        OURS: keeper(served=True),
        DEFAULT: keeper(served=False),
        FAST: keeper(served=False, writer=FAST_WRITER),
    }

    def each(
        call: str, labels: tuple[str, ...], cold: bool = False
    ) -> dict[str, dict[str, Measure]]:
        folders = {label: bench.directory / str(number) for number, label in enumerate(ways)}

        def measure(label: str) -> Measure:
            timed = measured(ways[label], call, path=folders[label])

            def prepared(number: int) -> Any:
                for file in (folders[label] / "tag").iterdir() if cold else ():
                    make_cold(file)
                return timed(number)

            return prepared

        found = {label: measure(label) for label in labels}
        return {"ours": {OURS: found.pop(OURS)}, "peer": found}

    saved = bench.compare(
        "ZeRO-2 save", "fresh folder, durable", **each("save", (OURS, DEFAULT, FAST))
    )
    bench.at_least("ZeRO-2 save over DeepSpeed's default with fsync", 3, saved.over(OURS, DEFAULT))
    bench.at_least("ZeRO-2 save over its fast writer", 1.3, saved.over(OURS, FAST))
    loaded = bench.compare("ZeRO-2 load", "cold files", **each("load", (OURS, DEFAULT), cold=True))
    bench.at_least(
        "ZeRO-2 load, verified, over DeepSpeed's default", 1.5, loaded.over(OURS, DEFAULT)
    )
    for worker in bench.workers:
        worker.close()
    bench.workers.clear()
    decoupled = FAST_WRITER | {"decoupled": True}
    ways = {
        OURS: keeper(served=True, stage=0, writer=decoupled),
        FAST: keeper(served=False, stage=0, writer=decoupled),
    }
    blocked = bench.compare(
        "blocking time of a decoupled save",
        "save and next step, minus a step without a save",
        **each("blocked", (OURS, FAST)),
        unit="s",
    )
    bench.at_most("decoupled save, blocking over DeepSpeed's", 0.5, blocked.over(OURS, FAST))
