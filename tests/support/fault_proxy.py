"""A proxy in front of a server on loopback, which records requests, and answers wrongly on demand.

It runs in threads of this process, so its plan and its records are plain objects. With only a delay it can run in a
separate process: `python -m tests.support.fault_proxy ADDRESS DELAY_SECONDS` prints its port, and ends when its
standard input is closed.
"""

from __future__ import annotations

import fnmatch
import http.client
import http.server
import os
import re
import socket
import struct
import sys
import threading
import time
import urllib.parse
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.support.buckets import Server

if TYPE_CHECKING:
    import types

_PIECE_NBYTES = 1 << 20
_NO_BODY = (204, 304)


@dataclass
class Request:
    """A request, and its outcome."""

    method: str
    path: str  # without its first slash: bucket/key
    query: str
    headers: dict[str, str]  # names in lower case
    nbytes: int  # of its body
    state: str = "received"  # then "passed on", "answered", or "cut" in the middle
    status: int | None = None
    sent_nbytes: int = (
        0  # bytes of the answer's body; the count and the state change before they are sent
    )
    time: float = field(default_factory=time.monotonic)

    @property
    def range(self) -> tuple[int, int] | None:
        """Return the begin and the end of the requested range."""
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        return (int(found[1]), int(found[2]) + 1) if found else None


@dataclass
class Fault:
    """A fault for `times` matching requests (None: for all). A request may meet several faults."""

    method: str = "*"
    path: str = "*"  # a pattern for bucket/key
    query: str = "*"
    times: int | None = None
    skip: int = 0  # so many that match go by first
    delay_seconds: float | None = None  # before the answer
    hold: threading.Event | None = None  # the request is not passed on before this is set
    hold_answer: threading.Event | None = None  # the answer is not
    status: int | None = None  # answered so, and not passed on
    lose: bool | None = None  # passed on, and the connection is reset instead of an answer
    reset_after: int | None = None  # so many bytes of the answer's body, the connection is reset
    short: int | None = (
        None  # so many bytes of the body are missing at its end, which the connection's end shows
    )
    honest: bool | None = None  # with a Content-Length of the shortened body
    shift: int | None = (
        None  # another range is requested and answered, so many bytes after the requested one
    )
    quiet: bool | None = None  # with the Content-Range of the requested one
    etag: str | None = None  # replaces the answer's etag; empty: the answer has none
    alter: bool | None = (
        None  # changes a byte in the middle of the answer's body for a GET, otherwise of the request's
    )
    met: threading.Event = field(default_factory=threading.Event)  # it has struck
    count: int = 0

    def _strikes(self, request: Request) -> bool:
        pairs = [
            (request.method, self.method),
            (request.path, self.path),
            (request.query, self.query),
        ]
        if not all(fnmatch.fnmatchcase(*pair) for pair in pairs):
            return False
        self.count += 1
        if self.count <= self.skip:
            return False
        return self.times is None or self.count <= self.skip + self.times


