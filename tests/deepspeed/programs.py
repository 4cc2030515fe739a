"""Functions that the tests run in separate processes: DeepSpeed's parts on our ops. Each returns its findings."""

from __future__ import annotations

import contextlib
import gc
import io
import multiprocessing
import os
import sys
import warnings
from pathlib import Path
from typing import Any

BUILDERS = ["AsyncIOBuilder", "GDSBuilder", "PinMemoryBuilder", "UtilsBuilder"]


def installed_after_its_importers() -> dict[str, Any]:
    """Install when DeepSpeed and modules that hold its builders are there already."""
    import deepspeed.io.fast_file_writer
    import deepspeed.ops.aio
    import deepspeed.ops.gds
    import deepspeed.runtime.swap_tensor.partitioned_param_swapper as swapper

    import tensorferry.deepspeed

    tensorferry.deepspeed.install()
    op = deepspeed.ops.aio.AsyncIOBuilder().load(verbose=False)
    pinned = getattr(deepspeed.ops.op_builder, "PinMemoryBuilder", None)
    return {
        "version": deepspeed.__version__,
        "same": [
            swapper.AsyncIOBuilder().load() is op,
            swapper.GDSBuilder().load() is op,
            deepspeed.ops.gds.GDSBuilder().load() is op,
            deepspeed.ops.op_builder.async_io.AsyncIOBuilder().load() is op,
            deepspeed.ops.op_builder.gds.GDSBuilder().load() is op,
            pinned is None or pinned().load() is op,
        ],
        "names": [name for name in NAMES if hasattr(op, name)],
        "utils": deepspeed.io.fast_file_writer.UtilsBuilder().load().cast_to_byte_tensor.__module__,
        "engine": op.aio_handle().engine,
        "compiled": sorted(deepspeed.ops.op_builder.builder.OpBuilder._loaded_ops),
    }


def installed_in_threads(threads: int) -> list[bool]:
    """Install in threads while DeepSpeed is imported; return whether it served after each, at last, and undone."""
    import threading

    import tensorferry.deepspeed

    found: list[bool] = []
    begin = threading.Barrier(threads + 1)

    def install() -> None:
        begin.wait()
        tensorferry.deepspeed.install()
        found.append(tensorferry.deepspeed.installed())

    installing = [threading.Thread(target=install, daemon=True) for _ in range(threads)]
    for thread in installing:
        thread.start()
    begin.wait()
    import deepspeed.ops.op_builder  # noqa: F401

    for thread in installing:
        thread.join()
    found.append(whose_engine() == "tensorferry")
    tensorferry.deepspeed.uninstall()
    return [*found, tensorferry.deepspeed.installed()]


def installed_twice_at_once() -> list[bool]:
    """Install while the import of DeepSpeed installs, too; return whether it served, and whether it could be undone."""
    import tensorferry.deepspeed

    tensorferry.deepspeed.install()
    found = [tensorferry.deepspeed.installed(), whose_engine() == "tensorferry"]
    tensorferry.deepspeed.uninstall()
    return [*found, tensorferry.deepspeed.installed()]


def checkpoints_variable(given: bool | None) -> Any:
    """Install; return whether checkpoints are ours, and the variable then and after the undo; or return the refusal."""
    import deepspeed.runtime.engine

    import tensorferry.deepspeed

    name = tensorferry.deepspeed.CHECKPOINTS_VARIABLE
    try:
        tensorferry.deepspeed.install(checkpoints=given)
    except ValueError as error:
        return str(error)
    made = deepspeed.runtime.engine.create_checkpoint_engine
    found = [made.__globals__["__name__"].startswith("tensorferry"), os.environ[name]]
    tensorferry.deepspeed.uninstall()
    return [*found, os.environ.get(name)]


NAMES = [
    "aio_handle",
    "gds_handle",
    "aio_read",
    "aio_write",
    "deepspeed_memcpy",
    "pin_handle",
    "cast_to_byte_tensor",
]


def restored(look_at_the_table_first: bool) -> dict[str, Any]:
    """Install and uninstall twice, and return how DeepSpeed looked before, between and after."""
    import deepspeed.ops.op_builder

    import tensorferry.deepspeed

    if look_at_the_table_first:
        _ = deepspeed.ops.__compatible_ops__
    before = _state()
    tensorferry.deepspeed.install()
    tensorferry.deepspeed.install()
    between = _state()
    changed = tensorferry.deepspeed.installed()
    tensorferry.deepspeed.uninstall()
    tensorferry.deepspeed.uninstall()
    after = _state()
    tensorferry.deepspeed.install()
    again = whose_engine() == "tensorferry"
    tensorferry.deepspeed.uninstall()
    return {
        "installed": [changed, tensorferry.deepspeed.installed()],
        "changed": before != between,
        "restored": before == after == _state(),
        "again": again,
    }


