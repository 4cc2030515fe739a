"""Begins writes and leaves the process in a given way; test_exits.py runs it, and then looks for the bytes."""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.util
import os
import sys
import threading

NBYTES = 3_000_001
KINDS = ("write", "write_many", "future", "own workers", "handle", "stream", "awaited", "chained")
kept = []  # until the interpreter takes the module apart


def begin(folder: str) -> None:
    """Begin writes of all kinds, and wait for none that is asynchronous."""
    import tensorferry

    data = b"\x07" * NBYTES
    path = {kind: f"{folder}/{kind}" for kind in KINDS}
    tensorferry.write(path["write"], data, sync=True)
    tensorferry.write_many([(path["write_many"], data)])
    tensorferry.open(path["future"], "w").write_from(data)
    file = tensorferry.open(path["own workers"], "w", queue_depth=3)
    kept.append((file, file.write_from(data, sync=True)))
    handle = tensorferry.aio_handle()
    handle.async_pwrite(data, path["handle"])
    kept.append(handle)
    file = tensorferry.open(path["stream"], "w")
    stream = file.stream()
    stream.append(data, kept=True)
    stream.begin_finish()
    kept.append((file, stream))
    file, last = (tensorferry.open(path[kind], "w") for kind in ("awaited", "chained"))
    file.write_from(data).add_done_callback(lambda _: last.write_from(data))


def begin_later(folder: str) -> None:
    """Begin the writes when the main thread has ended, and so waits for this one."""
    threading.main_thread().join()
    begin(folder)


WAYS = {
    "return": begin,
    "exit": lambda folder: sys.exit(begin(folder)),
    "raise": lambda folder: begin(folder) or 1 / 0,
    "in a handler": lambda folder: atexit.register(begin, folder),
    "in a finalizer": lambda folder: multiprocessing.util.Finalize(
        None, begin, (folder,), exitpriority=-5
    ),
    "in a thread": lambda folder: threading.Thread(target=begin_later, args=[folder]).start(),
}


def leave(way: str, folder: str, imported: bool = False) -> None:
    """Leave in one way. If ``imported``, the package's own exit handler is older than that of the way."""
    if imported:
        import tensorferry

        tensorferry.write(f"{folder}/first", b"1")
        os.remove(f"{folder}/first")  # noqa: PTH107
    WAYS[way](folder)


if __name__ == "__main__":
    how, method, is_imported, place = sys.argv[1:]
    if method == "none":
        leave(how, place, is_imported == "yes")
    else:
        context = multiprocessing.get_context(method)
        process = context.Process(target=leave, args=(how, place, is_imported == "yes"))  # type: ignore[attr-defined]
        process.start()
        process.join()
