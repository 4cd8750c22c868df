"""Servers on this machine for the tests of remote tiers: real ones, and small ones that misbehave on purpose."""

import contextlib
import importlib.util
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

DRIP_SECONDS, DRIP_BYTES = 0.05, 50  # 1 KB/s


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for_port(port: int, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.5):
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing listens on port {port}")
        time.sleep(0.02)


class RedisProcess:
    """A `redis-server` of its own, in a directory that goes away with it."""

    def __init__(self, *arguments: str, port: int | None = None):
        self.port = port or free_port()
        self.directory = tempfile.mkdtemp(prefix="kv-redis-")
        self._arguments = arguments
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        command = ["redis-server", "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", self.directory]
        ports = () if "--port" in self._arguments else ("--port", str(self.port))
        self.process = subprocess.Popen([*command, *ports, *self._arguments], stdout=subprocess.DEVNULL)
        wait_for_port(self.port)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)


def redis_process(*arguments: str, port: int | None = None) -> RedisProcess:
    """A running server; skips the test where none is installed."""
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed (Debian: apt-get install redis-server)")
    return RedisProcess(*arguments, port=port)


@contextlib.contextmanager
def s3_process(bucket: str = "kvcache") -> Iterator[dict]:
    """A real S3-compatible server process with one bucket; yields the options of a tier for it."""
    if importlib.util.find_spec("moto.server") is None:  # not imported here: Flask's proxies upset vLLM's start
        pytest.skip("moto[server] is not installed")
    boto3 = pytest.importorskip("boto3")
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for_port(port)
        options = s3_options(port)
        boto3.client("s3", endpoint_url=options["endpoint"], aws_access_key_id="key", aws_secret_access_key="secret",
                     region_name="us-east-1").create_bucket(Bucket=bucket)  # fmt: skip
        yield options
    finally:
        process.kill()
        process.wait()


def s3_options(port: int) -> dict:
    return {"endpoint": f"http://127.0.0.1:{port}", "access_key_id": "key", "secret_access_key": "secret",
            "region": "us-east-1", "virtual_hosted_style_request": False}  # fmt: skip


def hang(connection: socket.socket, stop: threading.Event) -> None:
    """Say nothing until the other side or the test goes away."""
    connection.settimeout(0.02)
    while not stop.is_set():
        try:
            if not connection.recv(1 << 16):
                return
        except TimeoutError:
            continue
        except OSError:
            return


def drip(connection: socket.socket, data: bytes, stop: threading.Event) -> None:
    """Send at 1 KB/s."""
    for at in range(0, len(data), DRIP_BYTES):
        if stop.wait(DRIP_SECONDS):
            return
        connection.sendall(data[at : at + DRIP_BYTES])


