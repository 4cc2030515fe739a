"""Defects that tests must notice: one at least for each invariant of ARCHITECTURE.md. `make mutants` tries them all.

Add one where a defect was missed: its text must be in the file once, and its tests are those of what the file is part
of, as few as notice it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A defect.

    Attributes
    ----------
    name : str
        What goes wrong.
    invariant : str
        What no longer holds, as in ARCHITECTURE.md's table if it is there.
    file : str
        Where.
    old, new : str
        What stands there, and what would be wrong.
    tests : tuple of str
        Who must notice: pytest's names, or tests/cpp/FILE::TEST CASE.
    """

    name: str
    invariant: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTANTS = [
    Mutant(
        "ctrl-c-cancels-nothing",
        "who is interrupted lets what has begun end, and nothing else",
        "src/tensorferry/transfers.py",
        "        except BaseException:\n            request.cancel()\n            raise",
        "        except BaseException:\n            raise",
        (
            "tests/transfers/test_lifetimes.py::test_ctrl_c_ends_a_blocking_read_before_its_time[threads]",
        ),
    ),
    Mutant(
        "future-does-not-keep-its-array",
        "memory and descriptors outlive every system call that uses them",
        "src/tensorferry/transfers.py",
        "request, [file], [address], [nbytes], [offset], [0], future, locations",
        "request, [file], [address], [nbytes], [offset], [0], None, locations",
        (
            "tests/transfers/test_lifetimes.py::test_a_target_that_nobody_else_holds_is_read_into_safely[threads-file]",
        ),
    ),
    Mutant(
        "fault-does-not-stop-new-blocks",
        "memory and descriptors outlive every system call that uses them",
        "csrc/transfer/transfer.cpp",
        "  stopped_.store(true, std::memory_order_relaxed);\n",
        "",
        (
            "tests/transfers/test_drive_errors.py::test_after_an_error_no_further_block_begins[threads-read]",
        ),
    ),
    Mutant(
        "closed-file-gives-leases",
        "memory and descriptors outlive every system call that uses them",
        "csrc/file/file.cpp",
        "    if (present & retired_bit) return {};\n",
        "",
        ("tests/cpp/file_test.cpp::a file that retires waits for its leases and gives no more",),
    ),
    Mutant(
        "many-does-not-wait-after-a-failure",
        "memory is the caller's again with the result",
        "src/tensorferry/transfers.py",
        "                for request in requests.values():\n                    request.wait(None)\n            raise",
        "                pass\n            raise",
        (
            "tests/transfers/test_lifetimes.py::test_read_many_that_fails_half_way_touches_nothing_afterwards[threads]",
        ),
    ),
    Mutant(
        "future-keeps-the-memory-of-its-result",
        "memory is the caller's again with the result",
        "src/tensorferry/futures.py",
        "                    self._keep = None  # perhaps a copy that the caller knows nothing of\n",
        "",
        (
            "tests/transfers/test_futures.py::test_a_future_does_not_keep_the_copy_of_what_was_not_contiguous",
        ),
    ),
    Mutant(
        "closed-scheduler-admits",
        "a submit that meets a close is finished, or refused",
        "csrc/transfer/scheduler.cpp",
        "  if (state_ != State::open) return Admission::closed;\n",
        "",
        ("tests/cpp/scheduler_test.cpp::closing finishes what is outstanding",),
    ),
    Mutant(
        "worker-blocks-on-the-page-cache",
        "nothing that may block runs on a thread that drives a queue",
        "csrc/transfer/worker.cpp",
        "  if (!block.direct_descriptor && engine_->blocks_on_buffered()) return hand_to_helper(block);\n",
        "",
        (
            "tests/transfers/test_meetings.py::"
            "test_a_write_that_hangs_in_the_page_cache_holds_up_no_other_transfer[libaio]",
        ),
    ),
    Mutant(
        "syncs-share-helpers-with-transfers",
        "nothing that may block runs on a thread that drives a queue",
        "csrc/transfer/request.cpp",
        "options_.sync || options_.truncate ? scheduler()->help_to_sync(job) : scheduler()->help(job);",
        "scheduler()->help(job);",
        ("tests/transfers/test_meetings.py::test_syncs_that_hang_hold_up_no_other_file[libaio]",),
    ),
    Mutant(
        "requests-take-no-turns",
        "nobody waits for all of another's request",
        "csrc/transfer/line.cpp",
        "  turn->left_nbytes -= std::min(turn->left_nbytes, nbytes);\n",
        "  (void)nbytes;\n",
        ("tests/cpp/line_test.cpp::requests take turns of a megabyte",),
    ),
    Mutant(
        "small-requests-are-not-first",
        "nobody waits for all of another's request",
        "csrc/transfer/line.cpp",
        ": request.nbytes() <= small_request_nbytes ? small\n",
        ": request.nbytes() <= 0 ? small\n",
        (
            "tests/cpp/line_test.cpp::small requests come first, and the others in every seventeenth block",
        ),
    ),
    Mutant(
        "small-requests-starve-others",
        "nobody waits for all of another's request",
        "csrc/transfer/line.cpp",
        "if (served_[in] < blocks_before_the_next_class) return in;",
        "return in;",
        (
            "tests/cpp/line_test.cpp::small requests come first, and the others in every seventeenth block",
        ),
    ),
    Mutant(
        "gpu-memory-does-not-wait-for-its-stream",
        "nothing of GPU memory is read or written before what was queued on its stream has passed; a read is done only "
        "when its last copy into the GPU is",
        "csrc/transfer/scheduler.cpp",
        "    if (!passed || *passed) continue;\n",
        "    continue;\n",
        (
            "tests/cpp/device_test.cpp::a transfer begins when what was queued before it has passed, and holds up "
            "nobody until then",
        ),
    ),
    Mutant(
        "read-is-done-before-its-copy-into-the-gpu",
        "nothing of GPU memory is read or written before what was queued on its stream has passed; a read is done only "
        "when its last copy into the GPU is",
        "csrc/device/watcher.cpp",
        "      auto fault = copy->event.wait();\n",
        "      std::optional<Fault> fault;\n",
        (
            "tests/cpp/device_test.cpp::several threads move memory of two GPUs while copies take their time; events "
            "and streams are used again",
        ),
    ),
    Mutant(
        "copies-wait-for-kernels-of-others",
        "nothing of GPU memory is read or written before what was queued on its stream has passed; a read is done only "
        "when its last copy into the GPU is",
        "csrc/device/gpu.cpp",
        "constexpr unsigned stream_non_blocking = 1;",
        "constexpr unsigned stream_non_blocking = 0;",
        (
            "tests/cpp/device_test.cpp::a transfer begins when what was queued before it has passed, and holds up "
            "nobody until then",
        ),
    ),
    Mutant(
        "owners-are-never-dropped",
        "no worker touches Python",
        "csrc/bindings/module.cpp",
        "    for (uint64_t id : core_->take_finished()) owners_->drop(id);\n",
        "    (void)core_->take_finished();\n",
        (
            "tests/transfers/test_lifetimes.py::"
            "test_an_array_whose_future_nobody_kept_is_released_by_a_later_call[threads]",
        ),
    ),
    Mutant(
        "edges-of-writes-share-pages-with-bodies",
        "bytes of a file outside the range never change",
        "csrc/transfer/plan.cpp",
        "input.write ? std::max(input.offset_alignment, input.page_nbytes) : input.offset_alignment;",
        "input.offset_alignment;",
        ("tests/cpp/plan_test.cpp::a ragged write keeps whole pages for its edges",),
    ),
    Mutant(
        "file-is-cut-behind-pieces-that-failed",
        "bytes of a file outside the range never change",
        "csrc/transfer/request.cpp",
        "const bool cut = !incomplete_.contains(use->file->identity());",
        "const bool cut = true;",
        (
            "tests/transfers/test_meetings.py::test_a_file_is_not_cut_where_a_piece_by_another_name_was_refused[threads]",
        ),
    ),
    Mutant(
        "size-is-set-with-the-blocks",
        "a file never looks longer than its space",
        "csrc/file/file.cpp",
        "fallocate_retrying(descriptor(), FALLOC_FL_KEEP_SIZE, begin, end - begin)",
        "fallocate_retrying(descriptor(), 0, begin, end - begin)",
        (
            "tests/transfers/test_extending.py::"
            "test_a_file_is_no_longer_than_before_where_space_is_refused_half_way[threads]",
        ),
    ),
    Mutant(
        "space-of-later-pieces-is-not-reserved",
        "a file never looks longer than its space",
        "src/tensorferry/transfers.py",
        "if continued is not None and (self._begun is None or self._begun[0] != continued):",
        "if False and continued is not None:",
        (
            "tests/transfers/test_extending.py::test_pieces_that_do_not_fit_together_are_refused_before_one_is_written",
        ),
    ),
    Mutant(
        "write-many-ignores-sync",
        "success means that close(2) and every sync succeeded",
        "src/tensorferry/transfers.py",
        "        self._how = write, truncate, sync, True, background\n",
        "        self._how = write, truncate, False, True, background\n",
        (
            "tests/transfers/test_meetings_files.py::test_many_pieces_of_one_file_are_synced_once[threads]",
        ),
    ),
    Mutant(
        "new-names-are-not-synced",
        "success means that close(2) and every sync succeeded",
        "csrc/transfer/request.cpp",
        "options_.sync && file.name_made()",
        "options_.sync && false",
        (
            "tests/transfers/test_meetings_files.py::test_two_files_in_one_new_directory_sync_it_once[threads]",
        ),
    ),
    Mutant(
        "failed-close-is-a-success",
        "success means that close(2) and every sync succeeded",
        "csrc/transfer/request.cpp",
        "    if (!use.failed && !fault) fault = std::move(failed);\n",
        "",
        (
            "tests/transfers/test_meetings.py::test_a_close_that_fails_is_a_failure_of_what_was_written[threads-5]",
        ),
    ),
    Mutant(
        "failed-fsync-is-a-success",
        "every result of a system call is looked at",
        "csrc/file/file.cpp",
        '  if (result != 0) return fault("fdatasync", errno);\n',
        "",
        (
            "tests/transfers/test_drive_errors.py::test_a_failed_fsync_is_raised_and_one_that_is_asked_for_is_made[threads]",
        ),
    ),
    Mutant(
        "half-of-the-descriptors-is-no-limit",
        "nothing grows without bound",
        "src/tensorferry/runtime.py",
        "        if scheduler.outstanding() == 0 or not scheduler.wait_for_progress(60.0):\n            break",
        "        break",
        (
            "tests/transfers/test_limits.py::test_half_of_the_descriptors_is_left_to_others[threads]",
        ),
    ),
    Mutant(
        "any-number-of-transfers-is-outstanding",
        "nothing grows without bound",
        "csrc/transfer/scheduler.cpp",
        "outstanding_ + count <= max_outstanding;",
        "count <= max_outstanding;",
        ("tests/cpp/scheduler_test.cpp::who submits more than may be outstanding waits",),
    ),
    Mutant(
        "any-number-of-threads-in-an-engine",
        "nothing grows without bound",
        "csrc/engine/threads.cpp",
        "limit_(std::min(options.queue_depth, max_threads))",
        "limit_(options.queue_depth)",
        (
            "tests/transfers/test_limits.py::test_a_drive_that_hangs_takes_a_bounded_number_of_threads[threads]",
        ),
    ),
    Mutant(
        "any-number-of-helpers",
        "nothing grows without bound",
        "csrc/transfer/helpers.cpp",
        " && state.running < max_threads_ && !start_thread() && state.running == 0) {",
        " && !start_thread() && state.running == 0) {",
        (
            "tests/transfers/test_limits.py::test_a_drive_that_hangs_takes_a_bounded_number_of_threads[libaio]",
        ),
    ),
    Mutant(
        "overlapping-writes-run-together",
        "writes that overlap lose nothing beside the overlap",
        "csrc/transfer/write_order.cpp",
        "    if (after != under_way.end() && after->first < write.end()) return false;\n",
        "",
        (
            "tests/cpp/write_order_test.cpp::"
            "of two writes of a file the second begins at once just where they do not overlap",
        ),
    ),
    Mutant(
        "commit-does-not-look-at-files",
        "a directory holds a whole checkpoint at every moment",
        "src/tensorferry/checkpoint/commit.py",
        "        _check_files(directory, metadata)\n        # As",
        "        # As",
        (
            "tests/checkpoint/test_savers.py::"
            "test_a_save_that_finds_a_file_of_its_own_missing_fails_and_leaves_the_one_before",
        ),
    ),
    Mutant(
        "metadata-is-not-synced",
        "a directory holds a whole checkpoint at every moment",
        "src/tensorferry/checkpoint/commit.py",
        "            if sync:\n                os.fsync(stream.fileno())\n",
        "",
        (
            "tests/checkpoint/test_crash.py"
            "::test_a_power_cut_at_any_step_of_the_commit_leaves_one_checkpoint_whole_and_after_it_the_new_one",
        ),
    ),
    Mutant(
        "leftovers-are-never-removed",
        "what is left of a killed save makes room before the next one",
        "src/tensorferry/checkpoint/writer.py",
        "                commit.remove_leftovers(save.directory, rank=self._alone())\n",
        "                pass\n",
        (
            "tests/checkpoint/test_writer.py::test_leftovers_of_a_killed_save_make_room_before_the_next_one",
        ),
    ),
    Mutant(
        "everybody-is-alone",
        "a save never removes files of one that is alive",
        "src/tensorferry/checkpoint/savers.py",
        "            yield locked and self._descriptor is not None and _is_at(self._descriptor, self._path)\n",
        "            yield True\n",
        (
            "tests/checkpoint/test_savers.py::"
            "test_a_save_that_begins_and_ends_within_another_loses_nothing_of_it[over an old one]",
        ),
    ),
    Mutant(
        "savers-do-not-show-themselves",
        "a save never removes files of one that is alive",
        "src/tensorferry/checkpoint/savers.py",
        "locked = _lock(descriptor, fcntl.F_RDLCK, _PRESENCE + self._offset, self._nbytes)",
        "locked = True",
        (
            "tests/checkpoint/test_savers.py::test_the_last_of_those_who_leave_at_once_removes_the_file_of_the_locks",
        ),
    ),
    Mutant(
        "lent-memory-is-copied-late",
        "what a planner may fill again is copied before the next item",
        "src/tensorferry/checkpoint/writer.py",
        "        if lent:\n            stream.wait_until_copied()\n",
        "",
        (
            "tests/checkpoint/test_hooks.py::"
            "test_a_planner_that_fills_one_buffer_again_and_again_saves_each_tensor[12 MiB]",
        ),
    ),
    Mutant(
        "payloads-are-paired-by-order",
        "payloads belong to the storages whose records they are",
        "src/tensorferry/checkpoint/objects.py",
        "[storages[key] for key in archive.payload_keys]",
        "[storages[key] for key in sorted(archive.payload_keys)]",
        ("tests/checkpoint/test_objects.py::test_save_writes_what_torch_would[many of one size]",),
    ),
    Mutant(
        "chunks-are-verified-after-they-were-given",
        "nothing that is damaged reaches a tensor",
        "src/tensorferry/checkpoint/sweep.py",
        "            run.file.verify(begin, buffer.view[at:limit])\n"
        "            while want is not None and want.begin < limit:\n"
        "                begun.append((want, 0))\n"
        "                want = next(wants, None)\n"
        "            rest = []\n"
        "            for each, done in begun:\n"
        "                nbytes = min(each.nbytes, limit - each.begin) - done\n"
        "                each.sink.take(each.position + done, buffer, each.begin + done, nbytes)\n",
        "            while want is not None and want.begin < limit:\n"
        "                begun.append((want, 0))\n"
        "                want = next(wants, None)\n"
        "            rest = []\n"
        "            for each, done in begun:\n"
        "                nbytes = min(each.nbytes, limit - each.begin) - done\n"
        "                each.sink.take(each.position + done, buffer, each.begin + done, nbytes)\n"
        "                run.file.verify(begin, buffer.view[at:limit])\n",
        ("tests/checkpoint/test_verify.py::test_nothing_damaged_gets_into_a_tensor",),
    ),
    Mutant(
        "unknown-names-are-imported",
        "reading a checkpoint runs no code and changes nothing in the process",
        "src/tensorferry/checkpoint/pickles.py",
        "            return value\n    raise RefusedError(full_name)\n",
        "            return value\n    return Maker(full_name, getattr(__import__(module), name))\n",
        ("tests/checkpoint/test_hostile.py::test_hostile_metadata_does_nothing[eval]",),
    ),
    Mutant(
        "blobs-without-checksums-count-as-verified",
        "nothing is called verified that was not",
        "src/tensorferry/checkpoint/blobs.py",
        "            verified = False\n",
        "            verified = True\n",
        (
            "tests/checkpoint/test_verify.py::test_torchs_checkpoint_without_checksums_is_said_to_have_none",
        ),
    ),
    Mutant(
        "names-in-headers-are-not-compared",
        "nothing is called verified that was not",
        "src/tensorferry/checkpoint/blobs.py",
        '        _require(read(at, at + local[9]) == name, f"the name of {name!r} is another in its header")\n',
        "",
        ("tests/checkpoint/test_verify.py::test_flips_after_which_torch_fails_are_found",),
    ),
    Mutant(
        "pieces-keep-any-number-of-tensors",
        "a save or load takes 40 to 48 MiB beside the state",
        "src/tensorferry/checkpoint/stream.py",
        "                self._parts[-_MAX_UNCOPIED_PARTS].copied.result()\n",
        "                pass\n",
        ("tests/checkpoint/test_stream.py::test_few_sources_wait_to_be_copied",),
    ),
    Mutant(
        "any-number-of-buffers-is-used",
        "a save or load takes 40 to 48 MiB beside the state",
        "src/tensorferry/checkpoint/pipeline.py",
        "        if len(self._buffers) < self._buffer_count:\n",
        "        if True:\n",
        ("tests/checkpoint/test_reader.py::test_load_takes_little_memory[False-False]",),
    ),
    Mutant(
        "tuned-engine-that-is-gone-is-an-error",
        "a profile never breaks a training",
        "src/tensorferry/profiled.py",
        "        with contextlib.suppress(EngineUnavailableError):\n",
        "        with contextlib.suppress():\n",
        ("tests/tuning/test_profiles.py::test_an_engine_that_cannot_be_had_here_is_replaced",),
    ),
    Mutant(
        "orphans-do-not-clean-up",
        "benchmarks leave nothing behind",
        "src/tensorferry/tuning/crew.py",
        "        member.orphaned()\n",
        "        pass\n",
        ("tests/tuning/test_bench_crew.py::test_members_whose_crew_is_killed_clean_up",),
    ),
    Mutant(
        "any-fault-may-be-raised",
        "the first fault is raised, and knows the others",
        "csrc/transfer/transfer.cpp",
        "  if (!fault_ || fault.offset < fault_->offset) {",
        "  if (!fault_) {",
        (
            "tests/transfers/test_drive_errors.py::"
            "test_of_several_blocks_that_fail_the_first_by_offset_is_reported[threads-read]",
        ),
    ),
    Mutant(
        "failures-do-not-know-the-others",
        "the first fault is raised, and knows the others",
        "src/tensorferry/errors.py",
        "        first.others = tuple(others)\n",
        "",
        (
            "tests/transfers/test_meetings_files.py::test_writes_that_fail_are_all_in_the_error_in_their_order[threads]",
        ),
    ),
    Mutant(
        "child-waits-for-writes-of-its-parent",
        "a forked child cannot hang on its parent's threads",
        "csrc/transfer/write_order.cpp",
        "  static auto* instance = new ForkSafe<Lines>;\n  return instance->get();",
        "  static auto* instance = new Lines;\n  return *instance;",
        (
            "tests/transfers/test_write_order.py::test_a_forked_child_does_not_wait_for_the_writes_of_its_parent[threads]",
        ),
    ),
    Mutant(
        "damaged-chunks-are-delivered",
        "nothing that fails its checksum reaches an array",
        "csrc/transfer/transfer.cpp",
        "  if (auto chunk = sums.damaged()) return fail_damaged(*chunk);\n",
        "",
        (
            "tests/transfers/test_segments.py::test_nothing_of_a_damaged_chunk_reaches_an_array[threads-True-True]",
        ),
    ),
    Mutant(
        "chunks-are-verified-in-the-array",
        "nothing that fails its checksum reaches an array",
        "csrc/transfer/plan.cpp",
        "  if (input_.verified_nbytes) return 0;\n  const auto rest",
        "  const auto rest",
        (
            "tests/cpp/plan_test.cpp::every byte is carried once, by a way that its alignment allows",
        ),
    ),
]
