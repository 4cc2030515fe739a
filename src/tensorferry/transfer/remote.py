"""Objects of buckets, and files of the web, in the place of files that are read.

obstore (Rust's object_store) does the talking: requests, retries, timeouts and credentials are its own. Here an object
becomes an open file of the core, whose blocks are ranges of it: so futures, checksums, segments and memory of GPUs are
those of all files, and only what is wanted is asked for.

An object is pinned when it is opened: each answer must be of the same version (ETag, size and time), and whole. obstore
looks that it is of the range that was asked for.

A place is known by a text: a URL; or, for a store that the caller has made, one that only this process knows, as
``s3+1f3a5c://bucket/key``. Such texts stand where paths do, and :func:`place` gives what pathlib has for them.
"""

from __future__ import annotations

import atexit
import collections
import errno
import functools
import os
import re
import secrets
import stat
import threading
import types
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorferry import _core
from tensorferry.base import processes
from tensorferry.base.checks import checked_path, is_pair, is_url, kept_path
from tensorferry.base.processes import in_forked_children
from tensorferry.errors import StorageError
from tensorferry.transfer.runtime import start_scheduler

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Iterator

    from typing_extensions import Buffer

    from tensorferry.base.checks import Path, Readable

# What obstore looks up in the environment when it makes a store.
_SETTINGS = ("AWS_", "AZURE_", "GOOGLE_")
# What is known of folders on the web, which cannot be listed.
_WEB_NAMES = (".metadata", "model.safetensors.index.json", "model.safetensors")

# A request is long enough to be worth one, and so many are on their way at once: at 50 ms a request 2.6 GB/s.
_REQUEST_NBYTES = 8 << 20
_REQUESTS = 16
_MAX_REASON = 400
_PAGE = re.compile(
    r"<[?!](.*?<Code>)?|</Code>.*|<html.*|Debug source: .*", re.DOTALL | re.IGNORECASE
)

_lock = threading.RLock()  # who handles a signal may open something, too
# That callers have made, and what their texts begin with; of very many the last ones.
_stores: collections.deque[tuple[str, Any]] = collections.deque(maxlen=1024)
# Names without a part that is empty, or leads elsewhere; perhaps with a slash behind them.
_KEY = re.compile(r"(?!/)(?!(.*/)?\.{1,2}(/|$))(?!.*//)[^\0]*", re.DOTALL)
_scheduler: _core.Scheduler | None = None
_leaving = False


class Version(NamedTuple):
    """What tells a file from the one that has its name later, and from itself after a change.

    Attributes
    ----------
    device : int
        Of the file system; 0 for an object of a bucket.
    identity : object
        The inode; of an object its version and its ETag.
    nbytes : int
        The size.
    modified : object
        When it was changed last.
    """

    device: int
    identity: Any
    nbytes: int
    modified: Any

    @staticmethod
    def of(file: Any) -> Version:
        """Return that of an open file; of an object that of its opening, to which it is pinned."""
        return file._version or _of_status(os.fstat(file._open_file().descriptor))

    @staticmethod
    def at(path: str) -> Version:
        """Return that of the file that has a name now."""
        if is_url(path):
            return _pinned(path)[2]
        return _of_status(os.stat(path))  # noqa: PTH116

    @staticmethod
    def _of(meta: Any) -> Version:
        """Return that of an object, of which obstore has said this."""
        identity = meta["version"], meta["e_tag"]
        return Version(0, identity, meta["size"], meta["last_modified"])

    def __str__(self) -> str:
        return f"{self.nbytes} bytes of {self.modified:%Y-%m-%d %H:%M:%S}, ETag {self.identity[1]}"