def _state() -> dict[str, str]:
    import deepspeed.git_version_info
    from deepspeed.runtime import engine

    builders = {
        f"{module}.{name}.{method}": repr(getattr(kind, method))
        for module in sorted(sys.modules)
        if module.startswith("deepspeed")
        for name in BUILDERS
        if (kind := getattr(sys.modules[module], name, None)) is not None
        for method in ("load", "is_compatible", "__name__", "__dict__")
    }
    return builders | {
        "installed": repr(deepspeed.git_version_info.installed_ops),
        "compatible": repr(vars(deepspeed.ops).get("__compatible_ops__")),
        "variables": repr({k: v for k, v in os.environ.items() if k.startswith("TENSORFERRY_D")}),
        "engine": repr(
            {k: v for k, v in vars(engine.DeepSpeedEngine).items() if "checkpoint" in k}
        ),
        "made": repr(engine.create_checkpoint_engine),
        "files": repr(vars(engine.TorchCheckpointEngine)),
    }


def compatibility() -> dict[str, Any]:
    """Return the answers of DeepSpeed's table and its builders, and their printed reasons."""
    import deepspeed.ops.op_builder as builders

    import tensorferry.deepspeed

    tensorferry.deepspeed.install()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        gds = builders.GDSBuilder().is_compatible(verbose=True)
        asynchronous = builders.AsyncIOBuilder().is_compatible(verbose=True)
        builders.AsyncIOBuilder().load(verbose=True)
        builders.AsyncIOBuilder().load()
    try:
        builders.GDSBuilder().load().gds_handle(block_size=1 << 20, queue_depth=8)
    except tensorferry.EngineUnavailableError as error:
        refusal = str(error)
    try:
        _ = builders.UtilsBuilder().load().flatten
    except AttributeError as error:
        utils = str(error)
    return {
        "table": dict(sys.modules["deepspeed"].ops.__compatible_ops__),
        "builders": [asynchronous, gds],
        "printed": printed.getvalue(),
        "refusal": refusal,
        "utils": utils,
    }


def gds(directory: str) -> dict[str, Any]:
    """Load the gds op with cuFile, and move a tensor by a handle that is made as DeepSpeed makes it."""
    import deepspeed.ops.op_builder as builders
    import torch

    import tensorferry.deepspeed

    tensorferry.deepspeed.install()
    in_use = tensorferry._core.cuda_in_use()
    compatible = builders.GDSBuilder().is_compatible()
    op = builders.GDSBuilder().load(verbose=False)
    handle = op.gds_handle(
        block_size=1 << 20,
        queue_depth=8,
        single_submit=False,
        overlap_events=True,
        intra_op_parallelism=2,
    )
    source = torch.rand(1_000_003, generator=torch.Generator().manual_seed(1))
    found = torch.zeros_like(source)
    counts = [handle.sync_pwrite(source, f"{directory}/file")]
    counts += [handle.async_pread(found, f"{directory}/file"), handle.wait()]
    return {
        "in_use": in_use,
        "compatible": compatible,
        "engine": handle.engine,
        "counts": counts,
        "same": torch.equal(source, found),
    }


def without_deepspeed() -> str:
    import tensorferry.deepspeed

    sys.modules["deepspeed"] = None  # type: ignore[assignment]  # Python's way to say that there is none
    try:
        tensorferry.deepspeed.install()
    except ModuleNotFoundError as error:
        return str(error)
    return ""


def installed_after_its_own_engine() -> list[str]:
    """Load DeepSpeed's own engine first, and return the warnings of install()."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    import tensorferry.deepspeed

    theirs = AsyncIOBuilder().load()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tensorferry.deepspeed.install()
    assert AsyncIOBuilder().load() is not theirs
    tensorferry.deepspeed.uninstall()
    assert AsyncIOBuilder().load() is theirs
    return [str(warning.message) for warning in caught if warning.category is RuntimeWarning]


def engine_in_a_spawned_process(call_install: bool) -> list[str]:
    """Return the package that serves async_io in this process, and in a process that it spawns."""
    if call_install:
        import tensorferry.deepspeed

        tensorferry.deepspeed.install()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return [whose_engine(), pool.apply(whose_engine)]


def whose_engine() -> str:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    module: str = AsyncIOBuilder.load.__module__
    return module.partition(".")[0]


def native_pins() -> dict[str, bool]:
    """Use DeepSpeed's allocator of pinned memory with our pin_handle; return the memory that it tracks and frees."""
    import torch
    from deepspeed.utils.pin_memory import NativePinnedMemory

    pins = NativePinnedMemory()
    from deepspeed.ops.op_builder import AsyncIOBuilder

    handle = AsyncIOBuilder().load().aio_handle()
    tensor = pins.pin(torch.arange(3000.0).view(30, 100))
    address = tensor.data_ptr()
    view = tensor.view(-1)[10:20]
    known = handle.is_pinned(tensor) and handle.is_pinned(view)
    del tensor
    gc.collect()
    kept = address in pins._ranges and handle.is_pinned(view) and float(view[0]) == 10
    del view
    gc.collect()
    gone = address not in pins._ranges
    other = pins.pin(torch.zeros(5000))
    freed = pins.unpin(other) and not handle.is_pinned(other)
    return {"known": known, "kept": kept, "gone": gone, "freed": freed}


