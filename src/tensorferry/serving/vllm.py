"""The load format for vLLM: ``vllm serve MODEL --load-format tensorferry``.

vLLM calls :func:`register` in each of its processes, through the wheel's entry point in the group
``vllm.general_plugins``. vLLM's own DefaultModelLoader finds or downloads the files, as for ``--load-format
safetensors``, and passes the tensors to the model; tensorferry only reads the files. Many processes load no model, so
our loader class is created only in processes that import vLLM's loaders.
"""

from __future__ import annotations

import sys

import _tensorferry_startup
from tensorferry.base.caller_warnings import warn
from tensorferry.serving import LOAD_FORMAT

_NEEDED = f"load format {LOAD_FORMAT!r} requires vLLM 0.31 or later"
_REMEDY = "(remedy: pip install vllm)"
_LOADERS = "vllm.model_executor.model_loader"

try:
    import vllm  # noqa: F401
except ImportError as error:
    raise ImportError(f"{_NEEDED}: {error} {_REMEDY}", name=error.name) from error


def register() -> None:
    """Register the load format with vLLM, as soon as vLLM's loaders are imported."""
    if _LOADERS in sys.modules:
        _register()
    else:
        _tensorferry_startup.arm(_LOADERS, _register)


def _register() -> None:
    try:
        from vllm.model_executor.model_loader import register_model_loader

        from tensorferry.serving.vllm_loader import ModelLoader
    except (
        ImportError
    ) as error:  # only a warning, because other load formats import the loaders, too
        warn(f"{_NEEDED}: {error} {_REMEDY}")
    else:
        register_model_loader(LOAD_FORMAT)(ModelLoader)