def _of_status(status: os.stat_result) -> Version:
    return Version(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


class Object(NamedTuple):
    """An object that has been opened: the core's file, and its version."""

    file: _core.File
    version: Version
    scheduler: _core.Scheduler


def source_path(path: Readable, name: str = "path") -> str:
    """Return the text of what is to be read: a local path, absolute; a URL; or a pair of an obstore store and a key.

    Raises
    ------
    TypeError, ValueError
        It is none of these.
    ImportError
        It needs obstore, which is not installed.
    """
    if is_pair(path):
        return _text_of_pair(path, name)
    if is_url(path):
        return _text_of_url(os.fspath(path), name)  # type: ignore[arg-type]
    return kept_path(path, name)  # type: ignore[arg-type]


def text_of(path: Readable, name: str = "path") -> str:
    """Do as :func:`source_path`, and leave local paths as they are."""
    if is_pair(path):
        return source_path(path, name)
    text = os.fsdecode(path)  # type: ignore[arg-type]
    return source_path(text, name) if is_url(text) else text


def checked_text(path: Readable, name: str = "path") -> str:
    """Do as :func:`text_of`, and raise ValueError or TypeError for what cannot be a local path."""
    if is_pair(path) or is_url(path):
        return source_path(path, name)
    return checked_path(path, name)  # type: ignore[arg-type]


def place(path: Path) -> pathlib.Path | Any:
    """Return a path, or what stands for it in a bucket: an :class:`ObjectPath`."""
    if is_url(path):
        return ObjectPath(os.fspath(path))  # type: ignore[arg-type]
    import pathlib

    return pathlib.Path(path)  # type: ignore[arg-type]


def open_object(text: str) -> Object:
    """Open an object for reading, pinned to what it is now.

    Raises
    ------
    StorageError
        There is none (ENOENT), it may not be read (EACCES), or the store cannot be asked (ECOMM).
    ImportError, RuntimeError
        obstore is not installed, or has been used before a fork.
    """
    store, key, version = _pinned(text)
    reader = _Reader(store, key, version)
    device = (1 << 40) + _core.crc32(text[: -len(key) or None].encode())
    file = _core.file_of_source(text, version.nbytes, device, reader)
    return Object(file, version, _shared_scheduler())


def _pinned(text: str) -> tuple[Any, str, Version]:
    """Return the store, the key and the present version of an object; errors as for :func:`open_object`."""
    store, key = _resolved(text)
    if not key:
        raise StorageError(errno.EISDIR, f"{os.strerror(errno.EISDIR)}; it names no object", text)
    found = _asked(lambda: usable_obstore().head(store, key), text)
    version = Version._of(found)
    if version.identity == (None, None):
        why = "the server sends no ETag for it, so that nobody would notice that it is replaced meanwhile"
        raise StorageError(errno.EOPNOTSUPP, f"{os.strerror(errno.EOPNOTSUPP)}; {why}", text)
    return store, key, version


class ObjectPath(os.PathLike[str]):
    """A place in a bucket, with what this package uses of :class:`pathlib.Path`."""

    def __init__(self, text: str) -> None:
        scheme, _, rest = text.partition(":/")
        self._text = f"{scheme}://{rest.strip('/')}"

    def __fspath__(self) -> str:
        return self._text

    __str__ = __fspath__

    def __repr__(self) -> str:
        return f"ObjectPath({self._text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectPath) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __truediv__(self, name: str | os.PathLike[str]) -> ObjectPath:
        return ObjectPath(f"{self._text}/{os.fspath(name).lstrip('/')}")

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self._text.rpartition("/")[2]

    @property
    def parent(self) -> ObjectPath:
        """The place that has this one."""
        return ObjectPath(self._text.rpartition("/")[0])

    def is_symlink(self) -> bool:
        """Return False."""
        return False

    def exists(self) -> bool:
        """Return whether there is an object, or some below it."""
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        """Return whether there is an object."""
        try:
            self._head()
        except FileNotFoundError:
            return False
        return True

    def is_dir(self) -> bool:
        """Return whether there are objects below it."""
        return next(self.iterdir(), None) is not None

    def stat(self) -> Any:
        """Return the kind and the size; FileNotFoundError where there is neither an object nor some below it."""
        try:
            return types.SimpleNamespace(st_mode=stat.S_IFREG, st_size=self._head()["size"])
        except FileNotFoundError:
            if not self.is_dir():
                raise
        return types.SimpleNamespace(st_mode=stat.S_IFDIR, st_size=0)

    def iterdir(self) -> Iterator[ObjectPath]:
        """Yield what is directly below it."""
        store, key = _resolved(self._text)
        if self._text.startswith("http"):
            yield from self._usual_files()
            return
        listed = _asked(
            lambda: usable_obstore().list_with_delimiter(store, key or None), self._text
        )
        paths = [*listed["common_prefixes"], *(each["path"] for each in listed["objects"])]
        for name in sorted({path.rstrip("/").rpartition("/")[2] for path in paths}):
            yield self / name

    def _usual_files(self) -> Iterator[ObjectPath]:
        """Yield what a folder of the web has of the usual names; some servers refuse what is not there."""
        failure: StorageError | None = None
        found = False
        for name in _WEB_NAMES:
            try:
                if (self / name).is_file():
                    found = True
                    yield self / name
            except StorageError as error:
                failure = error
        if failure is not None and not found:
            raise failure

    def read_bytes(self) -> bytes:
        """Return all of an object."""
        store, key = _resolved(self._text)

        def read() -> bytes:
            found = usable_obstore().get(store, key)
            data = bytes(found.bytes())
            if len(data) != found.meta["size"]:
                raise _UnfitError(f"{len(data)} of {found.meta['size']} bytes came")
            return data

        return self._found(read)  # type: ignore[no-any-return]

    def _head(self) -> Any:
        store, key = _resolved(self._text)
        if not key:
            raise FileNotFoundError(errno.ENOENT, "a bucket is no object", self._text)
        return self._found(lambda: usable_obstore().head(store, key))

    def _found(self, ask: Callable[[], Any]) -> Any:
        try:
            return _asked(ask, self._text)
        except StorageError as error:
            if error.errno == errno.ENOENT:
                raise FileNotFoundError(*error.args) from None
            raise


class _UnfitError(Exception):
    """An answer is not what was asked for."""

    errno = errno.EBADMSG


class _ChangedError(Exception):
    """An object is not the one that was opened."""

    errno = errno.ESTALE


class _LeavingError(Exception):
    """Nobody waits for it any more."""

    errno = errno.ECANCELED


class _RefusedError(Exception):
    """What obstore has raised, with an error number."""

    def __init__(self, error: Exception) -> None:
        super().__init__(_reason(error))
        self.errno = _number_of(error)


class _Reader:
    """Reads ranges of one version of an object; called by threads of the core."""

    def __init__(self, store: Any, key: str, version: Version) -> None:
        self._store = store
        self._key = key
        self._version = version

    def __call__(self, offset: int, nbytes: int) -> Iterator[Buffer]:
        """Yield the bytes of a range.

        Raises
        ------
        Exception
            With an attribute ``errno``: they cannot be had.
        """
        end = offset + nbytes
        _check_leaving()
        options: dict[str, Any] = {"range": (offset, end)}
        etag = self._version.identity[1]
        # A weak ETag never matches (RFC 9110, 13.1.1).
        if etag is not None and not etag.startswith("W/"):
            options["if_match"] = etag
        came = 0
        try:
            answer = usable_obstore().get(self._store, self._key, options=options)
            if (found := Version._of(answer.meta)) != self._version:
                raise _ChangedError(
                    f"the object was {self._version} when it was opened, and is {found}"
                )
            # All of it at once: a connection whose bytes nobody takes stands still.
            for chunk in answer.stream(min_chunk_size=nbytes):
                came += len(chunk)
                yield chunk
                _check_leaving()
            if came != nbytes:
                raise _UnfitError(f"{came} bytes came")
        except (_UnfitError, _ChangedError, _LeavingError) as error:
            error.args = (f"bytes {offset} to {end}: {error}",)
            raise
        except Exception as error:
            failure = _RefusedError(error)
            failure.args = (f"bytes {offset} to {end}, of which {came} came: {failure}",)
            raise failure from None


@atexit.register
def _leave() -> None:
    """Ask for nothing more. What has been asked for is waited for: obstore must not return to no interpreter."""
    global _leaving
    _leaving = True


def _check_leaving() -> None:
    if _leaving:
        raise _LeavingError("the interpreter ends")


def _interruptibly(ask: Callable[[], Any]) -> Any:
    """Call what waits for an answer for minutes, perhaps; Ctrl-C leaves it alone."""
    if threading.current_thread() is not threading.main_thread():
        return ask()
    answers: list[Any] = []
    failures: list[BaseException] = []
    ended = threading.Event()

    def run() -> None:
        try:
            answers.append(ask())
        except BaseException as error:
            failures.append(error)
        finally:
            ended.set()

    usable_obstore()  # imported here, so that a fork of another thread does not meet it half-way
    threading.Thread(target=run, name="tensorferry-ask", daemon=True).start()
    ended.wait()
    for failure in failures:
        raise failure
    return answers[0]


def _reason(error: Exception) -> str:
    """Return what is said of an error, without the pages that servers send."""
    text = " ".join(_PAGE.sub(" ", str(error)).split())
    return text if len(text) <= _MAX_REASON else text[:_MAX_REASON] + " ..."


def _number_of(error: Exception) -> int:
    """Return an error number for what obstore has raised."""
    from obstore import exceptions

    if isinstance(error, FileNotFoundError):
        return errno.ENOENT
    if isinstance(error, (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)):
        return errno.EACCES
    if isinstance(error, exceptions.PreconditionError):
        return errno.ESTALE
    if isinstance(error, (exceptions.NotSupportedError, exceptions.InvalidPathError)):
        return errno.EOPNOTSUPP
    return errno.ECOMM  # no damage: it may be there the next time


def _asked(ask: Callable[[], Any], text: str) -> Any:
    """Return what a store says; its failure becomes StorageError."""
    try:
        return _interruptibly(ask)
    except (ImportError, RuntimeError):
        raise
    except _UnfitError as error:
        raise StorageError(error.errno, f"{os.strerror(error.errno)}; {error}", text) from None
    except Exception as error:
        number = _number_of(error)
        raise StorageError(number, f"{os.strerror(number)}; {_reason(error)}", text) from None


def imported_obstore() -> Any:
    """Return obstore; ImportError with the extra's name where it is not installed."""
    try:
        import obstore
    except ImportError as error:
        raise ImportError(
            f"buckets and the web are reached by obstore, which cannot be imported ({error}); remedy: pip install "
            "'tensorferry[remote]'"
        ) from None
    return obstore


def usable_obstore() -> Any:
    """Return obstore; RuntimeError where a call of it would wait for threads of the parent process."""
    obstore = imported_obstore()
    if processes.forked_with_obstore:
        raise RuntimeError(
            "obstore was imported before fork(), and its threads are the parent process's (remedy: the start method "
            '"spawn" or "forkserver" of multiprocessing)'
        )
    return obstore


def _text_of_url(url: str, name: str) -> str:
    scheme, _, rest = url.partition(":/")
    bucket, _, key = rest.removeprefix("/").partition("/")
    is_web = scheme.startswith("http")
    if is_web and "@" in bucket:
        raise ValueError(f"{name}: a URL with a user's name or password is not taken")
    if not bucket and "+" not in scheme:
        raise ValueError(f"{name}: {url!r} has no bucket")
    if is_web and "?" in key:
        raise ValueError(
            f"{name}: {url.partition('?')[0]!r} has a query, which is no part of a key"
        )
    if not _KEY.fullmatch(key):
        raise ValueError(f"{name}: {url!r} has no key that can be asked for")
    return f"{scheme}://{bucket}/{key}" if key else f"{scheme}://{bucket}"


def _text_of_pair(pair: tuple[Any, str], name: str) -> str:
    store, key = pair
    if not any(kind.__module__.startswith("obstore.") for kind in type(store).__mro__):
        raise TypeError(f"{name}: {store!r} is no store of obstore's")
    if not _KEY.fullmatch(key):
        raise ValueError(f"{name}: {key!r} is no key that can be asked for")
    with _lock:
        known = tuple(_stores)  # a signal handler may add one
        begin = next((begin for begin, each in known if each is store or each == store), None)
        if begin is None:
            kind = type(store).__name__.removesuffix("Store").lower()
            config = getattr(store, "config", None) or {}
            bucket = config.get("bucket") or config.get("container_name") or ""
            parts = (bucket, str(getattr(store, "prefix", None) or "").strip("/"))
            # Another process has other stores: no text of one is taken for one of these.
            where = "".join(f"{each}/" for each in parts if each)
            begin = f"{kind}+{secrets.token_hex(3)}://{where}"
            _stores.append((begin, store))
    return f"{begin}{key}"


def _resolved(text: str) -> tuple[Any, str]:
    """Return the store and the key of a text."""
    usable_obstore()
    for begin, store in tuple(_stores):
        if text.startswith(begin) or f"{text}/" == begin:
            return store, text[len(begin) :]
    scheme, _, rest = text.partition("://")
    bucket, _, key = rest.partition("/")
    if "+" in scheme:
        raise RuntimeError(f"{text!r} is a store of another process: give a store and a key")
    if scheme.startswith("http"):
        import urllib.parse

        key = urllib.parse.unquote(key)
    settings = tuple(
        sorted(item for item in os.environ.items() if item[0].upper().startswith(_SETTINGS))
    )
    return _store(f"{scheme}://{bucket}", settings), key


@functools.lru_cache(16)
def _store(root: str, _settings: tuple[tuple[str, str], ...]) -> Any:
    """Return obstore's store for a URL and what the environment says now."""
    from obstore import store

    try:
        if root.startswith("http"):
            options: Any = {"allow_http": root.startswith("http:")}
            return store.HTTPStore.from_url(root, client_options=options)
        return store.from_url(root)
    except Exception as error:
        raise StorageError(
            errno.EINVAL, f"{os.strerror(errno.EINVAL)}; {_reason(error)}", root
        ) from None


def _shared_scheduler() -> _core.Scheduler:
    """Return what serves all objects: threads, which wait for answers."""
    global _scheduler
    with _lock:
        if _scheduler is None or not _scheduler.belongs_to_this_process():
            _scheduler = start_scheduler("threads", _REQUEST_NBYTES, _REQUESTS, 1, False)
        return _scheduler


@in_forked_children
def _forget_lock() -> None:
    global _lock
    _lock = threading.RLock()  # another thread may have held it at fork
