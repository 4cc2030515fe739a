"""vLLM reads weights by tensorferry: ``vllm serve MODEL --load-format tensorferry``.

vLLM calls :func:`register` in each of its processes, by the wheel's entry point in the group ``vllm.general_plugins``.
Its own DefaultModelLoader finds or downloads the files, as for ``--load-format safetensors``, and gives the tensors to
the model; only the reading of the files is ours. Many processes load no model: a class is made of vLLM's loaders where
these are imported.
"""

from __future__ import annotations

import sys

import _tensorferry_startup
from tensorferry.base.warned import warn
from tensorferry.serving import LOAD_FORMAT

_NEEDED = f"load format {LOAD_FORMAT!r} needs vLLM, 0.31 or later"
_REMEDY = "(remedy: pip install vllm)"
_LOADERS = "vllm.model_executor.model_loader"

try:
    import vllm  # noqa: F401
except ImportError as error:
    raise ImportError(f"{_NEEDED}: {error} {_REMEDY}", name=error.name) from error


def register() -> None:
    """Have vLLM know the load format from when its loaders are imported on."""
    if _LOADERS in sys.modules:
        _register()
    else:
        _tensorferry_startup.arm(_LOADERS, _register)


def _register() -> None:
    try:
        from vllm.model_executor.model_loader import register_model_loader

        from tensorferry.serving.vllm_loader import ModelLoader
    except ImportError as error:  # its loaders are imported for other formats, too
        warn(f"{_NEEDED}: {error} {_REMEDY}")
    else:
        register_model_loader(LOAD_FORMAT)(ModelLoader)
