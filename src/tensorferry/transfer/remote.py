"""Reading objects in buckets, and files on the web, like local files.

obstore (Rust's object_store) sends the requests and handles timeouts and credentials. This module makes an object an
open file of the core, where each block is an HTTP range request. Therefore futures, checksums, segments and GPU memory
work as they do for local files, and only the requested bytes are downloaded.

Opening an object pins it: every response must be complete and of the same version (ETag, size and time of
modification). obstore checks that a response has the requested range. Failed requests are repeated here and not by
obstore: that would continue a response that broke off with the bytes of another one, of which we see no version.

An object is identified by a text that is used in place of a path. It is a URL; or, for a store object that the caller
has created, a text such as ``s3+1f3a5c://bucket/key`` that is valid only in this process. For such a text
:func:`as_path` returns an :class:`ObjectPath`, which has the methods of pathlib.
"""

from __future__ import annotations

import collections
import errno
import functools
import os
import random
import re
import secrets
import stat
import threading
import time
import types
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorferry import _core
from tensorferry.base import processes
from tensorferry.base.checks import absolute_path, checked_path, is_pair, is_url
from tensorferry.base.processes import module_lock
from tensorferry.errors import StorageError
from tensorferry.transfer.runtime import start_scheduler
from tensorferry.transfer.settings import Settings

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Iterator, Sequence

    from typing_extensions import Buffer

    from tensorferry.base.checks import Path, Readable

# Prefixes of the environment variables that obstore reads when it creates a store.
_SETTINGS = ("AWS_", "AZURE_", "GOOGLE_")
# The files that are looked for in a folder on the web, because HTTP cannot list a folder.
_WEB_NAMES = (".metadata", "model.safetensors.index.json", "model.safetensors")

# Size and number of concurrent requests. A request must be large compared with its latency: 16 requests of 8 MiB with
# a latency of 50 ms are 2.6 GB/s.
_REQUEST_NBYTES = 8 << 20
_REQUESTS = 16
# From the message of a store's error, whatever _PAGE matches is removed (HTML and XML markup, obstore's debug output),
# and at most _MAX_REASON characters are kept.
_MAX_REASON = 400
_PAGE = re.compile(
    r"<[?!](.*?<Code>)?|</Code>.*|<html.*|Debug source: .*", re.DOTALL | re.IGNORECASE
)

# obstore's default values: repetitions of a failed request, and their limit and pauses in seconds.
_MAX_RETRIES, _RETRY_SECONDS = 10, 180.0
_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.1, 15.0
_POLL_SECONDS = 0.1
# In the message of obstore's error: the failure may pass, because the connection or the server failed.
_TRANSIENT = re.compile(r"(?:: |- )HTTP error: |status code: (?:408|429|5\d\d)")

_lock = module_lock()
# Stores that callers have created, each with the beginning of the texts that identify its objects. Only the last 1024
# are kept.
_stores: collections.deque[tuple[str, Any, _Store]] = collections.deque(maxlen=1024)
# A valid key: between slashes it has no empty part and no part "." or ".."; a slash at its end is allowed. It has no
# control characters and no halves of surrogate pairs.
_KEY = re.compile(r"(?!/)(?!(.*/)?\.{1,2}(/|$))(?!.*//)[^\0-\x1f\x7f\ud800-\udfff]*")
# What the path of a web address must not have: an escaped slash, which a key cannot contain in a part; and a percent
# sign that begins no escape.
_NO_ESCAPE = re.compile(r"%2f|%(?![0-9a-f]{2})", re.IGNORECASE)
_scheduler: _core.Scheduler | None = None


