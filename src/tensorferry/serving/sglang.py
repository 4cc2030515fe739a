"""SGLang knows the load format: ``sglang serve --load-format tensorferry``.

SGLang calls :func:`register` in each of its processes, by the wheel's entry point in the group ``sglang.srt.plugins``.
It takes the names of formats from a list, and a format that is not its own as a class: :class:`LoadConfig` gets ours
for the name. The class, and with it all of SGLang's loaders, is imported where a model is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensorferry.serving import LOAD_FORMAT

try:
    from sglang.srt.arg_groups.choices import LOAD_FORMAT_CHOICES, add_load_format_choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
except ImportError as error:
    raise ImportError(
        f"load format {LOAD_FORMAT!r} needs SGLang, 0.5.23 or later: {error} (remedy: pip install sglang)",
        name=error.name,
    ) from error

if TYPE_CHECKING:
    from collections.abc import Callable

_CHECKED_AT = "sglang.srt.configs.load_config.LoadConfig._verify_load_format"


def register() -> None:
    """Have SGLang know the load format."""
    if LOAD_FORMAT not in LOAD_FORMAT_CHOICES:
        add_load_format_choices([LOAD_FORMAT])
        HookRegistry.register(_CHECKED_AT, _with_ours, HookType.AROUND)


def _with_ours(verify: Callable[[Any], None], load_config: Any) -> None:
    if load_config.load_format != LOAD_FORMAT:
        verify(load_config)
        return
    from tensorferry.serving.sglang_loader import ModelLoader

    load_config.load_format = ModelLoader