def fast_file_writer(directory: str, double_buffer: bool) -> dict[str, Any]:
    """torch.save through DeepSpeed's FastFileWriter, the size not a multiple of anything."""
    import torch
    from deepspeed.io import FastFileWriter, FastFileWriterConfig
    from deepspeed.ops.op_builder import AsyncIOBuilder

    handle = AsyncIOBuilder().load().aio_handle(1 << 20, 8, False, True, 2)
    torch.manual_seed(1)
    state = {"weight": torch.rand(1_000_003), "bias": torch.rand(777).bfloat16(), "step": 5}
    buffer = handle.new_cpu_locked_tensor(2 << 20, torch.empty(0, dtype=torch.uint8))
    path = Path(directory) / "saved.pt"
    config = FastFileWriterConfig(
        dnvme_handle=handle, pinned_tensor=buffer, double_buffer=double_buffer
    )
    writer = FastFileWriter(str(path), config)
    torch.save(state, writer)
    writer.close()
    found = torch.load(path)

    legacy = Path(directory) / "storages"
    writer = FastFileWriter(str(legacy), config)
    storages = [(state[name].untyped_storage(), state[name].dtype) for name in ("weight", "bias")]
    writer.save_torch_storage_object_list(storages, save_size=True)
    writer.close()
    expected = b"".join(
        len(tensor).to_bytes(8, "little") + tensor.view(torch.uint8).numpy().tobytes()
        for tensor in (state["weight"], state["bias"])
    )
    return {
        "same": [torch.equal(found[name], state[name]) for name in ("weight", "bias")],
        "step": found["step"],
        "storages": legacy.read_bytes() == expected,
        "direct_nbytes": handle.stats()["direct_nbytes"],
    }


def swap_buffers(directory: str) -> dict[str, Any]:
    """DeepSpeed's pools of swap buffers, out and in again."""
    import torch
    from deepspeed import comm
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from deepspeed.runtime.swap_tensor.async_swapper import AsyncTensorSwapper
    from deepspeed.runtime.swap_tensor.utils import SwapBufferManager, SwapBufferPool

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # not used, but looked for
    sys.modules["deepspeed"].ops.__compatible_ops__["deepspeed_shm_comm"] = False
    store = f"file://{directory}/store"
    comm.init_distributed(dist_backend="gloo", init_method=store, rank=0, world_size=1)
    handle = AsyncIOBuilder().load().aio_handle(1 << 20, 8, False, True, 2)
    manager = SwapBufferManager(1 << 20, 3, torch.float32, handle)
    pool = SwapBufferPool(manager.allocate(1 << 20, 2, torch.float32), handle)
    torch.manual_seed(1)
    sources = [torch.rand(700_000), torch.rand(900_001)]
    for index, source in enumerate(sources):
        aligned = -(-len(source) // 1024) * 1024
        pool.insert_tensor(source, f"{directory}/{index}.swp", aligned)
    pool.swap_out(handle)
    for tensor in pool.get_compute_tensors():
        tensor.zero_()
    pool.swap_in(handle)
    found = [torch.equal(a, b) for a, b in zip(pool.get_compute_tensors(), sources, strict=True)]

    swapper = AsyncTensorSwapper(handle, numel_alignment=1024, timers=None)
    swapper.add_buffers(manager.allocate(1 << 20, 1, torch.float32))
    swapper.swap_out_tensors(sources, [f"{directory}/{index}.grad" for index in range(2)])
    swapper.release_buffers()
    grads = [Path(directory, f"{index}.grad").read_bytes() for index in range(2)]
    torch.distributed.destroy_process_group()
    return {
        "found": found,
        "grads": [
            grad.startswith(source.numpy().tobytes())
            for grad, source in zip(grads, sources, strict=True)
        ],
        "pinned": handle.is_pinned(manager.all_buffers[0]),
    }


def background_save_that_cannot_be_discarded() -> str:
    """Return the error of a save in the background that fails, and whose files cannot be removed."""
    import threading
    from concurrent.futures import Future

    from tensorferry.deepspeed.checkpoints import TensorferryCheckpointEngine

    class Save:
        staged: list[Any] = []  # noqa: RUF012
        folder = "folder"

        def end(self) -> None:
            raise ValueError("not saved")

        def abort(self) -> None:
            raise OSError("not removed")

    ended: Future[None] = Future()
    write: Any = TensorferryCheckpointEngine()._write_in_background
    thread = threading.Thread(target=write, args=(Save(), ended))
    thread.start()
    thread.join()
    return repr(ended.exception(timeout=0))
