"""Load a file into a GPU tensor with tensorferry's aio_handle, through page-locked host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import utils

import tensorferry

if TYPE_CHECKING:
    import torch


def file_read(path: str, handle: tensorferry.aio_handle, buffer: torch.Tensor) -> torch.Tensor:
    handle.sync_pread(buffer, path)
    return buffer.cuda()


def main() -> None:
    options = utils.load_options(__doc__)
    utils.require_gpu()
    handle = tensorferry.aio_handle()
    with utils.staging_buffer(options.nbytes) as buffer:
        utils.measure_load("aio load_gpu", options, lambda path: file_read(path, handle, buffer))


if __name__ == "__main__":
    utils.run(main)
