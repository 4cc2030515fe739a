"""A subclass of SGLang's DefaultModelLoader that reads safetensors files with tensorferry."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.model_loader.weight_utils import maybe_add_mtp_safetensors
from sglang.srt.runtime_context import get_parallel

from tensorferry.serving import weights

if TYPE_CHECKING:
    from collections.abc import Iterator

_INDEX_NAME = "model.safetensors.index.json"


class ModelLoader(DefaultModelLoader):  # type: ignore[misc]  # mypy does not see SGLang
    """The model loader for SGLang: it finds or downloads the files, and passes the tensors to the model.

    Parameters
    ----------
    load_config : sglang.srt.configs.load_config.LoadConfig
        Its ``model_loader_extra_config`` may have the fields of :class:`tensorferry.serving.weights.Options`.

    Raises
    ------
    ValueError, TypeError
        An option is unknown or invalid.
    """

    counter_before_loading_weights: float  # an attribute of SGLang's class

    def __init__(self, load_config: Any) -> None:
        self._options, _ = weights.options_of(load_config.model_loader_extra_config or {})
        super().__init__(
            dataclasses.replace(
                load_config, load_format="safetensors", model_loader_extra_config={}
            )
        )

    def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, Any]]:
        """Return the tensors of a model's files; overrides the method of DefaultModelLoader."""
        folder, paths, _ = self._prepare_weights(
            source.model_or_path,
            source.revision,
            source.fall_back_to_pt,
            source.allow_patterns_overrides,
        )
        if source.model_config is not None:
            hf_config = source.model_config.hf_config
            paths = maybe_add_mtp_safetensors(paths, folder, _INDEX_NAME, hf_config)
        overridden = source.allow_patterns_overrides is not None
        index = None if overridden else Path(folder, _INDEX_NAME)
        if not self.counter_before_loading_weights:
            self.counter_before_loading_weights = time.perf_counter()
        # The ranks of a group read the files together, which requires that they load the same tensors. The stages of a
        # pipeline may load different tensors; the tensor-parallel ranks of one stage load the same.
        parallel = get_parallel()
        alike = self.load_config.load_group is not None and parallel.tp_size > 1
        group = parallel.tp_group.cpu_group if alike else None
        found = weights.tensors(sorted(paths), self._options, process_group=group, index=index)
        draft = self.load_config.draft_model_idx
        if draft is not None:
            return self._filter_mtp_weights(found, source.prefix, draft)  # type: ignore[no-any-return]
        return ((source.prefix + name, tensor) for name, tensor in found)
