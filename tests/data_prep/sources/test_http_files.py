import pickle
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from data_prep.sources.http_files import ATTEMPTS, HttpFiles
from data_prep.verdict import BadInputError
from vitscale.config.errors import VitscaleError

BODY = bytes(range(256)) * 500


class Scripted(BaseHTTPRequestHandler):
    """Answers with what the path's script says: one word a request, the last one for ever."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        script = self.path.strip("/").split("-")
        key = f"{self.command} {self.path}"
        with self.server.lock:
            number = self.server.counts[key] = self.server.counts.get(key, 0) + 1
        self.server.agents.add(self.headers["User-Agent"])
        self.server.peers.add(self.client_address)
        word = script[min(number, len(script)) - 1]
        if word == "reset":
            self.close_connection = True
            return
        if word == "loop":
            self.send_response(302)
            self.send_header("Location", self.path)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if word == "moved":
            self.send_response(301)
            self.send_header("Location", "/ok")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if word == "wait":
            self.send_response(429)
            self.send_header("Retry-After", "1")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200 if not word.isdecimal() else int(word))
        body = BODY if not word.isdecimal() else b"no"
        if word == "unsized":
            self.close_connection = True
            self.send_header("Connection", "close")
        else:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[: len(body) // 2] if word == "short" else body)
        if word == "short":
            self.close_connection = True


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    server.lock, server.counts, server.agents, server.peers = threading.Lock(), {}, set(), set()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def files():
    return pickle.loads(pickle.dumps(HttpFiles(first_pause_s=0.001)))


def url(server, script):
    return f"http://127.0.0.1:{server.server_port}/{script}"


@pytest.mark.parametrize(
    ("script", "requests"),
    [
        ("ok", 1),
        ("unsized", 1),
        ("moved", 1),
        ("503-ok", 2),
        ("429-500-ok", 3),
        ("reset-ok", 2),
        ("short-short-ok", 3),
    ],
)
def test_whole_bodies_come_whatever_happens_on_the_way(server, files, script, requests):
    assert files.read(url(server, script)) == BODY

    assert server.counts[f"GET /{script}"] == requests
    assert server.agents == {"vitscale"}


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("404", "^missing_file: HTTP 404$"),
        ("410", "^missing_file: HTTP 410$"),
        ("403", "^missing_file: HTTP 403$"),
        ("503-404", "^missing_file: HTTP 404$"),
        ("204", "^missing_file: HTTP 204$"),
        ("loop", "^missing_file: more than 5 redirects$"),
    ],
)
def test_what_the_server_denies_fails_that_input(server, files, script, said):
    with pytest.raises(BadInputError, match=said):
        files.read(url(server, script))


@pytest.mark.parametrize(
    ("script", "said"),
    [("503", "HTTP 503"), ("short", "IncompleteRead|of 128000 bytes"), ("reset", "RemoteDisc")],
)
def test_an_outage_is_no_verdict(server, files, script, said):
    with pytest.raises(VitscaleError, match=rf"after {ATTEMPTS} tries: .*({said})"):
        files.read(url(server, script))

    assert server.counts[f"GET /{script}"] == ATTEMPTS


def test_a_server_that_is_not_there_is_named(server, files):
    address = url(server, "x").replace(str(server.server_port), "1")

    with pytest.raises(VitscaleError, match=r"127\.0\.0\.1:1/x after"):
        files.read(address)


@pytest.mark.parametrize("address", ["http://", "http://[bad", "http://a:port/x"])
def test_what_is_no_address_fails_that_input(files, address):
    with pytest.raises(BadInputError, match="missing_file: not an address"):
        files.read(address)


def test_the_server_says_how_long_to_wait(server, files):
    start = time.monotonic()

    assert files.read(url(server, "wait-ok")) == BODY

    assert time.monotonic() - start > 0.4


def test_endless_bodies_are_cut_off(server):
    files = HttpFiles(first_pause_s=0.001, max_body_bytes=1000)

    with pytest.raises(BadInputError, match="too_large: more than 1000 bytes"):
        files.read(url(server, "ok"))


@pytest.mark.parametrize(
    ("script", "size"),
    [("ok", len(BODY)), ("moved", len(BODY)), ("500-ok", len(BODY)), ("unsized", None),
     ("405", None), ("403", None)],
)  # fmt: skip
def test_sizes_are_asked_for_without_the_body(server, files, script, size):
    assert files.size(url(server, script)) == size

    assert not [key for key in server.counts if key.startswith("GET")]


def test_sizes_of_what_is_not_there(server, files):
    with pytest.raises(BadInputError, match=r"^missing_file: HTTP 404$"):
        files.size(url(server, "404"))
    with pytest.raises(VitscaleError, match="HTTP 502"):
        files.size(url(server, "502"))


def test_connections_are_kept(server, files):
    for _ in range(20):
        files.read(url(server, "ok"))

    assert len(server.peers) == 1
