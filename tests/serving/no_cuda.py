"""Replacements of modules that SGLang imports and that need CUDA. Import it before SGLang; loads do not use them."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("sglang"):
    import torch

    # torchvision's wheel is for CUDA. Without CUDA it lacks its operators, and its import needs these two.
    OPERATORS = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        OPERATORS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

    # SGLang finds no GPU, and its engine for the CPU needs kernels that are not on PyPI: it would import one of vLLM's.
    from sglang.srt.layers.rotary_embedding import base

    base._is_cpu = True
