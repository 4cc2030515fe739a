"""Buckets and web servers on loopback, each in a separate process: moto's S3 server, and a plain one for a folder.

A separate process has its own processor time, can be killed, and ends with the process that started it. If moto or
obstore is missing, the tests that use these servers are skipped. A `fault_proxy.FaultProxy` can run before each server.
"""

from __future__ import annotations

import contextlib
import email.utils
import http.server
import itertools
import os
import re
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support import required
from tests.support.child import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

KEY, SECRET, REGION = "x", "x", "us-east-1"

_numbers = itertools.count(1)


@contextlib.contextmanager
def s3_server(command: Iterable[str] = ()) -> Iterator[str]:
    """Run moto's S3 server and yield its address; `command` is a prefix, such as a command that enters a cgroup."""
    required.module("moto")
    required.module("flask_cors")  # moto's server needs it and does not depend on it
    with serving([*command, sys.executable, "-m", __name__, "s3"]) as address:
        yield address


@contextlib.contextmanager
def file_server(folder: Path, command: Iterable[str] = ()) -> Iterator[str]:
    """Run a web server for a folder, with ranges, ETags, If-Match and If-Range, and give its address."""
    with serving([*command, sys.executable, "-m", __name__, "files", str(folder)]) as address:
        yield address


@dataclass(frozen=True)
class Bucket:
    """A bucket, as seen by way of an endpoint: the server itself, or a proxy in front of it."""

    name: str
    endpoint: str

    @classmethod
    def new(cls, endpoint: str) -> Bucket:
        bucket = cls(f"bucket-{os.getpid()}-{next(_numbers)}", endpoint)
        request = urllib.request.Request(f"{endpoint}/{bucket.name}", method="PUT")
        urllib.request.urlopen(request, timeout=60).close()
        return bucket

    def by_way_of(self, endpoint: str) -> Bucket:
        return Bucket(self.name, endpoint)

    def url(self, key: str = "") -> str:
        return f"s3://{self.name}/{key}"

    def environment(self) -> dict[str, str]:
        """Return the environment variables that make `s3://` addresses use this server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": REGION,
            "AWS_ALLOW_HTTP": "true",
        }

    def store(
        self, *, key: str = KEY, prefix: str | None = None, retries: int = 3, timeout: str = "60s"
    ) -> Any:
        """Return obstore's store; it tries again soon, and gives up after minutes at most."""
        return required.module("obstore.store").S3Store(
            self.name,
            prefix=prefix,
            endpoint=self.endpoint,
            access_key_id=key,
            secret_access_key=SECRET,
            region=REGION,
            virtual_hosted_style_request=False,
            client_options={"allow_http": True, "timeout": timeout},
            retry_config={
                "max_retries": retries,
                "retry_timeout": timedelta(minutes=2),
                "backoff": {
                    "init_backoff": timedelta(milliseconds=5),
                    "max_backoff": timedelta(milliseconds=50),
                    "base": 2,
                },
            },
        )

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys of all objects."""
        pages = required.module("obstore").list(self.store(), prefix)
        return sorted(each["path"] for page in pages for each in page)

    def read(self, key: str) -> bytes:
        return bytes(required.module("obstore").get(self.store(), key).bytes())

    def write(self, key: str, content: bytes) -> None:
        required.module("obstore").put(self.store(), key, content)

    def uploads(self) -> int:
        """Return how many multipart uploads have neither ended nor been aborted."""
        with urllib.request.urlopen(f"{self.endpoint}/{self.name}?uploads", timeout=60) as answer:
            return int(answer.read().count(b"<UploadId>"))


@contextlib.contextmanager
def serving(command: list[str]) -> Iterator[str]:
    """Run a server that writes its port and ends with its standard input, and give its address."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"S3_IGNORE_SUBDOMAIN_BUCKETNAME": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is not for it
    )
    assert process.stdout
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.communicate()


def _serve_s3() -> None:
    from moto.moto_server import werkzeug_app
    from werkzeug.serving import make_server

    class Handler(werkzeug_app.MotoRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_request(self, *_: object) -> None:
            """Be silent."""

    moto = werkzeug_app.DomainDispatcherApplication(werkzeug_app.create_backend_app)

    def application(environment: dict[str, Any], start: Callable[..., Any]) -> Any:
        """Refuse other credentials, which moto does not look at."""
        signature = environment.get("HTTP_AUTHORIZATION")
        if signature is None or f"Credential={KEY}/" in signature:
            return moto(environment, start)
        environment["wsgi.input"].read(int(environment.get("CONTENT_LENGTH") or 0))
        answer = b"<Error><Code>InvalidAccessKeyId</Code><Message>no such key</Message></Error>"
        headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(answer)))]
        start("403 Forbidden", headers)
        return [] if environment["REQUEST_METHOD"] == "HEAD" else [answer]

    server = make_server("127.0.0.1", 0, application, True, request_handler=Handler)
    _serve(server, server.server_port)


def _serve_files(folder: str) -> None:
    class Handler(_Files):
        root = Path(folder)

    server = Server(("127.0.0.1", 0), Handler)
    _serve(server, server.server_port)


def _serve(server: Any, port: int) -> None:
    def end() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=end).start()
    print(port, flush=True)
    server.serve_forever()


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Let a client go without a word."""
        if not isinstance(sys.exc_info()[1], OSError | ValueError):
            super().handle_error(request, client_address)


class _Files(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    root: Path

    def log_message(self, *_: object) -> None:
        """Be silent."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        name = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).lstrip("/")
        path = self.root / name
        if ".." in Path(name).parts or not path.is_file():
            self._head(404, {"Content-Length": "0"})
            return
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            size, etag = status.st_size, f'"{status.st_mtime_ns:x}-{status.st_ino:x}"'
            headers = {
                "ETag": etag,
                "Accept-Ranges": "bytes",
                "Last-Modified": email.utils.formatdate(status.st_mtime, usegmt=True),
                "Content-Length": "0",
            }
            asked = self.headers
            if asked["If-Match"] not in (None, "*", etag):
                self._head(412, headers)
                return
            if asked["If-None-Match"] in ("*", etag):
                self._head(304, headers)
                return
            begin, end, code = 0, size, 200
            wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", asked["Range"] or "")
            if wanted and wanted.group() != "bytes=-" and asked["If-Range"] in (None, etag):
                first, last = wanted.groups()
                begin = int(first) if first else max(0, size - int(last))
                end = min(size, int(last) + 1) if first and last else size
                code = 206
                if begin >= end:
                    self._head(416, headers | {"Content-Range": f"bytes */{size}"})
                    return
                headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
            self._head(code, headers | {"Content-Length": str(end - begin)})
            while with_body and begin < end:
                begin += os.sendfile(self.connection.fileno(), file.fileno(), begin, end - begin)

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


if __name__ == "__main__":
    {"s3": _serve_s3, "files": _serve_files}[sys.argv[1]](*sys.argv[2:])
