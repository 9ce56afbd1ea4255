"""A proxy before a real S3 server that does to requests what networks and busy stores do."""

import random
import re
import socket
import socketserver
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

ERROR = "<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>"
# busy, expired: answers of the store. bad_gateway: that of a load balancer before it. reset_*: the
# connection breaks in the middle of the request or the answer. short_answer: it ends there in good
# order. lost_answer: the store did it, and nobody hears of it. damaged: a byte of what is put.
FAULTS = (
    "busy", "bad_gateway", "reset_request", "reset_answer", "short_answer", "lost_answer",
    "damaged", "expired",
)  # fmt: skip


@dataclass
class FaultProxy:
    """Passes requests on, or spoils them.

    Args:
        upstream: Host and port of the server.
        choose: Method and target of a request -> name of a fault, "stall:SECONDS" before or
            "stall_answer:SECONDS" in the middle of the answer, "refuse:STATUS:CODE", or "".
    """

    upstream: tuple[str, int]
    choose: Callable[[str, str], str]
    counts: Counter[str] = field(default_factory=Counter)
    # Method, target and Range of every request; and how many connections brought them.
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    connections: int = 0
    endpoint: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def gets(self, ending: str) -> list[tuple[str, str]]:
        """Give target and Range of the GET requests for objects whose names end so."""
        paths = [(target.partition("?")[0], span) for method, target, span in self.requests
                 if method == "GET"]  # fmt: skip
        return [(target, span) for target, span in paths if target.endswith(ending)]

    def connected(self) -> None:
        with self._lock:
            self.connections += 1

    def fault(self, method: str, target: str, span: str) -> str:
        with self._lock:
            self.requests.append((method, target, span))
            fault = self.choose(method, target)
            self.counts[fault.partition(":")[0]] += 1
            return fault


