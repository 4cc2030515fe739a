"""A subclass of vLLM's DefaultModelLoader that reads safetensors files with tensorferry."""

from __future__ import annotations

import dataclasses
import functools
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed import get_tp_group
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight

from tensorferry.serving import LOAD_FORMAT, weights

if TYPE_CHECKING:
    from collections.abc import Iterator


class ModelLoader(DefaultModelLoader):  # type: ignore[misc]  # mypy does not see vLLM
    """The model loader for vLLM: it finds or downloads the files, and passes the tensors to the model.

    Parameters
    ----------
    load_config : vllm.config.load.LoadConfig
        Its ``model_loader_extra_config`` may have the fields of :class:`tensorferry.serving.weights.Options`, and
        vLLM's ``enable_weights_track``.

    Raises
    ------
    ValueError, TypeError
        An option is unknown or invalid, or a ``safetensors_load_strategy`` is set.
    """

    counter_before_loading_weights: float  # an attribute of vLLM's class

    def __init__(self, load_config: Any) -> None:
        self._options, program_options = weights.options_of(
            load_config.model_loader_extra_config, ("enable_weights_track",)
        )
        super().__init__(
            dataclasses.replace(
                load_config, load_format="safetensors", model_loader_extra_config=program_options
            )
        )
        self._check_strategy()

    def _check_strategy(self) -> None:
        strategy = self.load_config.safetensors_load_strategy
        if strategy not in (None, "lazy"):
            raise ValueError(
                f"safetensors_load_strategy: {strategy!r} is not supported by load format {LOAD_FORMAT!r} (remedy: "
                "--load-format safetensors)"
            )

    def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, Any]]:
        """Return the tensors of a model's files; overrides the method of DefaultModelLoader."""
        # Check again, because load_weights() sets the strategy "torchao" for a model with that quantization.
        self._check_strategy()
        folder, paths, _, index_name = self._prepare_weights(
            source.model_or_path,
            source.subfolder,
            source.revision,
            source.fall_back_to_pt,
            source.allow_patterns_overrides,
        )
        overridden = source.allow_patterns_overrides is not None
        index = None if overridden else Path(folder, index_name)
        if not self.counter_before_loading_weights:
            self.counter_before_loading_weights = time.perf_counter()
        skip = functools.partial(should_skip_weight, local_expert_ids=self.local_expert_ids)
        # The ranks of a group read the files together, which requires that they load the same tensors. The stages of a
        # pipeline may load different tensors. The tensor-parallel ranks of one stage load the same, unless experts are
        # distributed over them.
        ranks = get_tp_group()
        alike = ranks.world_size > 1 and self.local_expert_ids is None
        group = ranks.cpu_group if alike else None
        found = weights.tensors(sorted(paths), self._options, skip, group, index=index)
        return ((source.prefix + name, tensor) for name, tensor in found)
