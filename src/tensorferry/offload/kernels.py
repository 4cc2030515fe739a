"""A test of torch's kernels: whether pieces of a tensor are stepped to the same bits as the whole.

Pieces of element-wise steps give the same result if a kernel rounds an element in the same way wherever the element
lies, in whichever thread's range. That holds for the kernels of the releases and processors on which tensorferry is
tested. On any other, one comparison per process shows whether it holds.
"""

from __future__ import annotations

import functools
import itertools

import torch

# Enough elements for several threads, which get 32,768 each or more, and cuts as in real steps: at multiples of 4096.
_CUTS = (0, 4096, 45056, 131101)


def pieces_agree(dtype: torch.dtype, device: torch.device, *, fused: bool) -> bool:
    """Return whether steps of pieces give the same bits as steps of the whole, for this dtype and these kernels."""
    return _agree(dtype, device, fused, torch.get_num_threads())


@functools.lru_cache(maxsize=64)
def _agree(dtype: torch.dtype, device: torch.device, fused: bool, _threads: int) -> bool:
    random = torch.Generator().manual_seed(9)
    values = [
        (torch.randn(_CUTS[-1], generator=random) * scale).to(device, dtype)
        for scale in (0.5, 1.0, 1e-3)
    ]

    def stepped(begin: int, end: int) -> torch.Tensor:
        param = torch.nn.Parameter(values[0][begin:end].clone())
        optimizer = torch.optim.AdamW([param], amsgrad=True, foreach=False, fused=fused)
        for gradient in values[1:]:
            param.grad = gradient[begin:end].clone()
            optimizer.step()
        return param.detach()

    pieces = [stepped(*each) for each in itertools.pairwise(_CUTS)]
    return torch.equal(torch.cat(pieces), stepped(0, _CUTS[-1]))
