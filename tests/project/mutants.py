"""Defects that the tests must detect, at least one for each invariant of ARCHITECTURE.md; `make mutants` tries them.

Add a mutant for each defect that the tests have missed. Its text must occur once in its file. Name as few tests as
possible, from the part of the suite that belongs to the file.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A defect.

    Attributes
    ----------
    name : str
        The fault that the mutant has.
    invariant : str
        The invariant that no longer holds, worded as in ARCHITECTURE.md's table if it is there.
    file : str
    The path of the source file.
    old, new : str
        The source text, and its faulty replacement.
    tests : tuple of str
        The tests that must fail: pytest's names, or tests/cpp/FILE::TEST CASE.
    """

    name: str
    invariant: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def _mutant(name: str, invariant: str, file: str, old: str, new: str, *tests: str) -> Mutant:
    return Mutant(name, invariant, file, old, new, tests)


_AGAIN = (
    "a block that runs again in the backward pass gets what it got in the forward pass, or raises"
)

_AHEAD = (
    "a pipeline delivers every read, in order, whatever interrupts it, and has no more in"
    " flight than the read-ahead"
)

_EXACT = "an offloaded optimizer gives the same result as in memory, bit for bit, or is refused"

_EMBEDDED = (
    "an embedding on a drive returns the rows of its table, in memory that only the "
    "caller uses, or raises"
)

_WRITTEN = (
    "a user's changes to an offloaded optimizer's state, or to a parameter with a master "
    "copy, take effect"
)

_DEQUANTISED = (
    "a quantised tensor's values are computed from its codes, each with its own block's "
    "scale, or an error is raised"
)

_MIRRORED = (
    "a bucket holds a complete checkpoint at every moment, and only objects of ours are "
    "removed from it"
)

_ROWS = "a gather returns the rows of the given numbers, or an error"

