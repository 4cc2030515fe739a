"""Functions that the driver's tests run in separate processes: first uses that fail, and errors that persist."""

from __future__ import annotations

import pathlib
import tempfile
from typing import Any

import numpy as np

import tensorferry
from tests.gpu.programs import assert_moves, the_gpu
from tests.support import standin
from tests.support.expect import assert_works


def _driver() -> standin.StandIn:
    return standin.loaded()


def _outcome(call: Any) -> list[Any]:
    try:
        call()
    except tensorferry.StorageError as error:
        return ["StorageError", error.errno, str(error)]
    except tensorferry.EngineUnavailableError as error:
        return ["EngineUnavailableError", None, str(error)]
    return ["nothing", None, ""]


def first_use(
    directory: str, function: str, code: int, options: dict[str, int]
) -> dict[str, list[Any]]:
    """Move GPU memory for the first time while a function of the driver fails, then without that."""
    driver, gpu = _driver(), the_gpu()
    path = pathlib.Path(directory) / "file"
    handle = tensorferry.aio_handle()
    arrays = [gpu.array(b"\7" * nbytes) for nbytes in (100, 5_000_000)]
    driver.set(**options)
    if function:
        driver.fail(function, code, times=standin.FOREVER)
    answers = {
        "small": _outcome(lambda: handle.sync_pwrite(arrays[0], path)),
        "large": _outcome(lambda: handle.sync_pwrite(arrays[1], path)),
        "async": _outcome(lambda: (handle.async_pwrite(arrays[1], path), handle.wait())),
    }
    path.write_bytes(bytes(5_000_000))
    answers["read"] = _outcome(lambda: tensorferry.read(path, arrays[1]))
    assert_works(handle, path.parent)
    driver.reset()
    assert_moves(gpu, handle, path.parent)
    return answers


def poisoned(directory: str) -> dict[str, list[Any]]:
    """Meet an error after which every call of the driver fails, as after an illegal address; then leave."""
    driver, gpu = _driver(), the_gpu()
    path = pathlib.Path(directory) / "file"
    handle = tensorferry.aio_handle()
    array, held = gpu.array(30_000_000), gpu.array(5_000_000)
    assert_moves(gpu, handle, path.parent)
    driver.set(poisoning=1)
    with tensorferry.open(path.with_name("held"), "w") as file:
        with gpu.new_stream():
            driver.kernel(held, 7, latch="poisoned")
            waiting = [file.write_from(held, index * 5_000_000) for index in range(5)]
        driver.fail("cuMemcpyDtoHAsync_v2", standin.CUDA_ERROR_ILLEGAL_ADDRESS, later=True)
        answers = {"first": _outcome(lambda: handle.write(array, path))}
        driver.release("poisoned")
        for index, future in enumerate(waiting):
            answers[f"held {index}"] = _outcome(future.result)
    answers |= {
        "next": _outcome(lambda: handle.sync_pwrite(array, path)),
        "async": _outcome(lambda: (handle.async_pread(array, path), handle.wait())),
        "small": _outcome(lambda: tensorferry.write(path, gpu.part(array, 0, 100))),
    }
    assert_works(handle, path.parent)
    return answers


def compat(directory: str, options: dict[str, int]) -> dict[str, Any]:
    """Make a gds_handle with these options of cuFile, and use it."""
    driver, gpu = _driver(), the_gpu()
    driver.set(**options)
    handle = tensorferry.gds_handle()
    assert_moves(gpu, handle, pathlib.Path(directory))
    array = gpu.array(1 << 20)
    assert handle.pin_device_tensor(array)
    handle.sync_pwrite(array, f"{directory}/file")
    return {
        "engine": handle.engine,
        "refusals": handle.engine_refusals,
        "compat": handle.stats()["compat"],
        "gds_nbytes": handle.stats()["gds_nbytes"],
        "by_cufile": driver.count("cuFileRead") + driver.count("cuFileWrite"),
        "registered": driver.count("cufile_buffers"),
    }


def no_gds(function: str, code: int) -> list[Any]:
    """Ask for a gds_handle while a function fails, then without that."""
    driver, gpu = _driver(), the_gpu()
    driver.fail(function, code, times=standin.FOREVER)
    refused = _outcome(lambda: tensorferry.gds_handle())
    driver.reset()
    tensorferry.gds_handle().close()
    del gpu
    return refused


def locked_memory_that_cuda_refuses() -> dict[str, Any]:
    """Ask for page-locked memory after CUDA was used, when it registers no more."""
    driver, gpu = _driver(), the_gpu()
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        tensorferry.write(file.name, gpu.array(100))
    before = driver.count("registered_nbytes")
    good = tensorferry.empty(1 << 20, "u1")
    grown = driver.count("registered_nbytes") - before
    del good
    shrunk = driver.count("registered_nbytes") - before
    driver.fail("cuMemHostRegister_v2", standin.CUDA_ERROR_OUT_OF_MEMORY, times=standin.FOREVER)
    array = tensorferry.empty(1 << 20, "u1")
    array[:] = 7
    return {"grown": grown, "shrunk": shrunk, "usable": bool((np.asarray(array) == 7).all())}
