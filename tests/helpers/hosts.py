"""Hosts on one machine: network namespaces behind a bridge, with links that can be cut."""

import asyncio
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@dataclass
class Host:
    """A network namespace; run things in it with `command`."""

    name: str
    # The end of its cable that is on the bridge.
    link: str

    def command(self, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *words]

    def cut(self) -> None:
        _ip("link", "set", self.link, "down")

    def mend(self) -> None:
        _ip("link", "set", self.link, "up")

    @property
    def received(self) -> int:
        """Bytes that came over the cable to this host."""
        return int(Path(f"/sys/class/net/{self.link}/statistics/tx_bytes").read_text())


@dataclass
class Network:
    """Hosts that reach one server."""

    hosts: list[Host]
    endpoint: str


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


class _Forwarder:
    """Accepts connections at an address of the bridge and passes them to the server."""

    def __init__(self, address: str, port: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(_pump(reader, back), _pump(there, writer))

        begun = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(serve, address, 0), self._loop
        )
        self._server = begun.result(10)
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        async def end() -> None:
            self._server.close()
            tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def network(s3_server) -> Iterator[Network]:
    """Two hosts that see nothing but the S3 server."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2's ip")
    tag, net = f"vt{os.getpid() % 10_000}", f"10.77.{os.getpid() % 250}"
    bridge, hosts = f"{tag}br", []
    try:
        _ip("link", "add", bridge, "type", "bridge")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network bridge can be made here: {error.stderr.strip()}")
    forwarder = None
    try:
        _ip("addr", "add", f"{net}.254/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for number in (1, 2):
            host = Host(f"{tag}h{number}", f"{tag}v{number}")
            _ip("netns", "add", host.name)
            hosts.append(host)
            _ip("link", "add", host.link, "type", "veth", "peer", "name", "eth0",
                "netns", host.name)  # fmt: skip
            _ip("link", "set", host.link, "master", bridge, "up")
            for words in (
                ["addr", "add", f"{net}.{number}/24", "dev", "eth0"],
                ["link", "set", "eth0", "up"],
                ["link", "set", "lo", "up"],
            ):
                _ip("-n", host.name, *words)
        port = int(s3_server.endpoint.rpartition(":")[2])
        forwarder = _Forwarder(f"{net}.254", port)
        yield Network(hosts, f"http://{net}.254:{forwarder.port}")
    finally:
        if forwarder is not None:
            forwarder.close()
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.name], check=False)
        subprocess.run(["ip", "link", "del", bridge], check=False)
