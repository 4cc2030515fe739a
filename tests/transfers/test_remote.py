"""Objects of buckets in place of files: their requests, the detection of errors, and forks during transfers."""

from __future__ import annotations

import array
import errno
import gc
import http.server
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import urllib.parse
import weakref
from typing import TYPE_CHECKING, Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import tensorferry
from tensorferry import Checksums, StorageError, _core
from tensorferry.transfer.python_files import open_python_file, reader_and_size
from tensorferry.transfer.remote import as_path, source_path
from tests.support import buckets, effort
from tests.support.child import ROOT
from tests.support.data import SEED
from tests.support.fault_proxy import FaultProxy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from tests.support.buckets import Bucket

MIB = 1 << 20
NBYTES = 20 * MIB + 12345
KEY = "some folder/object.bin"


@pytest.fixture(scope="module")
def content() -> bytes:
    return random.Random(5).randbytes(NBYTES)


@pytest.fixture(scope="module")
def stored(s3: str, content: bytes) -> Bucket:
    bucket = buckets.Bucket.new(s3)
    bucket.write(KEY, content)
    return bucket


@pytest.fixture
def proxied(stored: Bucket, s3_proxy: FaultProxy) -> Bucket:
    return stored.by_way_of(s3_proxy.address)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A folder, and the address of a web server for it."""
    folder = tmp_path_factory.mktemp("served")
    with buckets.file_server(folder) as address:
        yield folder, address


def test_a_url_a_pair_and_the_web_have_the_same_bytes(
    stored: Bucket, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in stored.environment().items():
        monkeypatch.setenv(name, value)
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b" / "x.bin").write_bytes(content)
    with buckets.file_server(tmp_path) as web:
        for path in (stored.url(KEY), (stored.store(), KEY), f"{web}/a%20b/x.bin"):
            with tensorferry.open(path) as file:
                assert file.size == NBYTES
                assert file.read(bytearray(NBYTES)) == content
                begin, middle, end = bytearray(5), bytearray(3 * MIB), bytearray(7)
                file.read([begin, 100, middle, MIB, end], 11)
                assert begin == content[11:16]
                assert middle == content[116 : 116 + 3 * MIB]
                assert end == content[116 + 4 * MIB :][:7]


def test_a_store_with_a_prefix_and_other_stores(stored: Bucket, content: bytes) -> None:
    with tensorferry.open((stored.store(prefix="some folder"), "object.bin")) as file:
        assert file.read(bytearray(10), 5) == content[5:15]
        assert "some folder/object.bin" in file.path
    obstore = pytest.importorskip("obstore")
    first, second = obstore.store.MemoryStore(), obstore.store.MemoryStore()
    obstore.put(first, "k", b"one")
    obstore.put(second, "k", b"two")
    for store, expected in ((first, b"one"), (second, b"two"), (first, b"one")):
        with tensorferry.open((store, "k")) as file:
            assert file.read(bytearray(3)) == expected
    obstore.put(first, "empty", b"")
    with tensorferry.open((first, "empty")) as file:
        assert file.size == 0


@hypothesis.settings(max_examples=effort.examples(30), deadline=None)
@hypothesis.given(data=st.data())
def test_any_segments_with_checksums(stored: Bucket, content: bytes, data: st.DataObject) -> None:
    pieces = data.draw(
        st.lists(
            st.tuples(st.booleans(), st.sampled_from([1, 100, 70_000, MIB, 3 * MIB])), min_size=1
        ).filter(lambda found: any(wanted for wanted, _ in found))
    )[:6]
    offset = data.draw(st.integers(0, NBYTES // 4))
    total = sum(nbytes for _, nbytes in pieces)
    hypothesis.assume(offset + total <= NBYTES and any(wanted for wanted, _ in pieces))
    chunk = data.draw(st.sampled_from([None, 4096, 256 << 10]))
    sums: Checksums | None = None
    damaged = False
    if chunk is not None:
        expected = [
            tensorferry._core.crc32(content[at : min(at + chunk, offset + total)])
            for at in range(offset, offset + total, chunk)
        ]
        damaged = data.draw(st.booleans())
        if damaged:
            expected[data.draw(st.integers(0, len(expected) - 1))] ^= 1
        sums = Checksums(chunk, expected=expected)
    segments: list[Any] = [
        np.zeros(nbytes, np.uint8) if wanted else nbytes for wanted, nbytes in pieces
    ]
    with tensorferry.open((stored.store(), KEY)) as file:
        if damaged:
            with pytest.raises(tensorferry.ChecksumError):
                file.read(segments, offset, checksums=sums)
            return
        file.read(segments, offset, checksums=sums)
    at = offset
    for (wanted, nbytes), segment in zip(pieces, segments, strict=True):
        if wanted:
            assert segment.tobytes() == content[at : at + nbytes]
        at += nbytes


def test_a_python_file_ends_where_its_object_ends(stored: Bucket, content: bytes) -> None:
    with open_python_file(source_path((stored.store(), KEY))) as file:
        read, nbytes = reader_and_size(file)
        assert nbytes == NBYTES
        assert read(10, NBYTES - 4) == content[-4:]
        assert read(10, NBYTES) == read(10, NBYTES + 4) == b""
        assert file.seek(4, os.SEEK_END) == NBYTES + 4
        assert file.read(10) == file.read() == b""
        file.seek(8)
        numbers = array.array("q", bytes(24))
        assert file.readinto(numbers) == 24  # type: ignore[attr-defined]
        assert numbers.tobytes() == content[8:32]


def test_a_read_past_the_end_is_refused(stored: Bucket) -> None:
    with (
        tensorferry.open((stored.store(), KEY)) as file,
        pytest.raises(tensorferry.ShortReadError, match=str(NBYTES)),
    ):
        file.read(bytearray(10), NBYTES - 5)


def test_only_what_is_wanted_is_asked_for(proxied: Bucket, s3_proxy: FaultProxy) -> None:
    with tensorferry.open((proxied.store(), KEY)) as file:
        file.read([bytearray(100), 5 * MIB, bytearray(MIB)], 1000)
    ranges = sorted(each.range or (0, 0) for each in s3_proxy.asked("GET"))
    assert sum(end - begin for begin, end in ranges) < 1.1 * MIB
    assert [each for each in s3_proxy.asked() if each.method not in ("GET", "HEAD")] == []


FAULTS: dict[str, dict[str, Any]] = {
    "429": {"status": 429},
    "500": {"status": 500},
    "503": {"status": 503},
    "lost": {"lose": True},
    "reset": {"reset_after": 100_000},
    "short": {"short": 5},
    "honestly short": {"short": 5, "honest": True},
    "elsewhere": {"shift": 4096},
    "another version": {"etag": '"0123"'},
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_fails_once_is_asked_for_again_or_raised(
    proxied: Bucket, s3_proxy: FaultProxy, content: bytes, name: str
) -> None:
    """The bytes are right, or an exception names those that could not be read."""
    with tensorferry.open((proxied.store(), KEY)) as file:
        s3_proxy.on(method="GET", times=1, **FAULTS[name])
        try:
            found = file.read(bytearray(NBYTES))
        except StorageError as error:
            assert name in ("another version", "elsewhere", "honestly short"), error  # noqa: PT017
            assert KEY in str(error)  # noqa: PT017
            assert "bytes " in str(error)  # noqa: PT017
        else:
            assert found == content
            assert name not in ("another version", "honestly short")
        s3_proxy.clear()
        assert file.read(bytearray(NBYTES)) == content


def test_what_fails_for_ever_is_told_with_key_range_and_status(
    proxied: Bucket, s3_proxy: FaultProxy
) -> None:
    with tensorferry.open((proxied.store(retries=1), KEY)) as file:
        s3_proxy.on(method="GET", status=503)
        with pytest.raises(StorageError) as caught:
            file.read(bytearray(1000), 5000)
    text = str(caught.value)
    assert caught.value.errno == errno.ECOMM
    assert KEY in text
    assert "bytes 5000 to 6000" in text
    assert "503" in text
    assert proxied.name in text


def test_an_object_that_is_replaced_is_no_mixture(s3: str) -> None:
    bucket = buckets.Bucket.new(s3)
    bucket.write("k", b"a" * 3 * MIB)
    with tensorferry.open((bucket.store(), "k")) as file:
        assert file.read(bytearray(10)) == b"a" * 10
        bucket.write("k", b"b" * 3 * MIB)
        with pytest.raises(StorageError) as caught:
            file.read(bytearray(10), MIB)
    assert caught.value.errno == errno.ESTALE


class Replaced:
    """A web server of one object, which is replaced in the middle of the response to a GET."""

    def __init__(self, etag: str, new_etag: str) -> None:
        self.old, self.new = (random.Random(n).randbytes(3 * MIB + n) for n in (0, 2))
        self.gets = 0
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self.answer()

            def do_GET(self) -> None:
                server.gets += 1
                self.answer()

            def answer(self) -> None:
                is_old = server.gets < 2
                data, tag = (server.old, etag) if is_old else (server.new, new_etag)
                if self.headers.get("If-Match", tag) != tag:
                    self.send_response(412)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                begin, end = 0, len(data)
                if found := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
                    begin, end = int(found[1]), int(found[2]) + 1
                self.send_response(206 if found else 200)
                self.send_header("ETag", tag)
                day = 1 if is_old else 8
                self.send_header("Last-Modified", f"Mon, 0{day} Jan 2024 00:00:00 GMT")
                self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
                self.send_header("Content-Length", str(end - begin))
                self.end_headers()
                if self.command == "GET":
                    breaks = server.gets == 1
                    self.wfile.write(data[begin : (begin + end) // 2 if breaks else end])
                    self.close_connection = breaks

        self._server = buckets.Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/object"

    def __enter__(self) -> Replaced:
        threading.Thread(target=self._server.serve_forever, args=[0.01], daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.mark.parametrize(("etag", "new_etag"), [('W/"v"', 'W/"v"'), ('"v"', '"v"'), ('"v"', '"w"')])
def test_a_response_that_broke_off_is_not_continued_with_another_version(
    etag: str, new_etag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Replaced(etag, new_etag) as server, tensorferry.open(server.url) as file:
        with pytest.raises(StorageError) as caught:
            file.read(bytearray(3 * MIB))
        assert caught.value.errno == errno.ESTALE
        assert server.gets == 2


@pytest.mark.parametrize(
    ("change", "number"),
    [
        (lambda bucket: (bucket.store(), "nothing"), errno.ENOENT),
        (lambda bucket: (bucket.store(key="wrong"), KEY), errno.EACCES),
        (
            lambda bucket: (buckets.Bucket("no-such-bucket", bucket.endpoint).store(), KEY),
            errno.ENOENT,
        ),
        (
            lambda bucket: (bucket.by_way_of("http://127.0.0.1:9").store(retries=0), KEY),
            errno.ECOMM,
        ),
    ],
)
def test_what_cannot_be_opened(
    stored: Bucket, change: Callable[[Bucket], Any], number: int
) -> None:
    with pytest.raises(StorageError) as caught:
        tensorferry.open(change(stored))
    assert caught.value.errno == number


@pytest.mark.parametrize(
    "path",
    [
        *("s3://", "https://host/x?query=1", "https://user:secret@host/x", "s3://bucket/a//b"),
        *("s3://bucket/a/../b", "s3://bucket/a/.", (object(), "key")),
        # obstore would request another key, or none.
        *("https://host/a%2Fb", "https://host/a%2fb", "https://host/%E4", "https://host/100%"),
        *("https://host/a%zz", "https://host/%2e%2e/b", "https://host/a/%2E", "https://host/a%00"),
        *("https://host/x#part", "https://host/a%0Ab", "s3://bucket/a\nb", "s3://bucket/\udc80"),
    ],
)
def test_what_is_no_place(path: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="path: ") as caught:
        tensorferry.open(path)
    assert "secret" not in str(caught.value)


@hypothesis.given(
    name=st.text(st.sampled_from("ab%&+ ;=@[]^'äé€😀\\?#.~"), min_size=1, max_size=8).filter(
        lambda name: name not in (".", "..")
    )
)
def test_an_escaped_web_address_names_its_object_and_no_other(
    served: tuple[Path, str], name: str
) -> None:
    folder, web = served
    (folder / "folder").mkdir(exist_ok=True)
    (folder / "folder" / name).write_bytes(name.encode())
    for url in (
        f"{web}/folder/{urllib.parse.quote(name)}",
        as_path(f"{web}/folder") / name,
    ):
        with tensorferry.open(url) as file:
            assert file.read(bytearray(file.size)) == name.encode()
        assert as_path(url).name == name


@pytest.mark.parametrize("key", ["/lead", "a//b", "../b", "a/..", "nul\0", "line\n", "half\udc80"])
def test_keys_that_would_be_others_are_refused(stored: Bucket, key: str) -> None:
    with pytest.raises(ValueError, match="path: "):
        tensorferry.open((stored.store(), key))


def test_what_could_be_replaced_unseen_is_refused(tmp_path: Path) -> None:
    """Of a server that gives no ETag two versions would be one."""
    (tmp_path / "x").write_bytes(b"x" * 100)
    with buckets.file_server(tmp_path) as web, FaultProxy(web) as proxy:
        proxy.on(etag="")
        with pytest.raises(StorageError, match="ETag"):
            tensorferry.open(f"{proxy.address}/x")


def test_texts_of_pairs_are_of_one_process(stored: Bucket) -> None:
    with tensorferry.open((stored.store(), KEY)) as file:
        text = file.path
    program = f"""
        import obstore, tensorferry
        store = obstore.store.MemoryStore()
        obstore.put(store, "k", b"other")
        tensorferry.open((store, "k")).close()
        try:
            tensorferry.open({text!r})
        except RuntimeError as error:
            print("of another process" in str(error))
    """
    done = run(program, stored)
    assert done.stdout == "True\n", done.stderr


def test_a_store_without_a_name_has_a_root() -> None:
    obstore = pytest.importorskip("obstore")
    store = obstore.store.MemoryStore()
    obstore.put(store, "a.bin", b"one")
    with tensorferry.open((store, "a.bin")) as file:
        assert str(as_path(file.path).parent / "a.bin") == file.path
        assert [*as_path(file.path).parent.iterdir()] == [as_path(file.path)]
        assert as_path(file.path).parent.is_dir()


def test_a_signal_handler_may_open_something(stored: Bucket) -> None:
    program = """
        import os, signal, sys, tensorferry
        from tests.support.buckets import Bucket
        bucket, key = Bucket(sys.argv[1], os.environ["AWS_ENDPOINT_URL"]), sys.argv[2]
        def use():
            with tensorferry.open((bucket.store(), key)) as file:
                return file.read(bytearray(10))
        expected = use()
        found = []
        signal.signal(signal.SIGALRM, lambda *_: found.append(use()))
        for number in range(40):
            signal.setitimer(signal.ITIMER_REAL, 0.0002 * (1 + number % 20))
            assert use() == expected
            signal.setitimer(signal.ITIMER_REAL, 0)
        print({bytes(each) for each in found} <= {bytes(expected)})
    """
    done = run(program, stored, arguments=[stored.name, KEY])
    assert done.stdout == "True\n", done.stderr


def test_what_nobody_waits_for_is_not_asked_for_at_the_end(
    proxied: Bucket, s3_proxy: FaultProxy
) -> None:
    program = """
        import os, tensorferry
        file = tensorferry.open(os.environ["KEY"])
        kept = [file.read_into(bytearray(1000), at) for at in range(400)]
    """
    done = run(program, proxied)
    assert done.returncode == 0, done.stderr
    assert len(s3_proxy.asked("GET")) < 200


class _WordlessError(Exception):
    """An exception that fails when its text or errno is asked for."""

    def __str__(self) -> str:
        raise RuntimeError

    @property
    def errno(self) -> int:
        raise RuntimeError


@pytest.mark.parametrize(
    ("raised", "errno_", "text"),
    [
        (ValueError("a surrogate: \udcff"), errno.EREMOTEIO, r"a surrogate: \\udcff"),
        (_WordlessError(), errno.EREMOTEIO, "_WordlessError"),
        (OSError(errno.ENOENT, "not there"), errno.ENOENT, "not there"),
        (OSError(1 << 80, "too large"), errno.EREMOTEIO, "too large"),
    ],
)
def test_any_exception_of_a_source_fails_the_read(
    raised: Exception, errno_: int, text: str
) -> None:
    def read(offset: int, nbytes: int) -> None:
        raise raised

    file = _core.file_of_source("mem://x", 4096, (1 << 40) + 7, read)
    scheduler = _core.Scheduler("threads", 1 << 20, 1 << 20, 16, 1, False)
    request = scheduler.new_request(False, False, False, False, False)
    memory = np.zeros(4096, np.uint8)
    scheduler.submit(request, [file], [memory.ctypes.data], [4096], [0], [0], memory)
    assert request.wait(60)
    [(_, fault)] = request.failures()
    assert fault.errno == errno_
    assert re.search(text, str(fault))


def test_a_dropped_object_lets_its_function_go() -> None:
    def read(offset: int, nbytes: int) -> list[bytes]:
        return [bytes(nbytes)]

    reference = weakref.ref(read)
    file = _core.file_of_source("mem://x", 4096, (1 << 40) + 7, read)
    del read
    assert reference() is not None
    del file
    gc.collect()
    assert reference() is None


def test_nothing_is_written(stored: Bucket) -> None:
    for mode in ("w", "r+"):
        with pytest.raises(ValueError, match="URL"):
            tensorferry.open(stored.url("new"), mode)
    with pytest.raises(ValueError, match="URL"):
        tensorferry.write(stored.url("new"), b"x")
    with (
        tensorferry.open((stored.store(), KEY)) as file,
        pytest.raises(ValueError, match="writing"),
    ):
        file.write(b"x")


def test_many_threads_and_futures_that_outlive_their_file(stored: Bucket, content: bytes) -> None:
    def read(number: int) -> None:
        with tensorferry.open((stored.store(), KEY)) as file:
            futures = [file.read_into(bytearray(MIB), at * 777_777) for at in range(20)]
            if number % 2:
                del file
            for at, future in enumerate(futures):
                found.append(future.result() == content[at * 777_777 :][:MIB])

    found: list[bool] = []
    threads = [threading.Thread(target=read, args=[number]) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 120


def test_cancelled_reads_ask_for_no_more(proxied: Bucket, s3_proxy: FaultProxy) -> None:
    with tensorferry.open((proxied.store(), KEY)) as file:
        held = s3_proxy.on(method="GET", hold=threading.Event())
        # More requests than are ever on their way.
        futures = [file.read_into(bytearray(MIB), at % 20 * MIB) for at in range(64)]
        assert held.met.wait(60)
        for future in futures:
            future.cancel()
        s3_proxy.clear()
    assert all(future.cancelled() or future.exception() is None for future in futures)
    assert len(s3_proxy.asked("GET")) < 40


def run(
    program: str, bucket: Bucket, timeout: float = 120, arguments: Iterable[str] = ()
) -> subprocess.CompletedProcess[str]:
    setting = bucket.environment() | {"KEY": bucket.url(KEY)}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        cwd=ROOT,
        env=os.environ | setting,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def test_without_the_extra_it_is_named(stored: Bucket) -> None:
    program = """
        import os, sys
        import tensorferry, tensorferry.safetensors
        assert "obstore" not in sys.modules
        sys.modules["obstore"] = None
        try:
            tensorferry.open(os.environ["KEY"])
        except ImportError as error:
            assert "tensorferry[remote]" in str(error), error
            print("named")
    """
    done = run(program, stored)
    assert done.stdout == "named\n", done.stderr


def test_a_forked_child_is_told(stored: Bucket) -> None:
    """obstore's threads are its parent's: it would wait for ever."""
    program = """
        import os, tensorferry
        with tensorferry.open(os.environ["KEY"]) as file:
            file.read(bytearray(10))
            child = os.fork()
            if child == 0:
                try:
                    tensorferry.open(os.environ["KEY"])
                except RuntimeError as error:
                    assert "spawn" in str(error), error
                    os._exit(17)
                os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
            file.read(bytearray(10))
        print("ended")
    """
    done = run(program, stored)
    assert done.stdout == "ended\n", done.stderr


def test_a_forked_child_is_told_of_its_parents_own_use(stored: Bucket) -> None:
    program = """
        import os, obstore, tensorferry
        from obstore.store import from_url
        store = from_url(os.environ["KEY"].rpartition("/")[0])
        obstore.head(store, "object.bin")
        child = os.fork()
        if child == 0:
            try:
                tensorferry.open(os.environ["KEY"])
            except RuntimeError:
                os._exit(17)
            os._exit(1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    done = run(program, stored)
    assert done.stdout == "17\n", done.stderr


def test_ctrl_c_ends_a_wait_for_an_answer(proxied: Bucket, s3_proxy: FaultProxy) -> None:
    program = """
        import os, sys, tensorferry
        try:
            with tensorferry.open(os.environ["KEY"]) as file:
                file.read(bytearray(10))
        except KeyboardInterrupt:
            print("left", flush=True)  # with nothing waited for
            raise
    """
    for method in ("HEAD", "GET"):
        held = s3_proxy.on(method=method, hold=threading.Event())
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program)],
            cwd=ROOT,
            env=os.environ | proxied.environment() | {"KEY": proxied.url(KEY)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert held.met.wait(60)
            process.send_signal(signal.SIGINT)
            assert process.stdout
            assert process.stdout.readline() == "left\n"
            s3_proxy.clear()  # the exit waits for the requests in flight
            _, said = process.communicate(timeout=100)
        finally:
            process.kill()
            s3_proxy.clear()
        assert "KeyboardInterrupt" in said
        assert process.returncode != 0


def test_a_process_ends_with_reads_on_their_way(stored: Bucket) -> None:
    program = """
        import os, tensorferry
        file = tensorferry.open(os.environ["KEY"])
        kept = [file.read_into(bytearray(1 << 20), at << 20) for at in range(20)]
        print("begun")
    """
    done = run(program, stored)
    assert (done.returncode, done.stdout) == (0, "begun\n"), done.stderr


@pytest.fixture
def faults(s3_proxy: FaultProxy) -> Callable[[random.Random], None]:
    def set_some(numbers: random.Random) -> None:
        s3_proxy.clear()
        for _ in range(numbers.randint(1, 3)):
            name = numbers.choice([*FAULTS])
            s3_proxy.on(
                method=numbers.choice(["GET", "GET", "HEAD", "*"]),
                times=numbers.choice([1, 1, 2, None]),
                skip=numbers.randint(0, 3),
                **FAULTS[name],
            )

    return set_some


def test_any_faults(
    proxied: Bucket, content: bytes, faults: Callable[[random.Random], None]
) -> None:
    """The bytes equal the stored ones, or an exception names the object."""
    numbers = random.Random(SEED)
    for _ in range(effort.examples(40)):
        faults(numbers)
        begin = numbers.randint(0, NBYTES - 1)
        end = min(NBYTES, begin + numbers.choice([1, 1000, MIB, 9 * MIB, NBYTES]))
        try:
            with tensorferry.open((proxied.store(retries=1), KEY)) as file:
                found = file.read(bytearray(end - begin), begin)
        except StorageError as error:
            assert KEY in str(error)  # noqa: PT017
        else:
            assert found == content[begin:end]
