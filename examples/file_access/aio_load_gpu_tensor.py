"""Load a file into a GPU tensor with tensorferry's aio_handle."""

from __future__ import annotations

import torch
import utils

import tensorferry


def file_read(path: str, handle: tensorferry.aio_handle, buffer: torch.Tensor) -> torch.Tensor:
    # The data is copied to the GPU tensor block by block, so no host memory of the tensor's size is needed.
    handle.sync_pread(buffer, path)
    return buffer


def main() -> None:
    options = utils.load_options(__doc__)
    utils.require_gpu()
    handle = tensorferry.aio_handle()
    buffer = torch.empty(options.nbytes, dtype=torch.uint8, device="cuda")
    utils.measure_load("aio load_gpu", options, lambda path: file_read(path, handle, buffer))


if __name__ == "__main__":
    utils.run(main)
