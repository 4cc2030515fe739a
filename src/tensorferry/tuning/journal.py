"""What a run of `tune` has measured, one JSON line each, so that a run that was killed goes on where it ended.

The first line says what is being tuned; a journal of anything else, or an old one, is begun anew. Resuming needs no
more than that: the search asks for the same steps in the same order, and is given what it had measured.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import time
from typing import TYPE_CHECKING, Any

from tensorferry.tuning.drive import Measurement

if TYPE_CHECKING:
    from pathlib import Path

    from tensorferry.tuning.race import Step

_MAX_AGE_SECONDS = 24 * 3600  # drives fill and wear; what was measured long ago is another drive
_MAX_NBYTES = 64 << 20


class Journal:
    """An open journal, locked against a second run of the same kind; close it, or use it as a context manager.

    Parameters
    ----------
    path : Path
        The file; made if missing, with its folder.
    job : dict
        What is being tuned, as JSON knows it.
    resume : bool
        Go on with what the file has of the same job.

    Raises
    ------
    OSError
        The file cannot be opened or written.
    BlockingIOError
        Another process has it open.
    """

    def __init__(self, path: Path, job: dict[str, Any], *, resume: bool = True) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.facts: dict[str, Any] = {}
        self._measured: dict[str, Measurement] = {}
        self._file = path.open("a+b", buffering=0)
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.EACCES):
                    raise BlockingIOError(
                        error.errno, "another process is tuning the same", str(path)
                    ) from None
                if error.errno not in (errno.EOPNOTSUPP, errno.ENOLCK):
                    raise
            header = {"tensorferry_tune": 1, "job": job}
            if not (resume and self._replay(header)):
                self._measured.clear()
                self.facts.clear()
                self._file.truncate(0)
                self._append(header | {"begun": time.time()})
        except BaseException:
            self._file.close()
            raise

    @property
    def replayed(self) -> int:
        """How many measurements were found in it when it was opened."""
        return len(self._measured)

    def find(self, step: Step, action: str) -> Measurement | None:
        """Return what an earlier run measured in this step."""
        return self._measured.get(_key(step, action))

    def add(self, step: Step, action: str, measured: Measurement) -> None:
        """Keep a measurement."""
        content = {"key": _key(step, action), "settings": dataclasses.asdict(step.settings)}
        self._append(content | {"measured": dataclasses.asdict(measured)})

    def keep_fact(self, name: str, value: Any) -> None:
        """Keep what was decided for the whole run, for `facts` of the next."""
        self.facts[name] = value
        self._append({"fact": name, "value": value})

    def finish(self, *, keep: bool) -> None:
        """Note that the run has come to its end, and that the next begins anew; or remove the file."""
        if keep:
            self.keep_fact("finished", True)
        else:
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file, which stays."""
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, content: dict[str, Any]) -> None:
        self._file.write(json.dumps(content).encode() + b"\n")

    def _replay(self, header: dict[str, Any]) -> bool:
        """Read what is there; return whether it is of this job, and fresh."""
        self._file.seek(0)
        text = self._file.read(_MAX_NBYTES)
        whole = text[: text.rfind(b"\n") + 1]  # the last line may have been cut off
        lines = whole.splitlines()
        try:
            first = json.loads(lines[0])
            begun = first.pop("begun")
            if first != header or not 0 <= time.time() - begun < _MAX_AGE_SECONDS:
                return False
            for line in lines[1:]:
                entry = json.loads(line)
                if "fact" in entry:
                    self.facts[entry["fact"]] = entry["value"]
                else:
                    self._measured[entry["key"]] = Measurement(**entry["measured"])
        except (ValueError, LookupError, TypeError, AttributeError):
            return False
        if "finished" in self.facts:
            return False
        os.ftruncate(self._file.fileno(), len(whole))
        return True


def _key(step: Step, action: str) -> str:
    settings = step.settings
    point = (
        f"{settings.engine}/{settings.block_size}/{settings.queue_depth}/"
        f"{settings.intra_op_parallelism}/{settings.single_submit}"
    )
    return f"{step.stage}/{step.round}/{point}/{action}"