class _Handler(socketserver.BaseRequestHandler):
    proxy: FaultProxy

    def handle(self) -> None:
        self.proxy.connected()
        try:
            while self._one_request():
                pass
        except OSError:
            return

    def _one_request(self) -> bool:
        """Handle a request; True: the connection can serve another one."""
        head, rest = _read_head(self.request)
        if not head:
            return False
        lines = head.decode("latin-1").split("\r\n")
        method, target, _ = lines[0].split(" ", 2)
        fields = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines[1:])
        }
        if "100-continue" in fields.get("expect", "").lower():
            self.request.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        fault = self.proxy.fault(method, target, fields.get("range", ""))
        wanted = int(fields.get("content-length", 0))
        if fault == "reset_request":
            _read(self.request, rest, wanted // 2)
            return self._reset()
        body = _read(self.request, rest, wanted)
        if fault == "busy":
            return self._answer(503, _error("SlowDown"))
        if fault == "bad_gateway":
            return self._answer(502, "<html><body>502 Bad Gateway</body></html>")
        if fault == "expired":
            return self._answer(400, _error("ExpiredToken"))
        if fault.startswith("refuse:"):
            _, status, code = fault.split(":")
            return self._answer(int(status), _error(code))
        if fault.startswith("stall:"):
            time.sleep(float(fault.partition(":")[2]))
        if fault == "damaged" and method == "PUT":
            body = body[:-1] + bytes([body[-1] ^ 1])
        answer = self._ask(lines, body)
        if fault == "lost_answer":
            return self._reset()
        answer = _kept_open(answer)
        head_bytes = answer.index(b"\r\n\r\n") + 4
        if fault in ("reset_answer", "short_answer"):
            self.request.sendall(answer[: head_bytes + (len(answer) - head_bytes) // 2])
            return self._reset() if fault == "reset_answer" else False
        sent = 0
        if fault.startswith("stall_answer:"):
            sent = head_bytes + (len(answer) - head_bytes) // 2
            self.request.sendall(answer[:sent])
            time.sleep(float(fault.partition(":")[2]))
        self.request.sendall(answer[sent:])
        return True

    def _ask(self, lines: list[str], body: bytes) -> bytes:
        # What is signed passes unchanged, the host too: the server checks what it is sent.
        kept = [n for n in lines if not n.lower().startswith(("expect:", "connection:")) and n]
        head = "\r\n".join([*kept, "Connection: close", "", ""]).encode("latin-1")
        with socket.create_connection(self.proxy.upstream) as server:
            server.sendall(head + body)
            parts = []
            while part := server.recv(1 << 16):
                parts.append(part)
        return b"".join(parts)

    def _answer(self, status: int, text: str) -> bool:
        head = f"HTTP/1.1 {status} x\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n"
        self.request.sendall((head + text).encode())
        return False

    def _reset(self) -> bool:
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.request.close()
        return False


def _kept_open(answer: bytes) -> bytes:
    """Take away the server's word that it closes the connection: ours stays."""
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:")]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def _error(code: str) -> str:
    return ERROR.format(code=code)


def _read_head(client: socket.socket) -> tuple[bytes, bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        part = client.recv(1 << 16)
        if not part:
            return b"", b""
        data += part
    head, _, rest = data.partition(b"\r\n\r\n")
    return head, rest


def _read(client: socket.socket, begun: bytes, wanted: int) -> bytes:
    parts, size = [begun], len(begun)
    while size < wanted:
        part = client.recv(1 << 16)
        if not part:
            break
        parts.append(part)
        size += len(part)
    return b"".join(parts)


@contextmanager
def fault_proxy(
    endpoint: str,
    choose: Callable[[str, str], str],
    *,
    certificate: Path | None = None,
    port: int = 0,
) -> Iterator[FaultProxy]:
    """Run a proxy before the server at `endpoint`.

    Args:
        endpoint: URL of the server.
        choose: As in FaultProxy.
        certificate: PEM file with key and certificate: the proxy then speaks TLS.
        port: Where to listen; 0: anywhere.
    """
    parts = urlsplit(endpoint)
    assert parts.hostname
    assert parts.port
    proxy = FaultProxy((parts.hostname, parts.port), choose)
    handler = type("Handler", (_Handler,), {"proxy": proxy})
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if certificate:
        context.load_cert_chain(certificate)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        allow_reuse_address = True
        request_queue_size = 64

        def finish_request(self, request, client_address):
            if certificate:
                try:
                    request = context.wrap_socket(request, server_side=True)
                except OSError:  # the client does not trust us
                    return
            super().finish_request(request, client_address)
            if certificate:
                request.close()

    with Server(("127.0.0.1", port), handler) as server:
        scheme = "https" if certificate else "http"
        proxy.endpoint = f"{scheme}://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            server.shutdown()
            thread.join()


def first(count: int, fault: str) -> Callable[[str, str], str]:
    """Spoil the first requests."""
    left = [count]

    def choose(method: str, target: str) -> str:
        left[0] -= 1
        return fault if left[0] >= 0 else ""

    return choose


def each_once(fault: str) -> Callable[[str, str], str]:
    """Spoil every request once; its repetition passes. An upload's parts count as different."""
    seen: set[tuple[str, str]] = set()

    def choose(method: str, target: str) -> str:
        request = (method, re.sub("uploadId=[^&]*", "uploadId", target))
        if request in seen:
            return ""
        seen.add(request)
        return fault

    return choose


def sometimes(
    seed: int, share: float, faults: tuple[str, ...] = FAULTS
) -> Callable[[str, str], str]:
    """Spoil a share of the requests, in bursts of one to three; credentials expire once.

    Each kind has its turn before one comes again.
    """
    rng = random.Random(seed)
    burst: list[str] = []
    turns: list[str] = list(faults)
    rng.shuffle(turns)

    def choose(method: str, target: str) -> str:
        if not burst and rng.random() < share:
            fault = turns.pop(0)
            if fault == "expired":
                return fault
            turns.append(fault)
            burst.extend([fault] * rng.randint(1, 3))
        return burst.pop() if burst else ""

    return choose