MUTANTS = [
    _mutant(
        "a-checkpoint-removed-meanwhile-was-the-only-one",
        "restore() finds the newest complete checkpoint, whatever other processes do meanwhile",
        "src/tensorferry/checkpoint/folder.py",
        "step in complete or path.exists()",
        "True or path.exists()",
        "tests/checkpoint/test_manager.py::test_while_another_process_replaces_the_only_checkpoint_there_is_one",
    ),
    _mutant(
        "a-killed-save-keeps-its-temporary-files",
        "the next replacement in a folder removes the temporary files of the dead",
        "src/tensorferry/transfer/publication.py",
        "if TEMPORARY_NAME.fullmatch(name) and name not in _own_names:",
        "if False:",
        "tests/matrix/test_matrix.py::test_kills",
    ),
    _mutant(
        "a-subclass-counts-as-its-class",
        _EXACT,
        "src/tensorferry/offload/kinds.py",
        "    if getattr(sys.modules.get(module), cls.__name__, None) is not cls:\n        return None\n",
        "    module = 'torch.optim'\n",
        "tests/offload/test_word.py::test_without_a_word_it_is_refused_with_the_remedy",
    ),
    _mutant(
        "whole-parameters-count-as-element-wise",
        _EXACT,
        "src/tensorferry/offload/kinds.py",
        'Known("per_parameter", _adafactor)',
        'Known("elementwise", _adafactor)',
        "tests/offload/test_table.py::test_a_class_of_torch_is_stepped_as_in_memory",
    ),
    _mutant(
        "any-dtype-is-cut",
        _EXACT,
        "src/tensorferry/offload/plan.py",
        "(fused or dtype in (torch.float32, torch.float64))",
        "True",
        "tests/offload/test_table.py::test_a_class_of_torch_is_stepped_as_in_memory",
    ),
    _mutant(
        "gradients-of-pieces-may-lie-anyhow",
        _EXACT,
        "src/tensorferry/offload/optimizer.py",
        "not local_of(grad).is_contiguous()",
        "False",
        "tests/offload/test_exact.py::test_gradients_that_pieces_cannot_use_are_refused_before_anything_changes",
    ),
    _mutant(
        "partial-sums-are-added-before-any-step",
        _EXACT,
        "src/tensorferry/offload/optimizer.py",
        "if is_partial and not",
        "if False and not",
        "tests/offload/test_ranks.py::test_gradients_that_are_placed_otherwise_are_as_in_memory",
    ),
    _mutant(
        "the-commit-before-goes-with-the-next-one",
        "ranks that are killed between their commits resume from the same step",
        "src/tensorferry/offload/optimizer.py",
        "keep_previous=self._keeps_previous and ranks() > 1",
        "keep_previous=False",
        "tests/offload/test_ranks.py::test_ranks_go_back_to_the_last_step_that_all_have_committed",
    ),
    _mutant(
        "buckets-count-their-steps-one-after-the-other",
        _EXACT,
        "src/tensorferry/offload/calls.py",
        '"params" else _fresh(value, copies)',
        '"params" else value',
        "tests/offload/test_word.py::test_a_step_by_parameters_is_as_in_memory",
    ),
    _mutant(
        "calls-may-leave-different-values",
        _EXACT,
        "src/tensorferry/offload/calls.py",
        "            self._check(after)\n",
        "            pass\n",
        "tests/offload/test_word.py::test_a_value_of_a_group_that_depends_on_all_parameters_raises",
    ),
    _mutant(
        "new-state-replaces-the-state-of-other-units",
        _EXACT,
        "src/tensorferry/offload/states.py",
        "    for unit, state in kept.items():\n        _put(unit, *flatten(state), memory)\n",
        "",
        "tests/offload/test_word.py::test_a_step_by_parameters_is_as_in_memory",
    ),
    _mutant(
        "hooks-run-for-each-bucket",
        _EXACT,
        "src/tensorferry/offload/calls.py",
        "            **{name: OrderedDict() for name in STEP_HOOKS},\n",
        "",
        "tests/offload/test_word.py::test_hooks_run_once_a_step_although_the_step_calls_that_of_its_class",
    ),
    _mutant(
        "an-option-leaves-the-layout-as-it-was",
        "swapped state is in one arena, which never exceeds the budget",
        "src/tensorferry/offload/optimizer.py",
        "self._planner.names(self.param_groups) != self._names",
        "False",
        "tests/offload/test_optimizer.py::test_a_state_leaves_memory_with_tensors_of_the_user",
    ),
    _mutant(
        "pieces-are-joined-however-they-lay",
        _EXACT,
        "src/tensorferry/offload/saved.py",
        "            if any(moved):",
        "            if False:",
        "tests/offload/test_checkpoints.py::test_parameters_that_lie_otherwise_in_memory_are_refused",
    ),
    _mutant(
        "what-is-written-into-a-parameter-yields-to-its-master",
        _WRITTEN,
        "src/tensorferry/offload/loans.py",
        "    if bool(written.any()):",
        "    if False:",
        "tests/offload/test_surroundings.py::"
        "test_what_is_written_into_a_parameter_counts_beside_its_master",
    ),
    _mutant(
        "what-is-written-into-state-is-forgotten",
        _WRITTEN,
        "src/tensorferry/offload/state_view.py",
        "        if not isinstance(state, StoredState) or param not in self._entries:",
        "        if False:",
        "tests/offload/test_state.py::test_a_state_is_not_read_or_changed_by_items",
    ),
    _mutant(
        "fewer-threads-step-parameters-that-cannot-be-cut",
        _EXACT,
        "src/tensorferry/offload/optimizer.py",
        "                self._planner.may_cut(group, param)\n                for group in",
        "                True\n                for group in",
        "tests/offload/test_threads.py::test_parameters_that_cannot_be_cut_are_stepped_by_all_threads",
    ),
    _mutant(
        "a-step-goes-on-with-other-gradients",
        "an offloaded step is complete, or known to be partial",
        "src/tensorferry/offload/optimizer.py",
        "                if changed is not None:",
        "                if False:",
        "tests/offload/test_surroundings.py::test_a_retry_with_other_gradients_is_refused",
    ),
    _mutant(
        "a-failed-write-counts-as-stored",
        "an offloaded step is complete, or known to be partial",
        "src/tensorferry/offload/holder.py",
        "            item.dirty, item.failure = True, error",
        "            item.stored, item.failure = True, error",
        "tests/offload/test_faults.py::test_a_write_that_fails_once_the_step_is_done",
    ),
    _mutant(
        "counters-lie-between-state-that-is-freed",
        "swapped state is in one arena, which never exceeds the budget",
        "src/tensorferry/offload/states.py",
        "                unit.leaves[at] = counters.pop().copy_(leaf)",
        "                pass",
        "tests/offload/test_memory.py::test_the_peak_is_the_budget_and_a_little_first_step_included",
    ),
    _mutant(
        "buffers-of-a-block-are-copied-apart",
        _EXACT,
        "src/tensorferry/offload/recompute.py",
        "        if storage.data_ptr() not in storages:",
        "        if True:",
        "tests/offload/test_training.py::test_buffers_that_share_memory",
    ),
    _mutant(
        "a-block-finds-the-attributes-of-the-moment",
        _AGAIN,
        "src/tensorferry/offload/recompute.py",
        "        self._set(_pytree.tree_unflatten(leaves, self._spec))\n",
        "",
        "tests/offload/test_training.py::test_a_block_that_runs_again_gets_what_it_got_before",
    ),
    _mutant(
        "a-block-draws-other-numbers",
        _AGAIN,
        "src/tensorferry/offload/recompute.py",
        "            self._set_random(random_states)\n",
        "",
        "tests/offload/test_training.py::test_a_block_that_runs_again_gets_what_it_got_before",
    ),
    _mutant(
        "a-block-may-change-its-arguments",
        _AGAIN,
        "src/tensorferry/offload/recompute.py",
        "        if spec != self._spec or plain != self._leaves:",
        "        if False:",
        "tests/offload/test_training.py::test_a_block_that_changes_its_arguments_is_refused",
    ),
    _mutant(
        "memory-that-a-view-uses-is-reused",
        "no tensor sees the bytes of another slab",
        "src/tensorferry/offload/holder.py",
        "        return self._references() != self._unused",
        "        return False",
        "tests/offload/test_training.py::test_views_that_are_kept_stay_those_of_the_parameter",
    ),
    _mutant(
        "what-is-lent-is-the-parameter-itself",
        "no tensor sees the bytes of another slab",
        "src/tensorferry/offload/training.py",
        "            values = field.view(memory).to(self.device, copy=True)",
        "            values = field.view(memory)",
        "tests/offload/test_training.py::test_what_in_memory_lends_is_a_copy",
    ),
    _mutant(
        "a-commit-forgets-buffers",
        "a snapshot or commit is complete or absent",
        "src/tensorferry/offload/training_optimizer.py",
        '                buffer.copy_(record["buffers"][name])',
        "                pass",
        "tests/offload/test_training.py::test_a_commit_has_what_the_optimizer_does_not",
    ),
    _mutant(
        "a-commit-forgets-frozen-parameters",
        "a snapshot or commit is complete or absent",
        "src/tensorferry/offload/training_optimizer.py",
        'place in record["frozen"].items()}',
        "place in ()}",
        "tests/offload/test_training.py::test_a_commit_has_what_the_optimizer_does_not",
    ),
    _mutant(
        "failed-write-forgets-what-was-there",
        "a store's write never damages stored data",
        "src/tensorferry/store/tensor_store.py",
        "if (error := write.future._settle()) is None:",
        "if (error := write.future._settle()) is None or True:",
        "tests/store/test_faults.py::test_a_write_that_fails_changes_nothing",
    ),
    _mutant(
        "pieces-are-free-while-they-are-mapped",
        "a store's write never damages stored data",
        "src/tensorferry/store/tensor_store.py",
        "_core.map_pieces(files, offsets, sizes, pieces)",
        "_core.map_pieces(files, offsets, sizes, [])",
        "tests/store/test_lasting.py::test_a_mapping_stays_as_it_is_and_keeps_its_space",
    ),
    _mutant(
        "read-does-not-wait-for-the-write-before-it",
        "a store's read returns the last write begun before it",
        "src/tensorferry/store/tensor_store.py",
        "            write.request.wait(None)\n        if not write",
        "            pass\n        if not write",
        "tests/store/test_life.py::test_undisturbed_lives",
    ),
    _mutant(
        "files-of-a-snapshot-are-written-again",
        "a snapshot or commit is complete or absent",
        "src/tensorferry/store/tensor_store.py",
        "segment.frozen, places[segment] = True, (at, name)",
        "places[segment] = at, name",
        "tests/store/test_lasting.py::test_a_snapshot_has_what_was_stored_and_keeps_it",
    ),
    _mutant(
        "commit-keeps-nothing",
        "a snapshot or commit is complete or absent",
        "src/tensorferry/store/commits.py",
        "[name for _, name in manifest.segments], tensors",
        "[name for _, name in manifest.segments], {}",
        "tests/store/test_life.py::test_undisturbed_lives",
    ),
    _mutant(
        "previous-commit-is-forgotten",
        "a snapshot or commit is complete or absent",
        "src/tensorferry/store/commits.py",
        "manifest._replace(previous=previous)",
        "manifest._replace(previous=None)",
        "tests/store/test_life.py::test_undisturbed_lives",
    ),
    _mutant(
        "dropped-commits-stay",
        "a snapshot or commit is complete or absent",
        "src/tensorferry/store/commits.py",
        "dropped = [number for number in self._kept if number not in kept]",
        "dropped = []",
        "tests/store/test_life.py::test_undisturbed_lives",
    ),
    _mutant(
        "failed-commit-is-forgotten",
        "a snapshot or commit is complete or absent",
        "src/tensorferry/store/commits.py",
        "self.drop(self._kept.keys() - {number}, durably=True)",
        "self._kept.pop(number)",
        "tests/store/test_faults.py::test_a_commit_that_fails_leaves_one_before_or_its_own",
    ),
    _mutant(
        "failed-writes-are-not-noticed",
        "a failed write of a store is noticed",
        "src/tensorferry/store/tensor_store.py",
        "            self._raise_failure()\n        failed =",
        "        failed =",
        "tests/store/test_faults.py::test_a_failed_write_that_was_not_noticed_fails_the_next_barrier",
    ),
    _mutant(
        "copies-are-not-verified",
        "copying small tensors to another file loses and damages nothing",
        "src/tensorferry/store/transfers.py",
        "if chunks is not None and _core.crc32(data)",
        "if chunks is None and _core.crc32(data)",
        "tests/store/test_faults.py::test_damage_is_found_and_is_not_copied",
    ),
    _mutant(
        "free-files-are-kept",
        "beyond its tensors a store uses at most twice the bytes that change between "
        "commits, and 64 MiB, in addition to reserved space",
        "src/tensorferry/store/segments.py",
        "if self.free_nbytes > due or self._has_empty:",
        "if self._has_empty:",
        "tests/store/test_lasting.py::test_commits_use_twice_the_bytes_that_change_and_64_mib",
    ),
    _mutant(
        "directories-of-another-store-are-used",
        "a store removes only its own files, and those of a commit only after its own commit",
        "src/tensorferry/store/commits.py",
        "if found and (found[1].store,",
        "if found is None and (found[1].store,",
        "tests/store/test_lasting.py::test_directories_in_another_order_are_noticed",
    ),
    _mutant(
        "new-store-removes-the-old-commit",
        "a store removes only its own files, and those of a commit only after its own commit",
        "src/tensorferry/store/commits.py",
        "for name in folder.names() - kept:",
        "for name in folder.names():",
        "tests/store/test_lasting.py::test_a_new_store_keeps_the_old_commit_until_its_own",
    ),
    _mutant(
        "rank-hides-its-failure-from-those-it-reads-for",
        "ranks that share reads pass on no damaged data, and fail together",
        "src/tensorferry/base/ranks.py",
        "vote.fill_(_FINE if failure is None else _FAILED)",
        "vote.fill_(_FINE)",
        "tests/checkpoint/test_shared_reads.py::test_damage_that_one_rank_reads_is_raised_on_all_before_it_is_handed_on",
        "tests/safetensors/test_ranks.py::test_damage_that_one_rank_reads_is_not_handed_on",
    ),
    _mutant(
        "ranks-share-what-they-have-read-of-different-files",
        "ranks that share reads pass on no damaged data, and fail together",
        "src/tensorferry/safetensors/ranks.py",
        "(each.node, each.versions) for each",
        "each.node for each",
        "tests/safetensors/test_ranks.py::test_files_that_look_alike_are_not_mixed",
    ),
    _mutant(
        "readers-share-what-they-have-read-of-different-files",
        "ranks that share reads pass on no damaged data, and fail together",
        "src/tensorferry/checkpoint/storage/sharing.py",
        "    _check_versions(offers)\n",
        "",
        "tests/checkpoint/test_shared_reads.py::test_what_ranks_have_read_of_different_files_is_not_mixed",
    ),
    _mutant(
        "unused-changes-of-subclasses-are-accepted",
        "a subclass's changes to torch's classes take effect, or are refused",
        "src/tensorferry/checkpoint/storage/torch_classes.py",
        '!= "torch"]',
        '== ""]',
        "tests/checkpoint/test_subclasses.py::"
        "test_methods_of_a_subclass_are_called_as_in_torchs_class_or_refused[FileSystemReader]",
    ),
    _mutant(
        "a-call-goes-on-with-the-state-of-the-last-one",
        "each save goes to the folder of its own call",
        "src/tensorferry/checkpoint/storage/writer.py",
        "        folder = self._begin_call().folder",
        "        folder = self._current_call().folder",
        "tests/checkpoint/test_between_hooks.py::"
        "test_any_sequence_of_saves_and_loads_leaves_what_the_model_has",
    ),
    _mutant(
        "a-relative-path-is-resolved-by-the-thread-that-saves",
        "each save goes to the folder of its own call",
        "src/tensorferry/checkpoint/storage/calls.py",
        "            directory = claim.directory",
        "            pass",
        "tests/checkpoint/test_between_hooks.py::"
        "test_a_save_in_the_background_goes_where_its_call_said",
    ),
    _mutant(
        "ctrl-c-cancels-nothing",
        "an interrupted call completes what has begun, and begins nothing else",
        "csrc/bindings/scheduler.cpp",
        "        request.core->cancel();\n",
        "",
        "tests/transfers/test_lifetimes.py::test_ctrl_c_ends_a_blocking_read_before_its_time[threads]",
    ),
    _mutant(
        "future-does-not-keep-its-array",
        "memory and descriptors outlive every system call that uses them",
        "src/tensorferry/transfer/requests.py",
        "request, file, memory, offset, future, sums",
        "request, file, memory, offset, None, sums",
        "tests/transfers/test_lifetimes.py::test_a_target_that_nobody_else_holds_is_read_into_safely[threads-file]",
    ),
    _mutant(
        "fault-does-not-stop-new-blocks",
        "memory and descriptors outlive every system call that uses them",
        "csrc/transfer/transfer.cpp",
        "  stopped_.store(true, std::memory_order_relaxed);\n",
        "",
        "tests/transfers/test_drive_errors.py::test_after_an_error_no_further_block_begins[threads-read]",
    ),
    _mutant(
        "closed-file-gives-leases",
        "memory and descriptors outlive every system call that uses them",
        "csrc/file/file.cpp",
        "    if (present & retired_bit) return {};\n",
        "",
        "tests/cpp/file_test.cpp::a file that retires waits for its leases and gives no more",
    ),
    _mutant(
        "many-does-not-wait-after-a-failure",
        "with the result, the memory belongs to the caller again",
        "src/tensorferry/transfer/requests.py",
        "        if isinstance(error, Exception):\n            request.wait(None)\n        raise",
        "        raise",
        "tests/transfers/test_lifetimes.py::test_read_many_that_fails_half_way_touches_nothing_afterwards[threads]",
    ),
    _mutant(
        "blocking-call-does-not-look-at-its-array-again",
        "with the result, the memory belongs to the caller again",
        "csrc/bindings/scheduler.cpp",
        "  if (is_moved(*found)) {",
        "  if (false) {",
        "tests/transfers/test_lifetimes.py::test_an_array_that_gives_its_memory_back_meanwhile_is_told"
        "[threads-File.write-storage]",
    ),
    _mutant(
        "future-keeps-the-memory-of-its-result",
        "with the result, the memory belongs to the caller again",
        "csrc/bindings/future.cpp",
        "    keep = std::move(keep_);  // destroyed after the lock is released: a destructor may call back\n",
        "",
        "tests/transfers/test_futures.py::test_a_future_does_not_keep_the_copy_of_what_was_not_contiguous",
    ),
    _mutant(
        "future-hides-its-array-from-the-garbage-collector",
        "with the result, the memory belongs to the caller again",
        "csrc/bindings/future.cpp",
        "  Py_VISIT(array_.ptr());\n",
        "",
        "tests/transfers/test_futures.py::test_a_future_that_its_array_refers_to_is_collected[threads-4096]",
    ),
    _mutant(
        "loop-hears-of-what-another-awaits",
        "with the result, the memory belongs to the caller again",
        "csrc/bindings/future.cpp",
        "if (known.is_valid() && known().is(loop)) return listener;",
        "if (known.is_valid()) return listener;",
        "tests/transfers/test_futures.py::test_loops_of_several_threads_hear_of_their_own_transfers",
    ),
    _mutant(
        "interrupted-wait-counts-what-it-has-not-waited-for",
        "an interrupted call completes what has begun, and begins nothing else",
        "src/tensorferry/deepnvme/handles.py",
        "                self._pending[:0] = operations\n",
        "                pass\n",
        "tests/transfers/test_interrupts.py::"
        "test_a_wait_left_at_any_moment_before_it_waits_leaves_all_pending",
    ),
    _mutant(
        "closed-scheduler-admits",
        "a submit during a close is either finished or refused",
        "csrc/transfer/scheduler.cpp",
        "  if (state_ != State::open) return Admission::closed;\n",
        "",
        "tests/cpp/scheduler_test.cpp::closing finishes what is outstanding",
    ),
    _mutant(
        "worker-blocks-on-the-page-cache",
        "no operation that may block runs on a thread that drives a queue",
        "csrc/transfer/worker.cpp",
        "  if (!block.direct_descriptor && blocks) return hand_to_helper(block);\n",
        "",
        "tests/transfers/test_meetings.py::"
        "test_a_write_that_hangs_in_the_page_cache_holds_up_no_other_transfer[libaio]",
    ),
    _mutant(
        "syncs-share-helpers-with-transfers",
        "no operation that may block runs on a thread that drives a queue",
        "csrc/transfer/request.cpp",
        "job.lane->help_to_sync(std::move(job.action))",
        "job.lane->help(std::move(job.action))",
        "tests/transfers/test_meetings.py::test_syncs_that_hang_hold_up_no_other_file[libaio]",
    ),
    _mutant(
        "requests-take-no-turns",
        "requests share a queue fairly",
        "csrc/transfer/line.cpp",
        "  turn->left_nbytes -= std::min(turn->left_nbytes, nbytes);\n",
        "  (void)nbytes;\n",
        "tests/cpp/line_test.cpp::requests take turns of a megabyte",
    ),
    _mutant(
        "small-requests-are-not-first",
        "requests share a queue fairly",
        "csrc/transfer/line.cpp",
        "return request.nbytes() <= small_request_nbytes ? small : normal;",
        "return request.nbytes() <= 0 ? small : normal;",
        "tests/cpp/line_test.cpp::small requests come first, and the others in every seventeenth block",
    ),
    _mutant(
        "small-requests-starve-others",
        "requests share a queue fairly",
        "csrc/transfer/line.cpp",
        "if (served_[in] < blocks_before_the_next_class) return in;",
        "return in;",
        "tests/cpp/line_test.cpp::small requests come first, and the others in every seventeenth block",
    ),
    _mutant(
        "all-devices-have-one-lane",
        "a device that hangs delays no call on another device",
        "csrc/file/file.h",
        "return in_memory_ ? 0 : regular_ ? file_system_ : identity_.first;",
        "return 0;",
        "tests/transfers/test_hung_devices.py::"
        "test_a_device_that_hangs_holds_up_no_call_on_another_one[io_uring-closes-64]",
    ),
    _mutant(
        "all-classes-wait-behind-one-block",
        "requests share a queue fairly",
        "csrc/transfer/worker.cpp",
        "      if (limit == Line::class_count) limit = in;\n",
        "      limit = Line::small;\n",
        "tests/cpp/lane_test.cpp::a small read passes large blocks that wait for bounce memory",
    ),
    _mutant(
        "gpu-memory-does-not-wait-for-its-stream",
        "GPU memory is used only after the work queued on its stream, and a read is done only"
        " after its last copy into the GPU",
        "csrc/transfer/scheduler.cpp",
        "    if (!passed || *passed) continue;\n",
        "    continue;\n",
        "tests/cpp/device_test.cpp::a transfer begins when what was queued before it has passed, and holds up "
        "nobody until then",
    ),
    _mutant(
        "read-is-done-before-its-copy-into-the-gpu",
        "GPU memory is used only after the work queued on its stream, and a read is done only"
        " after its last copy into the GPU",
        "csrc/device/watcher.cpp",
        "      auto fault = copy->event.wait();\n",
        "      std::optional<Fault> fault;\n",
        "tests/cpp/device_test.cpp::several threads move memory of two GPUs while copies take their time; events "
        "and streams are used again",
    ),
    _mutant(
        "copies-wait-for-kernels-of-others",
        "GPU memory is used only after the work queued on its stream, and a read is done only"
        " after its last copy into the GPU",
        "csrc/device/gpu.cpp",
        "constexpr unsigned stream_non_blocking = 1;",
        "constexpr unsigned stream_non_blocking = 0;",
        "tests/cpp/device_test.cpp::a transfer begins when what was queued before it has passed, and holds up "
        "nobody until then",
    ),
    _mutant(
        "owners-are-never-dropped",
        "no worker uses Python",
        "csrc/bindings/scheduler.h",
        "    own->reap();\n",
        "",
        "tests/transfers/test_lifetimes.py::"
        "test_an_array_whose_future_was_dropped_is_released_without_a_further_call[threads]",
    ),
    _mutant(
        "edges-of-writes-share-pages-with-bodies",
        "bytes of a file outside the written range never change",
        "csrc/transfer/plan.cpp",
        "input.write ? std::max(input.offset_alignment, input.page_nbytes) : input.offset_alignment;",
        "input.offset_alignment;",
        "tests/cpp/plan_test.cpp::a ragged write keeps whole pages for its edges",
    ),
    _mutant(
        "file-is-cut-behind-pieces-that-failed",
        "bytes of a file outside the written range never change",
        "csrc/transfer/request.cpp",
        "    found->second->failed = true;\n",
        "",
        "tests/transfers/test_meetings.py::test_a_file_is_not_cut_where_a_piece_by_another_name_was_refused[threads]",
    ),
    _mutant(
        "size-is-set-with-the-blocks",
        "a file never looks longer than its reserved space",
        "csrc/file/file.cpp",
        "fallocate_retrying(descriptor(), FALLOC_FL_KEEP_SIZE, begin, end - begin)",
        "fallocate_retrying(descriptor(), 0, begin, end - begin)",
        "tests/transfers/test_extending.py::"
        "test_a_file_is_no_longer_than_before_where_space_is_refused_half_way[threads]",
    ),
    _mutant(
        "space-of-later-pieces-is-not-reserved",
        "a file never looks longer than its reserved space",
        "csrc/transfer/items.cpp",
        "const auto full = write ? reserve_all(items)",
        "const auto full = false ? reserve_all(items)",
        "tests/transfers/test_extending.py::test_pieces_that_do_not_fit_together_are_refused_before_one_is_written",
    ),
    _mutant(
        "write-many-ignores-sync",
        "success means that close(2) and every sync succeeded",
        "src/tensorferry/transfer/requests.py",
        "    flags = write, bool(truncate), sync, True, background\n",
        "    flags = write, bool(truncate), False, True, background\n",
        "tests/transfers/test_meetings_files.py::test_many_pieces_of_one_file_are_synced_once[threads]",
    ),
    _mutant(
        "new-names-are-not-synced",
        "success means that close(2) and every sync succeeded",
        "csrc/transfer/request.cpp",
        "options_.sync_names && file.name_made()",
        "options_.sync_names && false",
        "tests/transfers/test_meetings_files.py::test_two_files_in_one_new_directory_sync_it_once[threads]",
    ),
    _mutant(
        "failed-close-is-a-success",
        "success means that close(2) and every sync succeeded",
        "csrc/transfer/request.cpp",
        "    if (!unit->failed && !fault) fault = std::move(failed);\n",
        "",
        "tests/transfers/test_meetings.py::test_a_close_that_fails_is_a_failure_of_what_was_written[threads-5]",
    ),
    _mutant(
        "failed-fsync-is-a-success",
        "every result of a system call is checked",
        "csrc/file/file.cpp",
        '  return fault("fdatasync", sync_error_);\n',
        "  return std::nullopt;\n",
        "tests/transfers/test_drive_errors.py::test_a_failed_fsync_is_raised_and_one_that_is_asked_for_is_made[threads]",
    ),
    _mutant(
        "failed-fsync-is-forgotten",
        "success means that close(2) and every sync succeeded",
        "csrc/file/file.cpp",
        '  sync_error_ = errno;\n  return fault("fdatasync", sync_error_);\n',
        '  return fault("fdatasync", errno);\n',
        "tests/transfers/test_drive_errors.py::test_a_sync_that_failed_is_not_forgotten_by_the_file[threads]",
    ),
    _mutant(
        "a-file-is-cut-at-once",
        "overlapping writes lose nothing outside the overlap, and of two writes of a whole "
        "file the file holds exactly one",
        "src/tensorferry/transfer/requests.py",
        "    transfer(scheduler, file, (0, 0, None, None), nbytes, write=True, truncate=True)\n",
        "    file.truncate(nbytes)\n",
        "tests/transfers/test_write_order.py::test_what_was_submitted_before_a_file_is_cut_is_cut_off[threads-open]",
    ),
    _mutant(
        "items-are-ordered-by-name",
        "overlapping writes lose nothing outside the overlap, and of two writes of a whole "
        "file the file holds exactly one",
        "src/tensorferry/transfer/requests.py",
        "        positions.setdefault(files.get(path, path), []).append(index)\n",
        "        positions.setdefault(path, []).append(index)\n",
        "tests/transfers/test_write_order.py::"
        "test_of_items_that_overlap_the_later_one_wins_whatever_names_their_files_have",
    ),
    _mutant(
        "a-cut-comes-after-its-call-was-interrupted",
        "an interrupted call completes what has begun, and begins nothing else",
        "csrc/transfer/request.cpp",
        "    fault = canceled() ? Fault{",
        "    fault = false ? Fault{",
        "tests/transfers/test_write_order.py::test_a_cut_that_ctrl_c_ends_while_it_waits_does_not_come_later[threads-open]",
    ),
    _mutant(
        "interrupted-calls-are-made-again-without-a-look-at-signals",
        "an interrupted call completes what has begun, and begins nothing else",
        "csrc/transfer/scheduler.cpp",
        "        if (block.result == -EINTR && interruptions_are_returned) return step;\n",
        "",
        "tests/transfers/test_meetings_files.py::"
        "test_ctrl_c_ends_a_small_call_at_the_first_system_call_that_it_interrupts[threads]",
    ),
    _mutant(
        "files-of-users-are-waited-for",
        "nothing grows without bound",
        "src/tensorferry/transfer/runtime.py",
        "        if _core.files_of_requests()[0] <= _MIN_REQUEST_FILES or waiting.is_over:\n",
        "        if waiting.is_over:\n",
        "tests/transfers/test_limits.py::test_files_that_are_open_already_wait_for_nobodys_descriptors[threads]",
    ),
    _mutant(
        "half-of-the-descriptors-is-no-limit",
        "nothing grows without bound",
        "src/tensorferry/transfer/runtime.py",
        "        waiting = waiting or _DescriptorWait(scheduler)\n        # If",
        "        break\n        # Files",
        "tests/transfers/test_limits.py::test_half_of_the_descriptors_is_left_to_others[threads]",
    ),
    _mutant(
        "later-callers-are-admitted-first",
        "a shared resource is given out in the order of the requests for it",
        "csrc/transfer/scheduler.cpp",
        "std::ranges::none_of(waiting_, holds_this_back);",
        "true;",
        "tests/cpp/scheduler_test.cpp::callers are admitted in turn, but one that waits for a hung device holds back no"
        " other device",
    ),
    _mutant(
        "bounce-memory-is-taken-past-the-queue",
        "a shared resource is given out in the order of the requests for it",
        "csrc/memory/bounce_pool.cpp",
        "const bool is_first = queue_.empty() || (queued && ticket->place_ == queue_.begin());",
        "const bool is_first = true;",
        "tests/cpp/memory_test.cpp::memory is given out in the order of the queue, and a waiter that leaves holds up no"
        " other",
    ),
    _mutant(
        "devices-are-truncated",
        "bytes of a file outside the written range never change",
        "csrc/transfer/request.h",
        "uses_files() && file.regular() &&",
        "uses_files() &&",
        "tests/transfers/test_devices.py::test_a_device_has_its_size_and_is_neither_extended_nor_cut[threads]",
    ),
    _mutant(
        "any-number-of-transfers-is-outstanding",
        "nothing grows without bound",
        "csrc/transfer/scheduler.cpp",
        "outstanding + wanted.count <= max_outstanding;",
        "wanted.count <= max_outstanding;",
        "tests/cpp/scheduler_test.cpp::who submits more to a device than may be outstanding waits, and nobody else",
    ),
    _mutant(
        "one-device-has-all-outstanding-transfers",
        "a device that hangs delays its own calls, and no call on another device",
        "csrc/transfer/scheduler.cpp",
        "const bool is_shared = std::ranges::find(later, wanted.lane, &Places::lane) != later.end();",
        "const bool is_shared = !later.empty();",
        "tests/cpp/scheduler_test.cpp::callers are admitted in turn, but one that waits for a hung device holds back no"
        " other device",
    ),
    _mutant(
        "any-number-of-threads-in-an-engine",
        "nothing grows without bound",
        "csrc/engine/threads.cpp",
        "limit_(std::min(options.queue_depth, max_threads))",
        "limit_(options.queue_depth)",
        "tests/transfers/test_limits.py::test_a_drive_that_hangs_takes_a_bounded_number_of_threads[threads]",
    ),
    _mutant(
        "what-was-read-ahead-of-a-write-is-given",
        "read-ahead of a safetensors file is bounded, and each of its tensors is given to one"
        " caller",
        "src/tensorferry/transfer/versioned.py",
        "        if self._present_version() == self.version:\n",
        "        if True:\n",
        "tests/safetensors/test_opened.py::test_a_file_that_is_changed_in_place_is_refused",
    ),
    _mutant(
        "reads-ahead-have-no-bound",
        "read-ahead of a safetensors file is bounded, and each of its tensors is given to one"
        " caller",
        "src/tensorferry/safetensors/read_ahead.py",
        "ahead.pipeline.memory_nbytes = min(ahead.pipeline.ahead_nbytes, read_nbytes)",
        "ahead.pipeline.memory_nbytes = 1 << 60",
        "tests/safetensors/test_opened.py::"
        "test_what_is_read_ahead_is_bounded_and_goes_with_the_handle",
    ),
    _mutant(
        "workers-touch-memory",
        "no operation that may block runs on a thread that drives a queue",
        "csrc/transfer/transfer.cpp",
        "reading[] = {Step::touch, Step::move,",
        "reading[] = {Step::move,",
        "tests/cpp/scheduler_test.cpp::memory without pages gets them before its block is an engine's, once, "
        "and by other threads than workers",
    ),
    _mutant(
        "any-number-of-helpers",
        "nothing grows without bound",
        "csrc/transfer/helpers.cpp",
        " && state.running < state.max_threads && !start_thread() && state.running == 0) {",
        " && !start_thread() && state.running == 0) {",
        "tests/transfers/test_limits.py::test_a_drive_that_hangs_takes_a_bounded_number_of_threads[libaio]",
    ),
    _mutant(
        "overlapping-writes-run-together",
        "overlapping writes lose nothing outside the overlap, and of two writes of a whole "
        "file the file holds exactly one",
        "csrc/transfer/write_order.cpp",
        "    if (after != under_way.end() && after->first < end) return false;\n",
        "",
        "tests/cpp/write_order_test.cpp::"
        "of two writes of a file the second begins at once just where they do not overlap",
    ),
    _mutant(
        "a-write-begins-before-what-cuts-its-file-may",
        "overlapping writes lose nothing outside the overlap, and of two writes of a whole "
        "file the file holds exactly one",
        "csrc/transfer/write_order.cpp",
        "if (!line->second.may_begin(write->begin(), write->end())) return false;",
        "if (!line->second.may_begin(write->begin(), write->end())) return write != writes.front();",
        "tests/cpp/write_order_test.cpp::"
        "a write and what cuts its file behind it begin together or not at all",
    ),
    _mutant(
        "a-new-file-is-not-durable-when-it-gets-its-name",
        "a file that is replaced atomically is the old one or the new one at every moment",
        "src/tensorferry/transfer/replacement.py",
        "array, sync=True, priority=priority",
        "array, sync=False, priority=priority",
        "tests/transfers/test_power_cuts.py::"
        "test_what_was_written_with_sync_is_there_with_its_name_after_a_power_cut[ext2]",
    ),
    _mutant(
        "a-temporary-file-of-a-running-writer-is-removed",
        "the temporary file of a killed writer is removed by the next replacement in its "
        "directory, and that of a running writer is not",
        "src/tensorferry/transfer/publication.py",
        "        if is_unlocked is False:\n            return\n",
        "        is_unlocked = True\n",
        "tests/transfers/test_temporary_files.py::test_a_running_writer_keeps_its_file",
    ),
    _mutant(
        "a-temporary-file-of-a-killed-writer-stays",
        "the temporary file of a killed writer is removed by the next replacement in its "
        "directory, and that of a running writer is not",
        "src/tensorferry/transfer/publication.py",
        "                _remove_abandoned(self)\n",
        "                pass\n",
        "tests/transfers/test_temporary_files.py::"
        "test_the_next_replacement_removes_what_a_killed_one_left[write]",
    ),
    _mutant(
        "commit-does-not-look-at-files",
        "a directory holds a complete checkpoint at every moment",
        "src/tensorferry/checkpoint/storage/commit.py",
        "        _check_files(directory, metadata)\n        # Both",
        "        # Both",
        "tests/checkpoint/test_savers.py::"
        "test_a_save_that_finds_a_file_of_its_own_missing_fails_and_leaves_the_one_before",
    ),
    _mutant(
        "a-child-of-multiprocessing-does-not-wait",
        "what has begun is complete when the process has ended",
        "src/tensorferry/transfer/runtime.py",
        "        util.Finalize(None, finish_at_exit, exitpriority=_LAST)\n",
        "",
        "tests/transfers/test_exits.py::"
        "test_what_has_begun_is_complete_when_the_process_has_ended[return-fork-no]",
    ),
    _mutant(
        "calls-during-the-exit-do-not-wait",
        "what has begun is complete when the process has ended",
        "csrc/bindings/scheduler.cpp",
        "  if (!more && is_exiting()) {",
        "  if (false) {",
        "tests/transfers/test_exits.py::"
        "test_what_has_begun_is_complete_when_the_process_has_ended[in a finalizer-fork-no]",
    ),
    _mutant(
        "checksums-are-given-when-all-bytes-have-them",
        "checksums exist only of a transfer that has succeeded",
        "src/tensorferry/transfer/checksums.py",
        "        if sums is None or not self._has_succeeded():\n",
        "        if sums is None:\n",
        "tests/transfers/test_segments.py::test_a_transfer_that_fails_gives_no_checksums",
    ),
    _mutant(
        "destinations-may-share-memory",
        "no two destinations of one call share memory",
        "csrc/bindings/collect.cpp",
        "      if (other.begin - one.begin >= one.nbytes) continue;\n",
        "      if (other.begin != one.begin) continue;\n",
        "tests/transfers/test_segments.py::test_destinations_that_share_memory_are_refused",
    ),
    _mutant(
        "obstore-continues-broken-responses",
        "an object in a bucket is read as one version, and no byte of a response is trusted before "
        "the response is complete",
        "src/tensorferry/transfer/remote.py",
        '"retry_config": {"max_retries": 0}',
        '"retry_config": {"max_retries": 5}',
        "tests/transfers/test_remote.py::"
        "test_a_response_that_broke_off_is_not_continued_with_another_version",
    ),
    _mutant(
        "metadata-is-not-synced",
        "a directory holds a complete checkpoint at every moment",
        "src/tensorferry/transfer/publication.py",
        "    if sync:\n        os.fsync(descriptor)\n",
        "",
        "tests/checkpoint/test_crash.py"
        "::test_a_power_cut_at_any_step_of_the_commit_leaves_one_checkpoint_whole_and_after_it_the_new_one",
    ),
    _mutant(
        "leftovers-are-never-removed",
        "the remains of a killed save are removed before the next one",
        "src/tensorferry/checkpoint/storage/writer.py",
        "                commit.remove_leftovers(call.folder, rank=rank)\n",
        "                pass\n",
        "tests/checkpoint/test_writer.py::test_leftovers_of_a_killed_save_make_room_before_the_next_one",
    ),
    _mutant(
        "everybody-is-alone",
        "a save never removes files of another running save",
        "src/tensorferry/checkpoint/storage/savers.py",
        "            yield locked and self._descriptor is not None and _is_at(self._descriptor, self._path)\n",
        "            yield True\n",
        "tests/checkpoint/test_savers.py::"
        "test_a_save_that_begins_and_ends_within_another_loses_nothing_of_it[over an old one]",
    ),
    _mutant(
        "savers-do-not-show-themselves",
        "a save never removes files of another running save",
        "src/tensorferry/checkpoint/storage/savers.py",
        "locked = set_lock(descriptor, fcntl.F_RDLCK, _PRESENCE + self._offset, self._nbytes)",
        "locked = True",
        "tests/checkpoint/test_savers.py::test_the_last_of_those_who_leave_at_once_removes_the_file_of_the_locks",
    ),
    _mutant(
        "lent-memory-is-copied-late",
        "memory that a planner may reuse is copied before the next item",
        "src/tensorferry/checkpoint/storage/writer.py",
        "            file.wait_until_copied()\n    length",
        "            pass\n    length",
        "tests/checkpoint/test_subclasses.py::"
        "test_a_planner_that_fills_one_buffer_again_and_again_saves_each_tensor",
    ),
    _mutant(
        "payloads-are-paired-by-order",
        "each payload belongs to the storage that its record names",
        "src/tensorferry/checkpoint/objects/save_load.py",
        "[storages[key] for key in archive.payload_keys]",
        "[storages[key] for key in sorted(archive.payload_keys)]",
        "tests/checkpoint/test_objects.py::test_save_writes_what_torch_would[many of one size]",
    ),
    _mutant(
        "chunks-are-not-compared",
        "no damaged data reaches a tensor",
        "src/tensorferry/checkpoint/storage/reading.py",
        "        expected = self._expected(begin, end) if self._damaged is None else None\n",
        "        expected = None\n",
        "tests/checkpoint/test_verify.py::test_nothing_damaged_gets_into_a_tensor",
    ),
    _mutant(
        "planners-are-asked-ahead",
        "a planner that acts when an item is committed gets the items one after the other, as"
        " from torch's reader",
        "src/tensorferry/checkpoint/storage/reader.py",
        "        if not self._acts_on_commit():\n",
        "        if True:\n",
        "tests/checkpoint/test_reader.py::"
        "test_an_item_is_committed_before_the_planner_is_asked_for_the_next_one[shape0]",
    ),
    _mutant(
        "unknown-names-are-imported",
        "reading a checkpoint runs no code chosen by the file, and changes nothing in the process",
        "src/tensorferry/checkpoint/zipformat/unpickling.py",
        '            raise RefusedError(f"{module}.{name}")\n',
        "            return super().find_class(module, name)\n",
        "tests/checkpoint/test_hostile.py::test_hostile_metadata_does_nothing[eval]",
    ),
    _mutant(
        "blobs-without-checksums-count-as-verified",
        "only verified data is called verified",
        "src/tensorferry/checkpoint/zipformat/blobs.py",
        "            verified = False\n",
        "            verified = True\n",
        "tests/checkpoint/test_verify.py::test_torchs_checkpoint_without_checksums_is_said_to_have_none",
    ),
    _mutant(
        "names-in-headers-are-not-compared",
        "only verified data is called verified",
        "src/tensorferry/checkpoint/zipformat/zips.py",
        '    _require(read(at, at + local[8]) == name, f"the name of {name!r} differs in its header")\n',
        "",
        "tests/checkpoint/test_verify.py::test_flips_after_which_torch_fails_are_found",
    ),
    _mutant(
        "read-ahead-without-a-limit",
        _AHEAD,
        "src/tensorferry/transfer/pipeline.py",
        "            and self._read_end - in_flight[0]._read_before < self.ahead_nbytes\n",
        "",
        "tests/transfers/test_pipeline.py::test_what_is_on_its_way_is_bounded_by_the_variable",
    ),
    _mutant(
        "an-interrupted-read-is-passed-over",
        _AHEAD,
        "src/tensorferry/transfer/pipeline.py",
        "                read = self._waiting[0]\n",
        "                read = self._waiting.popleft()\n",
        "tests/transfers/test_pipeline.py::test_interrupted_at_any_moment_it_goes_on",
    ),
    _mutant(
        "closing-leaves-reads-on-their-way",
        _AHEAD,
        "src/tensorferry/transfer/pipeline.py",
        "            for read in reads:\n                read.cancel()\n",
        "            reads = []\n",
        "tests/transfers/test_pipeline.py::"
        "test_closing_cancels_all_before_it_waits_for_any_and_leaves_what_was_released",
    ),
    _mutant(
        "any-number-of-transfers-is-begun",
        "a save or load uses at most 64 MiB in addition to the state",
        "src/tensorferry/transfer/pipeline.py",
        "            if held_nbytes + read.memory_nbytes > self.memory_nbytes:\n",
        "            if held_nbytes + read.memory_nbytes > 2**60:\n",
        "tests/checkpoint/test_reader.py::test_load_takes_little_memory[True-True]",
    ),
    _mutant(
        "who-fails-waits-for-nothing",
        "with the result, the memory belongs to the caller again",
        "src/tensorferry/checkpoint/storage/reading.py",
        "        self._pipeline.close()\n",
        "        pass\n",
        "tests/checkpoint/test_reading.py::test_a_load_that_failed_touches_no_tensor_any_more",
    ),
    _mutant(
        "winner-of-the-sweep-is-chosen",
        "noise is never taken for faster settings",
        "src/tensorferry/tuning/deciding.py",
        "    proven = low > 0 and mean >= math.log(GAIN_MIN)\n",
        "    proven = mean >= math.log(GAIN_MIN)\n",
        "tests/tuning/test_deciding.py::test_settings_that_do_not_differ_are_almost_never_preferred",
    ),
    _mutant(
        "the-report-goes-on",
        "the report fits on a terminal of 50 lines, and leaves out the least important advice first",
        "src/tensorferry/cli/report.py",
        "        if len(lines) + len(item_lines) >= _MAX_LINES:\n",
        "        if len(lines) + len(item_lines) >= 1000:\n",
        "tests/cli/test_report.py::test_it_fits_on_a_screen_whatever_is_to_be_told",
    ),
    _mutant(
        "ds-io-has-the-defaults-of-bench",
        "an option of a measurement is declared once, with its default in each command",
        "src/tensorferry/cli/options.py",
        "        default = getattr(self, command)\n",
        '        default = getattr(self, "bench" if command == "ds_io" else command)\n',
        "tests/cli/test_ds_io.py::test_defaults_are_those_of_ds_io",
    ),
    _mutant(
        "an-explicit-setting-loses-to-the-environment",
        "an explicit setting takes precedence over the environment, and a bad variable is refused",
        "src/tensorferry/transfer/settings.py",
        "    if value is not None:\n",
        "    if value is not None and not os.environ.get(_variable(name)):\n",
        "tests/transfers/test_settings.py::test_an_explicit_setting_wins_over_the_environment",
    ),
    _mutant(
        "orphans-do-not-clean-up",
        "benchmarks leave nothing behind",
        "src/tensorferry/tuning/workers.py",
        "            served.on_orphaned()\n",
        "            pass\n",
        "tests/tuning/test_workers.py::test_workers_whose_parent_is_killed_clean_up",
    ),
    _mutant(
        "io-uring-goes-on-by-itself-on-fuse",
        "a short transfer is resumed where it ended, on every file system",
        "csrc/transfer/worker.cpp",
        "  if (block.transfer->file()->on_fuse() && !engine_->has_threads()) return hand_to_helper(block);\n",
        "",
        "tests/transfers/test_network_mounts.py::test_short_direct_reads_are_completed",
        "tests/transfers/test_network_mounts.py::test_short_direct_writes_are_completed",
    ),
    _mutant(
        "no-read-of-a-mount-decides",
        "the first reads of a network mount decide how it is read",
        "csrc/file/first_reads.cpp",
        "share < max_share_of_direct ? Way::cached : Way::direct",
        "Way::direct",
        "tests/cpp/first_reads_test.cpp::"
        "of the first large blocks some go through the page cache, and none later unless that is much faster",
        "tests/transfers/test_network_mounts.py::"
        "test_reads_go_through_the_page_cache_where_that_has_been_much_faster",
    ),
    _mutant(
        "any-fault-may-be-raised",
        "the first fault is raised, and refers to the others",
        "csrc/transfer/transfer.cpp",
        "  if (!fault_ || fault.offset < fault_->offset) {",
        "  if (!fault_) {",
        "tests/transfers/test_drive_errors.py::"
        "test_of_several_blocks_that_fail_the_first_by_offset_is_reported[threads-read]",
    ),
    _mutant(
        "failures-do-not-know-the-others",
        "the first fault is raised, and refers to the others",
        "src/tensorferry/errors.py",
        "        first.others = tuple(others)\n",
        "",
        "tests/transfers/test_meetings_files.py::test_writes_that_fail_are_all_in_the_error_in_their_order[threads]",
    ),
    _mutant(
        "child-waits-for-writes-of-its-parent",
        "a forked child cannot hang on its parent's threads",
        "csrc/transfer/write_order.cpp",
        "return of_this_process<Lines>();",
        "  static auto* instance = new Lines;\n  return *instance;",
        "tests/transfers/test_write_order.py::test_a_forked_child_does_not_wait_for_the_writes_of_its_parent[threads]",
    ),
    _mutant(
        "first-transfer-imports",
        "a forked child cannot hang on its parent's threads",
        "src/tensorferry/transfer/arrays.py",
        '    masked = getattr(sys.modules.get("numpy.ma.core"), "MaskedArray", None)\n',
        '    masked = sys.modules["numpy"].ma.MaskedArray\n',
        "tests/transfers/test_lifetimes.py::test_first_transfers_import_nothing[threads]",
    ),
    _mutant(
        "removed-files-come-back",
        "a saved safetensors file is the old one or the new one, and an index names the files of one model at every "
        "moment",
        "src/tensorferry/safetensors/sharded.py",
        "            self._sync_names()  # so the removed files cannot come back after a power cut\n",
        "",
        "tests/safetensors/test_sharded.py::"
        "test_a_power_cut_after_a_synced_save_loses_nothing[ext4-several files-over one file]",
    ),
    _mutant(
        "shards-of-gone-ranks-come-back",
        "a saved safetensors file is the old one or the new one, and an index names the files of one model at every "
        "moment",
        "src/tensorferry/checkpoint/storage/huggingface.py",
        "            Model(path, sync=self.sync_files).commit(None, placed=files)\n",
        "            Model(path, sync=False).commit(None, placed=files)\n",
        "tests/checkpoint/test_huggingface.py::"
        "test_shards_of_ranks_that_are_no_more_do_not_come_back_after_a_power_cut[ext4]",
    ),
    _mutant(
        "mxfp4-is-planned-as-it-is-stored",
        _DEQUANTISED,
        "src/tensorferry/checkpoint/storage/quantized.py",
        "                described.chunks = [ChunkStorageMetadata(origin, size)]\n",
        "                described.chunks = [ChunkStorageMetadata(origin, chunk.sizes)]\n",
        "tests/checkpoint/test_quantized.py::test_mxfp4_is_loaded_whole[(3, 5, 7, 16)]",
    ),
    _mutant(
        "scales-of-other-blocks-are-taken",
        _DEQUANTISED,
        "src/tensorferry/checkpoint/storage/quantized.py",
        "        if place is None or [*place.shape] != needed:\n",
        "        if place is None:\n",
        "tests/checkpoint/test_quantized.py::"
        "test_what_cannot_be_dequantised_is_refused_by_name[scales of smaller blocks]",
    ),
    _mutant(
        "blocks-begin-where-a-slice-does",
        _DEQUANTISED,
        "src/tensorferry/checkpoint/storage/quantized.py",
        "        within = [at % side for at in begin]\n",
        "        within = [0 for at in begin]\n",
        "tests/checkpoint/test_quantized.py::test_a_slice_that_begins_within_blocks_has_the_scale_of_each",
    ),
    _mutant(
        "damaged-chunks-are-delivered",
        "no data that fails its checksum reaches an array",
        "csrc/transfer/transfer.cpp",
        "  if (damaged) return fail_damaged(*damaged);\n",
        "  (void)damaged;\n",
        "tests/transfers/test_segments.py::test_nothing_of_a_damaged_chunk_reaches_an_array[threads-True-True]",
    ),
    _mutant(
        "removal-begins-with-the-files",
        "a partial checkpoint never counts, however a save or a removal ends",
        "src/tensorferry/checkpoint/folder.py",
        '        path.rename(path.with_name(f"{prefix}{path.name}.{secrets.token_hex(8)}"))',
        "        shutil.rmtree(path)",
        "tests/checkpoint/test_manager.py::test_killed_at_any_step_of_saving_and_removing_no_half_checkpoint_"
        "counts_and_nothing_stays",
    ),
    _mutant(
        "links-protect-nothing",
        "a checkpoint is removed only when a newer one is complete and has been read back, and never while a link "
        "leads to it, a save writes there, or it is being loaded",
        "src/tensorferry/checkpoint/folder.py",
        "        links = self._links() if removable else []",
        "        links: list[tuple[Path, Path]] = []",
        "tests/checkpoint/test_manager.py::test_what_links_lead_to_stays",
    ),
    _mutant(
        "what-is-loaded-is-removed",
        "a checkpoint is removed only when a newer one is complete and has been read back, and never while a link "
        "leads to it, a save writes there, or it is being loaded",
        "src/tensorferry/checkpoint/folder.py",
        "            if is_unread and (alone",
        "            if (alone",
        "tests/checkpoint/test_manager.py::test_a_checkpoint_that_another_process_is_loading_is_not_removed",
    ),
    _mutant(
        "uploads-are-believed",
        _MIRRORED,
        "src/tensorferry/checkpoint/mirror/uploading.py",
        """        if there["e_tag"] != f'"{whole}-{len(digests)}"':\n""",
        "        if not whole:\n",
        "tests/checkpoint/test_mirror.py::test_bytes_that_change_on_their_way_are_found",
    ),
    _mutant(
        "commits-are-not-conditional",
        _MIRRORED,
        "src/tensorferry/checkpoint/mirror/process.py",
        '"create" if there is None else there[1]',
        '"overwrite"',
        "tests/checkpoint/test_mirror.py::test_a_commit_that_meets_anothers_leaves_it",
    ),
    _mutant(
        "tidying-removes-what-counts",
        _MIRRORED,
        "src/tensorferry/checkpoint/mirror/bucket.py",
        "for name in names.keys() - named",
        "for name in names.keys()",
        "tests/checkpoint/test_mirror.py::test_what_is_in_the_bucket_is_what_is_on_the_drive",
    ),
    _mutant(
        "what-the-drive-has-damaged-is-mirrored",
        _MIRRORED,
        "src/tensorferry/checkpoint/mirror/uploading.py",
        "if is_whole and crc != stored.crcs[number]:",
        "if False:",
        "tests/checkpoint/test_mirror.py::"
        "test_what_the_drive_has_damaged_is_not_uploaded_and_older_ones_stay[flip]",
    ),
    _mutant(
        "old-checkpoints-go-before-the-new-one-is-read-back",
        "a checkpoint is removed only when a newer one is complete and has been read back, and never "
        "while a link leads to it, a save writes there, or it is being loaded",
        "src/tensorferry/checkpoint/manager.py",
        "        contents.verify_file(name)\n",
        "        pass\n",
        "tests/checkpoint/test_manager.py::test_nothing_is_removed_for_a_checkpoint_that_the_drive_has_damaged",
    ),
    _mutant(
        "values-of-ranks-are-not-compared",
        "values that ranks save under one name are not lost silently",
        "src/tensorferry/checkpoint/storage/rank_values.py",
        "if len(found) > 1}",
        "if not found}",
        "tests/checkpoint/test_rank_values.py::test_ranks_that_save_different_values_under_one_name_say_so",
    ),
    _mutant(
        "mirrors-outlive-their-training",
        "a mirror never makes a save fail, and never outlives its training",
        "src/tensorferry/checkpoint/mirror/process.py",
        'select.select([os.pidfd_open(settings["process"])], [], [])',
        "return",
        "tests/checkpoint/test_mirror.py::test_the_mirror_ends_with_the_training_though_a_child_of_that_lives",
    ),
    _mutant(
        "latest-before-all-ranks",
        "DeepSpeed's `latest` names a checkpoint that is complete on all ranks, and exactly "
        "its files are loaded",
        "src/tensorferry/deepspeed/checkpoints.py",
        "        found = self._ranks.call(self._finish)\n",
        "        self._publish({})\n        found = self._ranks.call(self._finish)\n",
        "tests/deepspeed/test_checkpoints.py::test_a_save_that_fails_on_one_rank_fails_on_all_and_changes_nothing",
    ),
    _mutant(
        "files-of-two-saves",
        "DeepSpeed's `latest` names a checkpoint that is complete on all ranks, and exactly "
        "its files are loaded",
        "src/tensorferry/deepspeed/checkpoints.py",
        "    if entry is not None:\n        _compare(place, entry)\n",
        "",
        "tests/deepspeed/test_checkpoints.py::test_what_is_not_whole_is_refused_by_its_name",
    ),
    _mutant(
        "moments-on-nvme-begin-anew",
        "DeepSpeed resumes from a checkpoint exactly, wherever its states are",
        "src/tensorferry/deepspeed/checkpoints.py",
        "                state = swapped.read(number, name, torch.empty_like(param.data))\n",
        "                state = torch.zeros_like(param.data)\n",
        "tests/deepspeed/test_checkpoints.py::test_training_goes_on_from_checkpoints_to_the_last_bit[nvme-2-{}]",
    ),
    _mutant(
        "a-refusal-is-damage",
        "a refused object is not reported as damage",
        "src/tensorferry/checkpoint/manager.py",
        "    if isinstance(error, RefusedCheckpointError):\n        return False\n",
        "",
        "tests/checkpoint/test_manager.py::test_files_that_were_moved_and_linked_to_are_no_damage",
    ),
    _mutant(
        "newer-checkpoints-are-counted",
        "a checkpoint is removed only when a newer one is complete and has been read back, and never while a link "
        "leads to it, a save writes there, or it is being loaded",
        "src/tensorferry/checkpoint/steps.py",
        "    older = sorted(each for each in steps if each < step)",
        "    older = sorted(each for each in steps if each != step)",
        "tests/checkpoint/test_manager.py::test_without_keep_last_all_stay_and_newer_ones_always_do",
    ),
    _mutant(
        "leftovers-of-the-living-are-removed",
        "the remains of a dead save are removed, and nothing else",
        "src/tensorferry/checkpoint/folder.py",
        "in list(self.root.iterdir()) if alone else ():",
        "in list(self.root.iterdir()):",
        "tests/checkpoint/test_manager.py::test_what_an_alive_save_has_begun_is_no_leftover",
    ),
    _mutant(
        "any-directory-without-metadata-is-a-leftover",
        "the remains of a dead save are removed, and nothing else",
        "src/tensorferry/checkpoint/folder.py",
        " or not (path / _UNFINISHED).exists():",
        " or not path.is_dir():",
        "tests/checkpoint/test_manager.py::test_other_things_in_the_folder_are_left_alone",
    ),
    _mutant(
        "each-rank-raises-its-own",
        "ranks load the same step, and fail together",
        "src/tensorferry/base/ranks.py",
        "            if failure is not None:\n                raise own if",
        "            if failure is not None and rank == self.rank:\n                raise own if",
        "tests/checkpoint/test_manager.py::test_what_fails_on_one_rank_is_raised_on_all",
    ),
    _mutant(
        "chunks-are-verified-in-the-array",
        "no data that fails its checksum reaches an array",
        "csrc/transfer/plan.cpp",
        "  if (input_.verified_nbytes) return 0;\n  const auto rest",
        "  const auto rest",
        "tests/cpp/plan_test.cpp::every byte is carried once, by a way that its alignment allows",
    ),
    _mutant(
        "tensors-may-have-bytes-between-them",
        "a safetensors file is not trusted before its header has passed every rule",
        "src/tensorferry/safetensors/header.py",
        "        if begin != at or end < begin:",
        "        if begin < at or end < begin:",
        "tests/safetensors/test_header.py::test_a_broken_rule_of_a_tensor_names_it",
    ),
    _mutant(
        "a-kept-tensor-keeps-its-neighbours",
        "a loaded tensor keeps its own memory alive, and no other's",
        "src/tensorferry/safetensors/loading.py",
        "        return self.mapping.bytes(begin - self.begin, end - begin, True)",
        "        return self.mapping.bytes(begin - self.begin, end - begin, False)",
        "tests/safetensors/test_loading.py::test_a_tensor_that_is_kept_keeps_no_others",
    ),
    _mutant(
        "new-shards-take-the-names-of-old-ones",
        "a saved safetensors file is the old one or the new one, and an index names the files of one model at every "
        "moment",
        "src/tensorferry/safetensors/sharded.py",
        "            if not is_free and weights and self._are_in_directory():\n",
        "            if False:\n",
        "tests/safetensors/test_sharded.py::test_at_every_step_there_is_the_old_model_or_the_new_one",
    ),
    _mutant(
        "what-is-no-tensor-is-left-out",
        "a conversion loses nothing silently",
        "src/tensorferry/checkpoint/tools/archives.py",
        "            others.append(name or _ITSELF)\n",
        "            pass\n",
        "tests/checkpoint/test_convert.py::test_what_is_no_tensor_is_refused_unless_it_is_to_be_left_out",
    ),
    _mutant(
        "a-missing-rank-is-not-missed",
        "the tensors at a place are determined in one way",
        "src/tensorferry/safetensors/sources.py",
        "        if len(saves) == 1 and count and count != str(len(paths)):\n",
        "        if False:\n",
        "tests/checkpoint/test_places.py::test_a_file_that_any_rank_has_written_is_missed",
    ),
    _mutant(
        "absent-weights-are-computed-with",
        "no computation uses a parameter that is not in memory",
        "src/tensorferry/offload/swapper.py",
        "            value = math.nan if",
        "            value = 1 if",
        "tests/offload/test_weights.py::test_an_absent_weight_is_nan_where_python_is_not_asked",
    ),
    _mutant(
        "a-row-that-comes-twice-is-given-once",
        _ROWS,
        "csrc/transfer/gather.cpp",
        "    for (size_t copy = index + 1; copied && copy < next; ++copy) {",
        "    for (size_t copy = index + 2; copied && copy < next; ++copy) {",
        "tests/cpp/gather_test.cpp::every wanted byte has its places, and gaps fill what lies between",
    ),
    _mutant(
        "a-number-without-a-sign-counts-from-the-end",
        _ROWS,
        "csrc/transfer/gather.cpp",
        "    const bool from_end = numbers[place] < 0 && !is_unsigned;",
        "    const bool from_end = numbers[place] < 0;",
        "tests/cpp/gather_test.cpp::numbers are sorted, count from the end, and are told where they are of no row",
    ),
    _mutant(
        "a-row-straight-to-its-place-has-no-copies",
        _ROWS,
        "csrc/transfer/transfer.cpp",
        "    const bool copies = block.bounce || spec_.checksums || spec_.memory.has_copies();",
        "    const bool copies = block.bounce || spec_.checksums;",
        "tests/table/test_table.py::test_rows_are_those_that_an_index_chooses",
    ),
    _mutant(
        "a-numpy-member-is-not-compared",
        "reading NumPy's files returns what was written, or an error",
        "src/tensorferry/npy.py",
        "        if self.place.crc not in (None, crc):\n",
        "        if False:\n",
        "tests/checkpoint/test_npy.py::test_every_flipped_bit_of_a_member_is_found[stored]",
    ),
    _mutant(
        "a-child-uses-what-is-its-parents",
        "a forked child cannot hang on its parent's threads",
        "src/tensorferry/base/processes.py",
        "        if self.is_parents:\n",
        "        if False:\n",
        "tests/store/test_store.py::test_a_forked_child_leaves_everything_alone",
    ),
    _mutant(
        "two-passes-get-one-batch",
        _EMBEDDED,
        "src/tensorferry/offload/embedding.py",
        "                self._pipeline.release(same)\n",
        "                pass\n",
        "tests/offload/test_embedding.py::test_rows_are_those_of_torchs_whatever_was_prefetched",
    ),
    _mutant(
        "a-cache-that-is-being-changed-is-used",
        _EMBEDDED,
        "src/tensorferry/offload/embedding.py",
        "            if self._cache.changing:\n",
        "            if False:\n",
        "tests/offload/test_embedding.py::test_a_signal_handler_may_look_up_rows_at_any_moment",
    ),
    _mutant(
        "an-object-that-was-replaced-is-read-on",
        "an object in a bucket is read as one version, and no byte of a response is trusted "
        "before the response is complete",
        "src/tensorferry/transfer/remote.py",
        "            if (found := Version._of(answer.meta)) != self._version:\n",
        "            if (found := self._version) != self._version:\n",
        "tests/transfers/test_remote.py::test_what_fails_once_is_asked_for_again_or_raised[another version]",
    ),
    _mutant(
        "a-forked-child-waits-for-its-parents-threads",
        "a forked child is refused obstore's threads, which are its parent's",
        "src/tensorferry/transfer/remote.py",
        "    if processes.forked_with_obstore:\n",
        "    if False:\n",
        "tests/transfers/test_remote.py::test_a_forked_child_is_told",
    ),
]