class Version(NamedTuple):
    """The version of a file. It changes when the file is modified, or when another file gets its name.

    Attributes
    ----------
    device : int
        The device number of the file system; 0 for an object in a bucket.
    identity : object
        The inode; for an object its version and its ETag.
    nbytes : int
        The size.
    modified : object
        The time of the last modification.
    """

    device: int
    identity: Any
    nbytes: int
    modified: Any

    @staticmethod
    def of(file: Any) -> Version:
        """Return the version of an open file; for an object the version to which it was pinned when opened."""
        return file._version or Version.of_status(os.fstat(file._open_file().descriptor))

    @staticmethod
    def at(path: str) -> Version:
        """Return the version of the file or object that a path names now."""
        if is_url(path):
            return _pin(path)[2]
        return Version.of_status(os.stat(path))  # noqa: PTH116

    @staticmethod
    def of_status(status: os.stat_result) -> Version:
        """Return the version of a local file."""
        return Version(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    @staticmethod
    def _of(meta: Any) -> Version:
        """Return the version of an object from obstore's metadata."""
        identity = meta["version"], meta["e_tag"]
        return Version(0, identity, meta["size"], meta["last_modified"])

    def __str__(self) -> str:
        return f"{self.nbytes} bytes of {self.modified:%Y-%m-%d %H:%M:%S}, ETag {self.identity[1]}"


class Object(NamedTuple):
    """An open object: the core's file, the version to which it is pinned, and the scheduler that reads it."""

    file: _core.File
    version: Version
    scheduler: _core.Scheduler


def source_path(path: Readable, name: str = "path") -> str:
    """Return the text that identifies a source: a local path (made absolute), a URL, or a pair of store and key.

    Raises
    ------
    TypeError, ValueError
        The argument is none of these.
    ImportError
        The source requires obstore, which is not installed.
    """
    if is_pair(path):
        return _text_of_pair(path, name)
    if is_url(path):
        return _text_of_url(os.fspath(path), name)  # type: ignore[arg-type]
    return absolute_path(path, name)  # type: ignore[arg-type]


def checked_text(path: Readable, name: str = "path") -> str:
    """Return the text of a source as :func:`source_path` does, but keep a relative local path as it is."""
    if is_pair(path) or is_url(path):
        return source_path(path, name)
    return checked_path(path, name)  # type: ignore[arg-type]


def as_path(path: Path) -> pathlib.Path | Any:
    """Return a :class:`pathlib.Path`, or for a URL an :class:`ObjectPath`."""
    if is_url(path):
        return ObjectPath(os.fspath(path))  # type: ignore[arg-type]
    import pathlib

    return pathlib.Path(path)  # type: ignore[arg-type]


def open_object(text: str) -> Object:
    """Open an object for reading, pinned to its current version.

    Raises
    ------
    StorageError
        The object does not exist (ENOENT), it may not be read (EACCES), or the store cannot be reached (ECOMM).
    ImportError, RuntimeError
        obstore is not installed, or was imported before fork().
    """
    store, key, version = _pin(text)
    reader = _Reader(store, key, version)
    # A device number that no drive has. It is computed from the text without the key, so the core treats all objects of
    # a bucket as files on one device.
    device = (1 << 40) + _core.crc32(text[: -len(key) or None].encode())
    file = _core.file_of_source(text, version.nbytes, device, reader)
    return Object(file, version, _shared_scheduler())


def _pin(text: str) -> tuple[_Store, str, Version]:
    """Return the store, the key and the current version of an object; errors as for :func:`open_object`."""
    store, key = _resolve(text)
    if not key:
        why = f"{os.strerror(errno.EISDIR)}; the URL names a bucket, not an object"
        raise StorageError(errno.EISDIR, why, text)
    version = Version._of(_request(store, lambda obstore, plain: obstore.head(plain, key), text))
    if version.identity == (None, None):
        why = "the server sends no ETag, without which a replacement of the object could not be detected"
        raise StorageError(errno.EOPNOTSUPP, f"{os.strerror(errno.EOPNOTSUPP)}; {why}", text)
    return store, key, version


class ObjectPath(os.PathLike[str]):
    """A path in a bucket, with those methods of :class:`pathlib.Path` that this package uses."""

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
        text = os.fspath(name).lstrip("/")
        return ObjectPath(f"{self._text}/{_escaped(text) if self._is_web else text}")

    @property
    def _is_web(self) -> bool:
        return self._text.startswith("http")

    @property
    def name(self) -> str:
        """The last part of the key."""
        text = self._text.rpartition("/")[2]
        return _unescaped(text) if self._is_web else text

    @property
    def parent(self) -> ObjectPath:
        """The path without its last part."""
        return ObjectPath(self._text.rpartition("/")[0])

    def is_symlink(self) -> bool:
        """Return False: buckets have no symbolic links."""
        return False

    def exists(self) -> bool:
        """Return whether there is an object with this key, or objects below it."""
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        """Return whether there is an object with this key."""
        try:
            self._head()
        except FileNotFoundError:
            return False
        return True

    def is_dir(self) -> bool:
        """Return whether there are objects below this key."""
        return next(self.iterdir(), None) is not None

    def stat(self) -> Any:
        """Return mode and size; raise FileNotFoundError if there is neither an object nor objects below the key."""
        try:
            return types.SimpleNamespace(st_mode=stat.S_IFREG, st_size=self._head()["size"])
        except FileNotFoundError:
            if not self.is_dir():
                raise
        return types.SimpleNamespace(st_mode=stat.S_IFDIR, st_size=0)

    def iterdir(self) -> Iterator[ObjectPath]:
        """Yield the objects and folders directly below this key."""
        store, key = _resolve(self._text)
        if self._is_web:
            yield from self._known_web_files()
            return
        listed = _request(
            store,
            lambda obstore, plain: obstore.list_with_delimiter(plain, key or None),
            self._text,
        )
        paths = [*listed["common_prefixes"], *(each["path"] for each in listed["objects"])]
        for name in sorted({path.rstrip("/").rpartition("/")[2] for path in paths}):
            yield self / name

    def _known_web_files(self) -> Iterator[ObjectPath]:
        """Yield the paths of those files of _WEB_NAMES that a folder on the web has.

        An error for one name is ignored if another file is found, because some servers refuse a request for a file that
        does not exist.
        """
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
        """Return the bytes of the object."""
        store, key = _resolve(self._text)

        def read(obstore: Any, plain: Any) -> bytes:
            found = obstore.get(plain, key)
            data = bytes(found.bytes())
            if len(data) != found.meta["size"]:
                what = f"received {len(data)} of {found.meta['size']} bytes"
                raise _ReadError(errno.EBADMSG, what)
            return data

        return self._request_found(store, read)  # type: ignore[no-any-return]

    def _head(self) -> Any:
        store, key = _resolve(self._text)
        if not key:
            raise FileNotFoundError(errno.ENOENT, "it is a bucket, not an object", self._text)
        return self._request_found(store, lambda obstore, plain: obstore.head(plain, key))

    def _request_found(self, store: _Store, ask: Callable[[Any, Any], Any]) -> Any:
        try:
            return _request(store, ask, self._text)
        except StorageError as error:
            if error.errno == errno.ENOENT:
                raise FileNotFoundError(*error.args) from None
            raise


class _ReadError(Exception):
    """The reason why bytes of an object were not read, with the errno of the StorageError that is made from it."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(reason)
        self.errno = number


class _Store:
    """A store of obstore, of which a request is repeated here if the connection or the server fails."""

    def __init__(self, store: Any) -> None:
        self._plain = store
        self._retries: dict[str, Any] = {"max_retries": 0}
        if hasattr(store, "client_options"):  # its objects are on the network
            self._retries = getattr(store, "retry_config", None) or {}
            kind = next(each for each in type(store).__mro__ if each.__module__ == "obstore.store")
            positions, options = store.__getnewargs_ex__()
            self._plain = kind(*positions, **{**options, "retry_config": {"max_retries": 0}})

    def ask(self, request: Callable[[Any, Any], Any]) -> Any:
        """Return ``request(obstore, store)``; repeat it, with growing pauses, while its failures may pass."""
        end = time.monotonic() + _seconds(self._retries.get("retry_timeout", _RETRY_SECONDS))
        backoff = self._retries.get("backoff") or {}
        pause = _seconds(backoff.get("init_backoff", _FIRST_PAUSE_SECONDS))
        longest = _seconds(backoff.get("max_backoff", _MAX_PAUSE_SECONDS))
        count = 0
        while True:
            _check_exiting()
            count += 1
            try:
                return request(usable_obstore(), self._plain)
            except Exception as error:
                if not _TRANSIENT.search(str(error)):
                    raise
                if count > self._retries.get("max_retries", _MAX_RETRIES) or time.monotonic() > end:
                    what = f"{_reason(error)} (requested {count} times)"
                    raise _ReadError(_errno_of(error), what) from None
            _wait(pause * random.uniform(0.5, 1.0))
            pause = min(pause * backoff.get("base", 2), longest)


def _seconds(duration: Any) -> float:
    """Return a duration of obstore's configuration, a number or a timedelta, in seconds."""
    return float(duration.total_seconds() if hasattr(duration, "total_seconds") else duration)


def _wait(seconds: float) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        _check_exiting()
        time.sleep(min(left, _POLL_SECONDS))


class _Reader:
    """A reader of ranges of one version of an object; worker threads of the core call it."""

    def __init__(self, store: _Store, key: str, version: Version) -> None:
        self._store = store
        self._key = key
        self._version = version

    def __call__(self, offset: int, nbytes: int) -> Sequence[Buffer]:
        """Return the bytes of a range, in chunks.

        Raises
        ------
        Exception
            The range cannot be read. The exception has an attribute ``errno``.
        """
        end = offset + nbytes
        options: dict[str, Any] = {"range": (offset, end)}
        etag = self._version.identity[1]
        # A weak ETag never matches If-Match (RFC 9110, 13.1.1).
        if etag is not None and not etag.startswith("W/"):
            options["if_match"] = etag

        def request(obstore: Any, plain: Any) -> list[Buffer]:
            answer = obstore.get(plain, self._key, options=options)
            if (found := Version._of(answer.meta)) != self._version:
                what = (
                    f"the object has changed since it was opened: from {self._version} to {found}"
                )
                raise _ReadError(errno.ESTALE, what)
            # Read the whole response without pause: a connection that is not read stalls.
            return list(answer.stream(min_chunk_size=nbytes))

        try:
            chunks: list[Buffer] = self._store.ask(request)
            received_nbytes = sum(memoryview(chunk).nbytes for chunk in chunks)
            if received_nbytes != nbytes:
                raise _ReadError(errno.EBADMSG, f"received {received_nbytes} bytes")
        except Exception as error:
            what = f"bytes {offset} to {end}: {_reason(error)}"
            raise _ReadError(_errno_of(error), what) from None
        return chunks


def _check_exiting() -> None:
    """Refuse further requests at exit: a thread of obstore that returned after the interpreter's end would crash."""
    if _core.is_exiting():
        raise _ReadError(errno.ECANCELED, "the interpreter is exiting")


def _call_interruptibly(ask: Callable[[], Any]) -> Any:
    """Call ``ask``, which may wait minutes for a response, and let KeyboardInterrupt end the wait.

    If the main thread calls this function, a daemon thread runs ``ask``, and the main thread waits for it. After a
    KeyboardInterrupt the request itself continues in the daemon thread.
    """
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

    # Import obstore here. If the new thread imported it, this thread might fork() during the import, after a
    # KeyboardInterrupt, and the child would wait for the import lock for ever.
    usable_obstore()
    threading.Thread(target=run, name="tensorferry-ask", daemon=True).start()
    ended.wait()
    for failure in failures:
        raise failure
    return answers[0]


def _reason(error: Exception) -> str:
    """Return the message of an error without the HTML or XML pages that servers send, and not longer than a limit."""
    text = " ".join(_PAGE.sub(" ", str(error)).split())
    return text if len(text) <= _MAX_REASON else text[:_MAX_REASON] + " ..."


def _errno_of(error: Exception) -> int:
    """Return the errno that corresponds to an exception of obstore, or of this module."""
    from obstore import exceptions

    if isinstance(error, _ReadError):
        return error.errno
    if isinstance(error, FileNotFoundError):
        return errno.ENOENT
    if isinstance(error, (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)):
        return errno.EACCES
    if isinstance(error, exceptions.PreconditionError):
        return errno.ESTALE
    if isinstance(error, (exceptions.NotSupportedError, exceptions.InvalidPathError)):
        return errno.EOPNOTSUPP
    return errno.ECOMM  # a failure of the communication, not of the data: a retry may succeed


def _request(store: _Store, ask: Callable[[Any, Any], Any], text: str) -> Any:
    """Call ``ask(obstore, store)`` and return its result; raise an error of the store as StorageError."""
    try:
        return _call_interruptibly(lambda: store.ask(ask))
    except (ImportError, RuntimeError):
        raise
    except Exception as error:
        number = _errno_of(error)
        raise StorageError(number, f"{os.strerror(number)}; {_reason(error)}", text) from None


def import_obstore() -> Any:
    """Import and return obstore; raise ImportError with the name of the extra if it is not installed."""
    try:
        import obstore
    except ImportError as error:
        raise ImportError(
            f"reading from buckets and the web requires obstore, which cannot be imported: {error} (remedy: "
            "pip install 'tensorferry[remote]')"
        ) from None
    return obstore


def usable_obstore() -> Any:
    """Return obstore; raise RuntimeError after fork(), where it would wait for threads of the parent process."""
    obstore = import_obstore()
    if processes.forked_with_obstore:
        raise RuntimeError(
            "obstore was imported before fork(), and its threads exist only in the parent process (remedy: the start "
            'method "spawn" or "forkserver" of multiprocessing)'
        )
    return obstore


def _text_of_url(url: str, name: str) -> str:
    scheme, _, rest = url.partition(":/")
    bucket, _, key = rest.removeprefix("/").partition("/")
    is_web = scheme.startswith("http")
    if is_web and "@" in bucket:
        raise ValueError(f"{name}: a URL with a user name or password is not supported")
    if not bucket and "+" not in scheme:
        raise ValueError(f"{name}: {url!r} has no bucket")
    if is_web and (found := re.search("[?#]", key)):
        what = "query" if found[0] == "?" else "fragment"
        shown = url.partition(found[0])[0]
        raise ValueError(f"{name}: a {what} is not supported in a URL (got {shown!r} with one)")
    try:
        is_valid = _KEY.fullmatch(_unescaped(key) if is_web else key)
    except ValueError as error:
        raise ValueError(f"{name}: {error} (got {url!r})") from None
    if not is_valid:
        raise ValueError(f"{name}: invalid key in the URL (got {url!r})")
    return f"{scheme}://{bucket}/{key}" if key else f"{scheme}://{bucket}"


def _unescaped(text: str) -> str:
    """Return a part of a web address without its escapes; raise ValueError if obstore would request another one."""
    import urllib.parse

    if found := _NO_ESCAPE.search(text):
        raise ValueError(f"{found[0]!r} is not supported in a URL")
    return urllib.parse.unquote(text, errors="strict")


def _escaped(text: str) -> str:
    import urllib.parse

    return urllib.parse.quote(text)


def _text_of_pair(pair: tuple[Any, str], name: str) -> str:
    store, key = pair
    if not any(kind.__module__.startswith("obstore.") for kind in type(store).__mro__):
        raise TypeError(f"{name}: expected a store of obstore (got {store!r})")
    if not _KEY.fullmatch(key):
        raise ValueError(f"{name}: invalid key (got {key!r})")
    with _lock:
        known = tuple(_stores)  # a copy, because a signal handler may append to the deque
        begin = next((begin for begin, each, _ in known if each is store or each == store), None)
        if begin is None:
            kind = type(store).__name__.removesuffix("Store").lower()
            config = getattr(store, "config", None) or {}
            bucket = config.get("bucket") or config.get("container_name") or ""
            parts = (bucket, str(getattr(store, "prefix", None) or "").strip("/"))
            # A random part makes the text unique: a text of another process never refers to a store of this one.
            where = "".join(f"{each}/" for each in parts if each)
            begin = f"{kind}+{secrets.token_hex(3)}://{where}"
            _stores.append((begin, store, _Store(store)))
    return f"{begin}{key}"


def _resolve(text: str) -> tuple[_Store, str]:
    """Return the store and the key that a text identifies."""
    usable_obstore()
    for begin, _, store in tuple(_stores):
        if text.startswith(begin) or f"{text}/" == begin:
            return store, text[len(begin) :]
    scheme, _, rest = text.partition("://")
    bucket, _, key = rest.partition("/")
    if "+" in scheme:
        raise RuntimeError(
            f"path: {text!r} refers to a store object of another process (remedy: pass a store and a key)"
        )
    if scheme.startswith("http"):
        key = _unescaped(key)
    settings = tuple(
        sorted(item for item in os.environ.items() if item[0].upper().startswith(_SETTINGS))
    )
    return _store(f"{scheme}://{bucket}", settings), key


@functools.lru_cache(16)
def _store(root: str, _settings: tuple[tuple[str, str], ...]) -> _Store:
    """Return the store for a URL; ``_settings``, the environment's settings, are part of the cache key."""
    from obstore import store

    try:
        if root.startswith("http"):
            options: Any = {"allow_http": root.startswith("http:")}
            return _Store(store.HTTPStore.from_url(root, client_options=options))
        return _Store(store.from_url(root))
    except Exception as error:
        raise StorageError(
            errno.EINVAL, f"{os.strerror(errno.EINVAL)}; {_reason(error)}", root
        ) from None


def _shared_scheduler() -> _core.Scheduler:
    """Return the scheduler of all objects. It has the engine "threads", because a thread waits for each response."""
    global _scheduler
    with _lock:
        if _scheduler is None or not _scheduler.belongs_to_this_process():
            _scheduler = start_scheduler("threads", Settings(_REQUEST_NBYTES, _REQUESTS))
        return _scheduler
