"""The load format for SGLang: ``sglang serve --load-format tensorferry``.

SGLang calls :func:`register` in each of its processes, through the wheel's entry point in the group
``sglang.srt.plugins``. SGLang accepts the name of a foreign load format on its command line if the name is in a list,
but it can only load a model by such a format if ``LoadConfig`` has a loader class in place of the name. Therefore
:func:`register` adds the name to the list, and a hook replaces the name in ``LoadConfig`` by our class. The class, and
with it all of SGLang's loaders, is imported only in processes that load a model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensorferry.serving import LOAD_FORMAT

try:
    from sglang.srt.arg_groups.choices import LOAD_FORMAT_CHOICES, add_load_format_choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
except ImportError as error:
    raise ImportError(
        f"load format {LOAD_FORMAT!r} requires SGLang 0.5.23 or later: {error} (remedy: pip install sglang)",
        name=error.name,
    ) from error

if TYPE_CHECKING:
    from collections.abc import Callable

_HOOKED_METHOD = "sglang.srt.configs.load_config.LoadConfig._verify_load_format"


def register() -> None:
    """Register the load format with SGLang."""
    if LOAD_FORMAT not in LOAD_FORMAT_CHOICES:
        add_load_format_choices([LOAD_FORMAT])
        HookRegistry.register(_HOOKED_METHOD, _replace_load_format, HookType.AROUND)


def _replace_load_format(verify: Callable[[Any], None], load_config: Any) -> None:
    if load_config.load_format != LOAD_FORMAT:
        verify(load_config)
        return
    from tensorferry.serving.sglang_loader import ModelLoader

    load_config.load_format = ModelLoader
