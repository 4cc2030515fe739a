"""Store a GPU tensor in a file with tensorferry's aio_handle, through page-locked host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import utils

import tensorferry

if TYPE_CHECKING:
    import torch


def file_write(
    path: str, tensor: torch.Tensor, handle: tensorferry.aio_handle, buffer: torch.Tensor
) -> None:
    buffer.copy_(tensor)
    handle.sync_pwrite(buffer, path)


def main() -> None:
    options = utils.store_options(__doc__)
    utils.require_gpu()
    handle = tensorferry.aio_handle()
    tensor = utils.random_tensor(options.nbytes).cuda()
    with utils.staging_buffer(options.nbytes) as buffer:
        utils.measure_store(
            "aio store_gpu",
            options,
            tensor,
            lambda path, tensor: file_write(path, tensor, handle, buffer),
        )


if __name__ == "__main__":
    utils.run(main)
