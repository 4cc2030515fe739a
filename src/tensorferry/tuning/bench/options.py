"""The options of ``tensorferry bench``, said once: those of DeepSpeed's ds_io, under its names, and ours."""

from __future__ import annotations

from tensorferry.deepnvme.handles import MAX_PARALLELISM
from tensorferry.transfer.files import MAX_BLOCK_NBYTES, MAX_QUEUE_DEPTH
from tensorferry.tuning.options import Option, count, nbytes, one_of

ENGINES = ("aio_handle", "files", "torch_io")
IO_ENGINES = ("io_uring", "libaio", "threads")
MEMORIES = ("locked", "ordinary", "accelerator")

_MAX_PROCESSES = 1024
_MAX_LOOPS = 1_000_000

LOOPS = Option("loops", "Transfers that count.", count(1, _MAX_LOOPS), "N", "3")

OPTIONS = (
    Option(
        "path",
        "The folder to work in; the same as --folder.",
        str,
        "FOLDER",
        argument=True,
        ours=True,
    ),
    Option("folder", "The folder to work in.", str, "FOLDER"),
    Option(
        "folder_to_device_mapping",
        "A folder and the number of a GPU, which counts only with --gpu. One process for each; repeat it.",
        str,
        "FOLDER:DEVICE",
        many=True,
    ),
    Option("io_size", "Bytes of each file, such as 400M.", nbytes(), "BYTES", "1G"),
    Option("read", "Only read."),
    Option("write", "Only write.", ours=True),
    Option(
        "multi_process",
        "Processes, each with a file of its own.",
        count(1, _MAX_PROCESSES),
        "N",
        "1",
    ),
    LOOPS,
    Option("warmup_loops", "Transfers before them.", count(0, _MAX_LOOPS), "N", "1"),
    Option("include_warmup_time", "Count those too."),
    Option(
        "different_file_each_iteration",
        "A file for each loop; else writes overwrite the one of the first loop.",
    ),
    Option("validate", "Compare file and memory after each transfer, outside the clock."),
    Option(
        "keep_files",
        "Use ds_io's file names, read files that are there already, and leave all for the next run.",
        ours=True,
    ),
    Option(
        "engine",
        "aio_handle: asynchronous calls and wait(); files: tensorferry.open(); torch_io: torch.save and load.",
        one_of(*ENGINES),
        "|".join(ENGINES),
        "aio_handle",
    ),
    Option(
        "io_engine",
        "How blocks reach the kernel. Default: the first that works.",
        one_of(*IO_ENGINES),
        "|".join(IO_ENGINES),
        ours=True,
    ),
    Option(
        "block_size",
        "Bytes of one submission. Default of this and the next two: what a handle without settings has.",
        nbytes(1, MAX_BLOCK_NBYTES),
        "BYTES",
    ),
    Option("queue_depth", "Blocks in flight at most.", count(1, MAX_QUEUE_DEPTH), "N"),
    Option(
        "io_parallel",
        "Threads that each have such a queue.",
        count(1, MAX_PARALLELISM),
        "N",
    ),
    Option("single_submit", "A system call for each block."),
    Option("sequential_requests", "Accepted; queues are always refilled as blocks complete."),
    Option(
        "memory",
        "Host memory. locked: as tensorferry.empty() makes it, the default; ordinary: unaligned, on small pages; "
        "accelerator: pinned by torch. With --gpu: copy all bytes by way of such memory, rather than give the CUDA "
        "tensor to the handle.",
        one_of(*MEMORIES),
        "|".join(MEMORIES),
        ours=True,
    ),
    Option("use_accelerator_pin_memory", "The same as --memory accelerator."),
    Option("torch_legacy_save", "torch.save's format before 1.6."),
    Option("fast_io_size", "Accepted; it was of ds_io's engine torch_fastio.", nbytes(), "BYTES"),
    Option("gpu", "Move CUDA tensors, as they are unless --memory."),
    Option("use_gds", "Use gds_handle (GPUDirect Storage, by cuFile) instead of aio_handle."),
    Option("slow_bounce_buffer", "As --memory, and make that memory anew for each transfer."),
    Option(
        "compare",
        "Measure plain Python and fio too, in turns, with the same sizes and settings.",
        ours=True,
    ),
)