class RespServer:
    """Speaks enough Redis for a tier, and breaks as `fault` says.

    Faults: "" none; "blackhole", "slow" (answers after 2 s), "drip" (1 KB/s), "cut" (closes in the middle of a reply),
    "close" (closes at once), "integer", "http", "huge" (announces more than a value may have), "unended" (a bulk
    without its end), "gone" (STRLEN says yes, GET says no), "overtaken" (STRLEN says no, SET finds a value),
    or the first word of an error reply.
    """

    def __init__(self):
        self.values: dict[bytes, bytes] = {}
        self.fault = ""
        self.commands: list[bytes] = []
        self._stop = threading.Event()
        self._listener: socket.socket | None = None
        self._connections: list[socket.socket] = []
        self.port = free_port()
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        self._stop = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self._listener, self._stop), daemon=True).start()

    def stop(self) -> None:
        """Refuse connections from now on, and cut those that are open."""
        self._stop.set()
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._connections.clear()

    def _accept(self, listener: socket.socket, stop: threading.Event) -> None:
        while not stop.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            threading.Thread(target=self._serve, args=(connection, stop), daemon=True).start()

    def _serve(self, connection: socket.socket, stop: threading.Event) -> None:
        with connection, connection.makefile("rb") as lines, contextlib.suppress(OSError, ValueError):
            while not stop.is_set() and (head := lines.readline()):
                words = []
                for _ in range(int(head[1:])):
                    nbytes = int(lines.readline()[1:])
                    words.append(lines.read(nbytes + 2)[:-2])
                self.commands.append(words[0])
                if not self._reply(connection, words, stop):
                    return

    def _reply(self, connection: socket.socket, words: list[bytes], stop: threading.Event) -> bool:
        """Answer one command as the fault wants it; False closes the connection."""
        fault = self.fault
        if fault == "blackhole":
            hang(connection, stop)
            return False
        if fault == "slow" and stop.wait(2.0):
            return False
        answer = self._answer(words, fault)
        if fault == "drip":
            drip(connection, answer, stop)
        elif fault == "cut":
            connection.sendall(answer[: len(answer) // 2])
            return False
        elif fault == "close":
            return False
        else:
            connection.sendall(answer)
        return fault != "http"

    def _answer(self, words: list[bytes], fault: str) -> bytes:
        if fault.isupper():
            return b"-%s said the server on purpose\r\n" % fault.encode()
        if fault == "integer" and words[0] != b"STRLEN":
            return b":1\r\n" if words[0] != b"DEL" else b"+1\r\n"
        if fault == "integer":
            return b"$1\r\n1\r\n"
        if fault == "http":
            return b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"
        value = self.values.get(words[1])
        if fault == "huge" and words[0] != b"DEL":
            return b"$99999999999\r\n"
        match words[0]:
            case b"STRLEN":
                return b":%d\r\n" % (len(value or b"") if fault != "overtaken" else 0)
            case b"GET":
                if value is None or fault == "gone":
                    return b"$-1\r\n"
                return b"$%d\r\n%s%s" % (len(value), value, b"\r\n" if fault != "unended" else b"--")
            case b"SET":
                if b"NX" in words[3:] and value is not None:
                    return b"$-1\r\n"
                self.values[words[1]] = words[2]
                return b"+OK\r\n"
            case b"DEL":
                return b":%d\r\n" % sum(self.values.pop(word, None) is not None for word in words[1:])
        return b"-ERR unknown command\r\n"


class S3Server:
    """Speaks enough S3 for a tier, and breaks as `fault` says.

    Faults: "" none; "blackhole", "slow", "drip", "truncated" (closes in the middle of the body), "wrong range",
    "whole" (ignores the range), "404 after HEAD", "http" (no HTTP at all), or a status code.
    """

    def __init__(self):
        self.objects: dict[str, bytes] = {}
        self.fault = ""
        self.requests: list[str] = []
        self.port = free_port()
        self._stop = threading.Event()
        self.start()

    def start(self) -> None:
        self._stop = threading.Event()
        handler = type("Handler", (_S3Handler,), {"owner": self, "stop": self._stop})
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        self._stop.set()
        self._server.shutdown()
        self._server.server_close()


class _S3Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: S3Server
    stop: threading.Event

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the tests count requests themselves."""

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except OSError:
            self.close_connection = True

    def do_HEAD(self) -> None:
        self._serve(lambda data: self._object(data, body=False))

    def do_GET(self) -> None:
        self._serve(lambda data: self._object(data, body=True))

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self._serve(lambda data: self._put(data, body))

    def do_POST(self) -> None:
        """DeleteObjects, the only request of this kind that a tier sends."""
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self._serve(lambda data: self._delete(re.findall("<Key>(.*?)</Key>", body)))

    def _serve(self, answer) -> None:
        fault = self.owner.fault
        self.owner.requests.append(self.command)
        if self.stop.is_set():
            self.close_connection = True
        elif fault == "blackhole":
            hang(self.connection, self.stop)
            self.close_connection = True
        elif fault == "slow" and self.stop.wait(2.0):
            self.close_connection = True
        elif fault == "http":
            self.wfile.write(b"+OK this is another service\r\n")
            self.close_connection = True
        elif fault.isdigit():
            self._status(int(fault))
        elif fault == "404 after HEAD" and self.command == "GET":
            self._status(404)
        else:
            answer(self.owner.objects.get(self.path))

    def _object(self, data: bytes | None, *, body: bool) -> None:
        if data is None:
            self._status(404)
            return
        fault, size = self.owner.fault, len(data)
        first, stop = 0, size
        if body and "Range" in self.headers and fault != "whole":
            low, _, high = self.headers["Range"].removeprefix("bytes=").partition("-")
            first, stop = int(low), min(size, int(high) + 1)
            if fault == "wrong range":
                first, stop = first + 1, min(size, stop + 1)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{stop - 1}/{size}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(stop - first))
        self.send_header("Last-Modified", "Sun, 29 Nov 2026 00:00:00 GMT")
        self.send_header("ETag", '"etag"')
        self.end_headers()
        if body:
            self._body(data[first:stop])

    def _body(self, data: bytes) -> None:
        if self.owner.fault == "drip":
            drip(self.connection, data, self.stop)
        elif self.owner.fault == "truncated":
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
        else:
            self.wfile.write(data)

    def _put(self, data: bytes | None, body: bytes) -> None:
        if data is not None and self.headers.get("If-None-Match") == "*":
            self._status(412)
            return
        self.owner.objects[self.path] = body
        self.send_response(200)
        self.send_header("ETag", '"etag"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _delete(self, names: list[str]) -> None:
        bucket = self.path.partition("?")[0].rstrip("/")
        for name in names:
            self.owner.objects.pop(f"{bucket}/{name}", None)
        deleted = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
        answer = f'<DeleteResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{deleted}</DeleteResult>'.encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def _status(self, code: int) -> None:
        self.send_response(code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def wait_until(condition, seconds: float) -> float:
    """Seconds until the condition held; fails after so many."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > seconds:
            raise AssertionError(f"not within {seconds} s")
        time.sleep(0.01)
    return time.monotonic() - start


def certificate(directory: Path) -> tuple[Path, Path]:
    """(certificate, key) for 127.0.0.1, signed by itself; made with the openssl program."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    cert, key = directory / "cert.pem", directory / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1",
               "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    return cert, key
