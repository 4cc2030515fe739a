"""Load a file into a CPU tensor with tensorferry's aio_handle."""

from __future__ import annotations

import torch
import utils

import tensorferry


def file_read(path: str, handle: tensorferry.aio_handle, buffer: torch.Tensor) -> torch.Tensor:
    handle.sync_pread(buffer, path)  # reads the complete buffer, or raises an exception
    return buffer


def main() -> None:
    options = utils.load_options(__doc__)
    handle = tensorferry.aio_handle()
    # Any tensor can be used. With a locked tensor, transfers do not need a copy.
    buffer = handle.new_cpu_locked_tensor(options.nbytes, torch.empty(0, dtype=torch.uint8))
    utils.measure_load("aio load_cpu", options, lambda path: file_read(path, handle, buffer))
    handle.free_cpu_locked_tensor(buffer)


if __name__ == "__main__":
    utils.run(main)
