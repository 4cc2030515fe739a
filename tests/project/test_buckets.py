"""Tests of the servers and the proxy that the tests of buckets use."""

from __future__ import annotations

import hashlib
import http.client
import threading
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import buckets, required
from tests.support.fault_proxy import FaultProxy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.buckets import Bucket

CONTENT = bytes(range(256)) * 400


@pytest.fixture
def files(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "file").write_bytes(CONTENT)
    with buckets.file_server(tmp_path) as address:
        yield address + "/file"


def ask(address: str, method: str = "GET", **headers: str) -> tuple[int, Any, bytes]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(address, headers=named, method=method)
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.headers, refused.read()


def test_the_file_server_knows_ranges_and_conditions(files: str) -> None:
    status, headers, body = ask(files)
    etag = headers["ETag"]
    assert (status, body) == (200, CONTENT)
    assert ask(files, "HEAD")[1]["Content-Length"] == str(len(CONTENT))
    for wanted, got in {"5-9": CONTENT[5:10], "102390-": CONTENT[-10:], "-7": CONTENT[-7:]}.items():
        status, headers, body = ask(files, Range=f"bytes={wanted}", If_Match=etag)
        assert (status, body) == (206, got)
        assert headers["Content-Range"].endswith(f"/{len(CONTENT)}")
    assert ask(files, Range="bytes=102400-")[0] == 416
    assert ask(files, If_Match='"other"')[0] == 412
    assert ask(files, If_None_Match=etag)[0] == 304
    assert ask(files, Range="bytes=5-9", If_Range='"other"')[::2] == (200, CONTENT)
    assert ask(files + "2")[0] == 404


def test_the_proxy_records_and_fails_as_it_is_told(files: str) -> None:
    with FaultProxy(files[:-5]) as proxy:
        by_proxy = proxy.address + "/file"
        assert ask(by_proxy)[2] == CONTENT
        assert ask(by_proxy, "HEAD")[1]["Content-Length"] == str(len(CONTENT))
        assert ask(by_proxy, Range="bytes=5-9")[2] == CONTENT[5:10]
        assert [each.range for each in proxy.asked("GET", "file")] == [None, (5, 10)]
        assert [each.sent_nbytes for each in proxy.requests] == [len(CONTENT), 0, 5]

        proxy.on(status=503, times=2, skip=1)
        assert [ask(by_proxy)[0] for _ in range(4)] == [200, 503, 503, 200]
        for fault in ({"short": 10}, {"reset_after": 1000}, {"lose": True}):
            struck = proxy.on(times=1, **fault)
            with pytest.raises((OSError, http.client.HTTPException)):
                ask(by_proxy)
            assert struck.met.is_set()
            assert proxy.requests[-1].state == "cut"
        proxy.on(short=10, honest=True, times=1)
        assert ask(by_proxy)[2] == CONTENT[:-10]
        proxy.on(etag='"other"', alter=True, times=1)
        _, headers, body = ask(by_proxy)
        assert headers["ETag"] == '"other"'
        assert sum(a != b for a, b in zip(body, CONTENT, strict=True)) == 1
        for quiet, said in ((False, "7-11"), (True, "5-9")):
            proxy.on(shift=2, quiet=quiet, times=1)
            _, headers, body = ask(by_proxy, Range="bytes=5-9")
            assert headers["Content-Range"] == f"bytes {said}/{len(CONTENT)}"
            assert body == CONTENT[7:12]
        proxy.on(delay_seconds=0.05, times=1)
        began = time.monotonic()
        ask(by_proxy)
        assert time.monotonic() - began >= 0.05


def test_the_proxy_holds_what_it_is_told_to_hold(files: str) -> None:
    with FaultProxy(files[:-5]) as proxy:
        held = proxy.on(hold=threading.Event())
        asking = threading.Thread(target=ask, args=[proxy.address + "/file"])
        asking.start()
        assert held.met.wait(300)
        assert proxy.requests[0].state == "received"
        proxy.clear()
        asking.join(300)
        assert proxy.requests[0].state == "answered"


def test_a_bucket_takes_parts_and_conditions_and_refuses_other_credentials(
    bucket: Bucket, s3_proxy: FaultProxy
) -> None:
    obstore: Any = required.module("obstore")
    store = bucket.by_way_of(s3_proxy.address).store()
    whole = CONTENT * 150
    answer = obstore.put(store, "folder/large", whole, chunk_size=5 << 20)
    parts = [
        hashlib.md5(whole[at : at + (5 << 20)]).digest() for at in range(0, len(whole), 5 << 20)
    ]
    assert answer["e_tag"] == f'"{hashlib.md5(b"".join(parts)).hexdigest()}-{len(parts)}"'
    obstore.put(store, "small", b"small", mode="create")
    with pytest.raises(obstore.exceptions.AlreadyExistsError):
        obstore.put(store, "small", b"other", mode="create")
    assert bucket.keys() == ["folder/large", "small"]
    assert bytes(obstore.get_range(store, "folder/large", start=5, end=10)) == whole[5:10]
    assert bucket.read("folder/large") == whole
    assert bucket.uploads() == 0
    with pytest.raises((obstore.exceptions.PermissionDeniedError, obstore.exceptions.GenericError)):
        obstore.get(bucket.store(key="other"), "small")


def test_addresses_lead_to_the_bucket_by_the_environment(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    obstore: Any = required.module("obstore")
    for name, value in bucket.environment().items():
        monkeypatch.setenv(name, value)
    bucket.write("folder/key", CONTENT)
    store = required.module("obstore.store").from_url(bucket.url("folder"))
    assert bytes(obstore.get(store, "key").bytes()) == CONTENT