class FaultProxy:
    """The proxy, at `address`. `with` stops it."""

    def __init__(self, upstream: str) -> None:
        self.requests: list[Request] = []
        self._upstream = urllib.parse.urlsplit(upstream).netloc
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._server = Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"proxy": self}))
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=[0.01], daemon=True).start()

    def on(self, **fault: Any) -> Fault:
        """Add a fault, with the fields of `Fault`."""
        with self._lock:
            self._faults.append(Fault(**fault))
            return self._faults[-1]

    def clear(self) -> None:
        """Remove all faults, and release the held requests."""
        with self._lock:
            for fault in self._faults:
                for held in filter(None, (fault.hold, fault.hold_answer)):
                    held.set()
            self._faults.clear()

    def asked(self, method: str = "*", path: str = "*") -> list[Request]:
        """Return the requests of a method, for a pattern of bucket/key."""
        pairs = [(each, (each.method, method), (each.path, path)) for each in [*self.requests]]
        return [each for each, *both in pairs if all(fnmatch.fnmatchcase(*pair) for pair in both)]

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: types.TracebackType | None
    ) -> None:
        self.clear()
        self._server.shutdown()
        self._server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    proxy: FaultProxy
    server_side: http.client.HTTPConnection | None = None

    def log_message(self, *_: object) -> None:
        """Be silent."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):
            return self._pass
        raise AttributeError(name)

    def _pass(self) -> None:
        split = urllib.parse.urlsplit(self.path)
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        path = urllib.parse.unquote(split.path).lstrip("/")
        request = Request(self.command, path, split.query, headers, len(body))
        proxy = self.proxy
        with proxy._lock:
            proxy.requests.append(request)
            struck = [fault for fault in proxy._faults if fault._strikes(request)]

        def wanted(name: str) -> Any:
            return next((v for each in struck if (v := getattr(each, name)) is not None), None)

        for fault in struck:
            fault.met.set()
        if held := wanted("hold"):
            held.wait()
        if status := wanted("status"):
            time.sleep(wanted("delay_seconds") or 0)
            self._send(request, status, {}, b"<Error><Code>Fault</Code></Error>")
            return
        shift, given = wanted("shift"), request.range
        if shift and given:
            headers["range"] = f"bytes={given[0] + shift}-{given[1] + shift - 1}"
        if wanted("alter") and self.command != "GET":
            body = _altered(body)
        answer = self._ask(headers, body)
        request.state = "passed on"
        if held := wanted("hold_answer"):
            held.wait()
        time.sleep(wanted("delay_seconds") or 0)
        if wanted("lose"):
            self._reset(request)
            answer.close()
            return
        said = {name: value for name, value in answer.getheaders() if name.lower() != "connection"}
        if (etag := wanted("etag")) is not None:
            said = {name: value for name, value in said.items() if name.lower() != "etag"}
            said |= {"ETag": etag} if etag else {}
        if shift and given and wanted("quiet") and (seen := answer.getheader("Content-Range")):
            said = {name: value for name, value in said.items() if name.lower() != "content-range"}
            said["Content-Range"] = f"bytes {given[0]}-{given[1] - 1}/{seen.rpartition('/')[2]}"
        cut = (wanted("reset_after"), wanted("short"))
        length = answer.length
        if cut == (None, None) and not wanted("alter") and length is not None:
            self._stream(request, answer, said)
            return
        content = answer.read()
        if wanted("alter") and self.command == "GET":
            content = _altered(content)
        self._send(request, answer.status, said, content, *cut, honest=bool(wanted("honest")))

    def _ask(self, headers: dict[str, str], body: bytes) -> http.client.HTTPResponse:
        for last in (False, True):
            if self.server_side is None:
                self.server_side = http.client.HTTPConnection(self.proxy._upstream, timeout=300)
            side = self.server_side
            try:
                side.putrequest(self.command, self.path, True, True)
                for name, value in headers.items():
                    if name not in ("connection", "expect"):
                        side.putheader(name, value)
                side.endheaders(body or None)
                return side.getresponse()
            except (http.client.RemoteDisconnected, ConnectionError):
                side.close()
                self.server_side = None
                if last:
                    raise
        raise AssertionError

    def _stream(
        self, request: Request, answer: http.client.HTTPResponse, headers: dict[str, str]
    ) -> None:
        """Forward an answer as it arrives."""
        if not answer.length:
            request.state = "answered"  # before the client has the answer
        self._head(request, answer.status, headers)
        piece = bytearray(_PIECE_NBYTES)
        while nbytes := answer.readinto(piece):
            request.sent_nbytes += nbytes
            if not answer.length:
                request.state = "answered"
            self.connection.sendall(memoryview(piece)[:nbytes])

    def _send(
        self,
        request: Request,
        status: int,
        headers: dict[str, str],
        body: bytes,
        reset_after: int | None = None,
        short: int | None = None,
        *,
        honest: bool = False,
    ) -> None:
        whole = len(body)
        if reset_after is not None:
            body = body[:reset_after]
        if short is not None:
            body = body[: max(0, whole - short)]
        hop = ("content-length", "transfer-encoding")
        kept = {name: value for name, value in headers.items() if name.lower() not in hop}
        if self.command == "HEAD":
            kept = headers if status == 200 else kept | {"Content-Length": "0"}
            body = b""
        elif status not in _NO_BODY:
            kept["Content-Length"] = str(len(body) if honest else whole)
        cut = reset_after is not None or (short is not None and not honest)
        request.sent_nbytes, request.state = len(body), "cut" if cut else "answered"
        self._head(request, status, kept)
        self.connection.sendall(body)
        if reset_after is not None:
            self._reset(request)
        elif cut:
            self.close_connection = True

    def _head(self, request: Request, status: int, headers: dict[str, str]) -> None:
        request.status = status
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _reset(self, request: Request) -> None:
        request.state = "cut"
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        os.close(self.connection.detach())

    def finish(self) -> None:
        if self.server_side is not None:
            self.server_side.close()
        super().finish()


def _altered(body: bytes) -> bytes:
    middle = len(body) // 2
    return body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :] if body else body


if __name__ == "__main__":
    with FaultProxy(sys.argv[1]) as proxy:
        proxy.on(delay_seconds=float(sys.argv[2]))
        print(proxy.address.rpartition(":")[2], flush=True)
        sys.stdin.read()
