"""Store a CPU tensor in a file with DeepSpeed's own aio_handle, as in its tutorial, for comparison."""

from __future__ import annotations

from typing import Any

import torch
import utils


def file_write(path: str, tensor: torch.Tensor, handle: Any, buffer: torch.Tensor) -> None:
    buffer.copy_(tensor)  # otherwise the handle locks and unlocks a buffer for each call
    if handle.sync_pwrite(buffer, path) != 1:
        raise OSError(f"DeepSpeed did not write {path}")


def main() -> None:
    options = utils.store_options(__doc__)
    handle = utils.require_deepspeed().aio_handle()
    buffer = handle.new_cpu_locked_tensor(options.nbytes, torch.empty(0, dtype=torch.uint8))
    utils.measure_store(
        "deepspeed store_cpu",
        options,
        utils.random_tensor(options.nbytes),
        lambda path, tensor: file_write(path, tensor, handle, buffer),
    )
    handle.free_cpu_locked_tensor(buffer)


if __name__ == "__main__":
    utils.run(main)
