"""Functions that tests of checkpoints run in separate processes."""

from __future__ import annotations

import threading
import time
from typing import Any


def save_in_a_thread_at_exit(path: str) -> None:
    """Start a save in a thread, and leave before it has begun to write."""
    import torch
    import torch.distributed.checkpoint as dcp

    from tensorferry.checkpoint import FileSystemWriter

    def save() -> None:
        while threading.main_thread().is_alive():
            time.sleep(0.01)
        state = {"a": torch.full((1 << 20,), 7.0)}
        dcp.save(state, storage_writer=FileSystemWriter(path), no_dist=True)

    threading.Thread(target=save).start()


def peak_of_lazy_save(path: str, count: int) -> int:
    """Save `count` tensors of 16 MiB that are made when asked for, and return how much memory that took at most."""
    import ctypes

    import torch
    import torch.distributed.checkpoint as dcp

    from tensorferry.checkpoint import FileSystemWriter
    from tensorferry.tuning.stopwatch import Stopwatch

    class LazyPlanner(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> torch.Tensor:
            return torch.full((4 << 20,), float(write_item.index.fqn))

    # Make the C library unmap freed memory at once (M_MMAP_THRESHOLD); otherwise its free memory would count, too.
    ctypes.CDLL(None).mallopt(-3, 1 << 20)
    state = {str(k): torch.zeros(1).expand(4 << 20) for k in range(count)}
    dcp.save({"0": torch.ones(1)}, storage_writer=FileSystemWriter(path), no_dist=True)
    with Stopwatch() as watch:
        writer = FileSystemWriter(path)
        dcp.save(state, storage_writer=writer, planner=LazyPlanner(), no_dist=True)
    assert watch.peak_growth_nbytes is not None
    return watch.peak_growth_nbytes


def save_within(path: str, file_nbytes: int, layout: dict[str, Any] | None) -> list[Any]:
    """Save 16 MiB, a state in a layout or an object, with a limit of file sizes; return the errno and the file name."""
    import resource

    import torch
    import torch.distributed.checkpoint as dcp

    from tensorferry.checkpoint import FileSystemWriter, save

    state = {"small": torch.ones(100), "big": torch.ones(4 << 20)}
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_nbytes, hard))
    try:
        if layout is None:
            save(state, path)
        else:
            writer = FileSystemWriter(path, **layout)
            dcp.save(state, storage_writer=writer, no_dist=True)
    except OSError as error:
        return [error.errno, error.filename]
    except dcp.api.CheckpointException as error:
        return [error.failures[0][0].errno, error.failures[0][0].filename]
    return []


def save_many_files(path: str, count: int, descriptors: int) -> None:
    """Save each of `count` tensors in a separate file, while the process can open only `descriptors` more files."""
    import resource

    import torch

    from tests.checkpoint.states import save
    from tests.support.leaks import count_descriptors

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count_descriptors() + descriptors, hard))
    state = {str(k): torch.full((1 << 12,), k) for k in range(count)}
    save(state, path, single_file_per_rank=False)  # type: ignore[arg-type]


def _die_saving(path: str, nbytes: int, after_nbytes: int) -> None:
    import os
    import signal

    import torch

    from tensorferry.checkpoint import FileWriter

    class Dying(FileWriter):
        def write(self, data: Any) -> int:
            written = super().write(data)
            if self.tell() > after_nbytes:
                os.kill(os.getpid(), signal.SIGKILL)
            return written

    with Dying(path) as file:
        torch.save([torch.ones(nbytes // 40) for _ in range(10)], file)


def peaks_of_save_and_load(path: str, nbytes: int) -> tuple[int, int]:
    """Save and load a state, and return how much memory beyond it each took at most."""
    import torch

    from tensorferry.checkpoint import load, save
    from tensorferry.tuning.stopwatch import Stopwatch

    def state(value: float) -> list[torch.Tensor]:
        return [torch.full((nbytes // 40,), value) for _ in range(10)]

    save(state(1.0)[:1], path)
    load(path)
    original = state(2.0)
    with Stopwatch() as saving:
        save(original, path)
    with Stopwatch() as loading:
        loaded = load(path)
    assert all(bool((tensor == 2.0).all()) for tensor in loaded)
    assert saving.peak_growth_nbytes is not None
    assert loading.peak_growth_nbytes is not None
    return saving.peak_growth_nbytes, loading.peak_growth_nbytes - nbytes


def save_in_a_process(path: str, stager: str) -> None:
    """Save three times through the process of asynchronous saves, and change the state while it writes."""
    import tempfile

    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    from tensorferry.checkpoint import FileSystemWriter, Stager
    from tests.checkpoint.states import done, mixed_state

    with tempfile.TemporaryDirectory() as directory:
        store = dist.FileStore(f"{directory}/store", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        options: dict[str, Any] = {"async_checkpointer_type": AsyncCheckpointerType.PROCESS}
        if stager == "ours":
            options["async_stager"] = Stager()
        elif stager == "torch's":
            from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

            options["async_stager"] = DefaultStager(StagingOptions(False, True, False, False))
        writer = FileSystemWriter(path)
        for step in range(3):
            state = mixed_state(step)
            answer: Any = dcp.async_save(state, storage_writer=writer, **options)
            state["weight"].zero_()
            state["large"].zero_()
            done(answer)
        dist.destroy_process_group()


def save_in_a_process_by_default(path: str) -> list[str]:
    """Save in the process of asynchronous saves, and in threads, with folders only; return the stagers in use."""
    import tempfile

    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    import tensorferry.checkpoint
    from tensorferry.checkpoint import Stager
    from tests.checkpoint.states import done

    staged = []
    stage = Stager.stage

    def watched(self: Any, state: Any, **options: Any) -> Any:
        result = stage(self, state, **options)
        staged.append(f"{id(self)} {result['weight'].data_ptr()}")
        return result

    Stager.stage = watched  # type: ignore[method-assign]
    tensorferry.checkpoint.install()
    with tempfile.TemporaryDirectory() as directory:
        store = dist.FileStore(f"{directory}/store", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        for name, kind in (
            ("thread", AsyncCheckpointerType.THREAD),
            ("again", AsyncCheckpointerType.THREAD),
            ("process", AsyncCheckpointerType.PROCESS),
        ):
            state = {"weight": torch.arange(1 << 20)}
            answer: Any = dcp.async_save(
                state, checkpoint_id=f"{path}/{name}", async_checkpointer_type=kind
            )
            state["weight"].zero_()
            done(answer)
            del answer
        dist.destroy_process_group()
    return staged
