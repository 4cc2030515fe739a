"""The situations in which DeepNVMe loses data or ends the process: each has tests here, on each engine that it reaches.

They were found by running DeepSpeed 0.19's handles, and have the names of that investigation. A test has the mark
`covers` with the situations in which it checks our behaviour.
"""

from __future__ import annotations

import importlib
import inspect
import pathlib
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS = """
missing_file_sync missing_file_async missing_dir_write is_directory read_past_eof_buffer_larger
read_offset_past_eof read_shorter_than_file enospc_ext4 enospc_ext4_async_overlap_T4 enospc_tmpfs
o_direct_unsupported_ramfs tmpfs_write_read readonly_fs_write readonly_file_write_immutable
unaligned_size_write_locked_1000003 unaligned_size_write_unpinned_1000003
unaligned_size_write_3MB_plus7 unaligned_size_read_1000003 unaligned_size_read_of_bigger_file
unaligned_offset7_read unaligned_offset7_write unaligned_buffer_pointer offset512_on_512_sector
not_divisible_by_parallelism divisible_but_slice_unaligned
divisible_but_slice_unaligned_1000000_T8 zero_size_write zero_size_write_overlap zero_size_read
wait_nothing_pending wait_twice two_writes_same_file two_writes_same_file_diff_size
write_then_read_same_file_async overwrite_shorter_no_truncate del_handle_with_pending
exit_with_pending negative_offset_read negative_offset_write dtypes locked_dtypes
two_dim_unpinned_write two_dim_unpinned_read two_dim_locked noncontig_unpinned_1d_write
noncontig_unpinned_1d_read noncontig_locked_read noncontig_locked_write
transposed_unpinned_write scalar_tensor requires_grad_read requires_grad_write meta_tensor
path_types wrong_buffer_type mixed_async_then_sync threads_shared_handle_sync
threads_shared_handle_async gil_async_pwrite_unpinned gil_async_pwrite_locked
gil_read_write_methods many_handles_aio_max_nr overflow_block_x_qd parallelism_zero
parallelism_negative block_size_zero block_size_unaligned_1000 queue_depth_zero
queue_depth_zero_overlap fd_bad fd_buffered fd_readonly fd_not_closed fd_leak_per_async
fd_exhaustion validate_true read_method read_method_offset read_method_unaligned_pageable
read_method_smaller_buffer aio_read_smaller_buffer aio_rw memcpy_semantics locked_leak_on_del
free_semantics use_after_free locked_tensor_multi_dim_kw locked_zero_elems locked_huge
nonroot_unpinned_16MB nonroot_locked_16MB fork_after_handle truncated_during interrupt_sigint
del_handle_with_pending_locked exit_with_pending_locked exit_with_pending_locked_check
fd_leak_on_exception many_handles_content default_handles_until_aio_max read_alignment_luck
concurrent_create_same_handle_two_threads_write async_then_free_buffer
bounce_during_pending_mutation temp_tensor_async threads_deadlock_async_vs_wait
""".split()  # noqa: SIM905

# Cases that are refused, or end, before an engine takes part.
WITHOUT_ENGINE = """
negative_offset_read negative_offset_write noncontig_unpinned_1d_read noncontig_locked_read
meta_tensor parallelism_zero parallelism_negative block_size_zero queue_depth_zero
queue_depth_zero_overlap fd_bad locked_leak_on_del free_semantics locked_tensor_multi_dim_kw locked_huge
""".split()  # noqa: SIM905
WITH_ENGINES = {"engine", "handle", "make_handle", "blocks_handle"}


@pytest.fixture(scope="module")
def tests_of() -> dict[str, list[Callable[..., Any]]]:
    """The tests of each row."""
    found = defaultdict(list)
    for module in sorted(pathlib.Path(__file__).parent.glob("test_*.py")):
        for test in vars(importlib.import_module(f"{__package__}.{module.stem}")).values():
            for mark in getattr(test, "pytestmark", ()):
                if mark.name == "covers":
                    for row in mark.args:
                        found[row].append(test)
    return found


def test_there_are_106_rows() -> None:
    assert len(set(ROWS)) == len(ROWS) == 106


def test_marks_name_rows(tests_of: dict[str, list[Callable[..., Any]]]) -> None:
    assert set(tests_of) <= set(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_row_has_a_test_on_every_engine_unless_it_reaches_none(
    row: str, tests_of: dict[str, list[Callable[..., Any]]]
) -> None:
    assert tests_of[row], f"no test covers {row}"
    assert any(map(on_every_engine, tests_of[row])) == (row not in WITHOUT_ENGINE)


def on_every_engine(test: Callable[..., Any]) -> bool:
    chosen = [mark.args[0] for mark in test.pytestmark if mark.name == "parametrize"]  # type: ignore[attr-defined]
    return "engine" not in chosen and bool(WITH_ENGINES & {*inspect.signature(test).parameters})
