"""Server processes: started together, watched while they load, and always ended."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

STOP_S = 5.0
_PROBE_S = 2.0


class Spec(NamedTuple):
    """A server to start. ``bootstrap`` is the port where decode finds an SGLang prefill."""

    name: str
    command: Sequence[str]
    port: int
    environment: Mapping[str, str]
    health: str = "/health"
    bootstrap: int = 0


class Server:
    """A process with an HTTP port and a log. ``failure`` says why it is not up."""

    def __init__(self, spec: Spec, log: Path) -> None:
        self.name, self.port, self.bootstrap = spec.name, spec.port, spec.bootstrap
        self.url = f"http://127.0.0.1:{spec.port}"
        self.log = log
        self.is_up = False
        self.failure: str | None = None
        self.start_s = 0.0
        self._health = spec.health
        self._began = time.monotonic()
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                spec.command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=dict(spec.environment),
                # A group, to be ended together; not a session, which would outlive the command.
                process_group=0,
            )

    def look(self) -> None:
        """Note whether the server is up or has ended."""
        if self.process.poll() is not None:
            self.is_up = False
            self.failure = f"it ended with status {self.process.returncode}: {self.complaint()}"
        elif self._answers():
            self.is_up = True
            self.start_s = time.monotonic() - self._began

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_PROBE_S)
        try:
            connection.request("GET", self._health)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def complaint(self) -> str:
        """Return the log's last errors, or its last lines."""
        lines = [line[-300:] for line in self.log_lines()]
        words = ("Error", "error:", "Exception", "assert")
        return " | ".join(
            [line for line in lines if any(word in line for word in words)][-3:] or lines[-3:]
        )

    def log_lines(self, *words: str) -> list[str]:
        """Return the log's lines that contain all words."""
        lines = self.log.read_text(errors="replace").splitlines()
        return [line for line in lines if all(word in line for word in words)]

    def signal(self, number: int) -> None:
        """Send a signal to the server's process group."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def wait_until_ended(self, deadline: float) -> None:
        """Wait for the first process; kill the group at the deadline, and what is left of it."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, deadline - time.monotonic()))
        self.signal(signal.SIGKILL)
        self.process.wait()
        self.is_up = False


class Servers:
    """The servers of a run, by name. Its exit ends them all."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        logs.mkdir(parents=True, exist_ok=True)
        self._servers: dict[str, Server] = {}
        # Seconds until each server was up, or why it did not start.
        self.starts: dict[str, float | str] = {}

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop(list(self._servers))

    def __getitem__(self, name: str) -> Server:
        return self._servers[name]

    def start(self, specs: Iterable[Spec]) -> None:
        """Start servers at the same time; ``wait`` for them."""
        for spec in specs:
            self._servers[spec.name] = Server(spec, self._logs / f"{spec.name}.log")

    def wait(self, timeout_s: float) -> None:
        """Wait until every server is up or has failed, and print which."""
        deadline = time.monotonic() + timeout_s
        waiting = [s for s in self._servers.values() if not s.is_up and s.failure is None]
        while waiting:
            for server in waiting:
                server.look()
                if server.is_up:
                    self.starts[server.name] = round(server.start_s, 1)
                    say(f"{server.name} is up after {server.start_s:.0f} s")
                elif server.failure is None and time.monotonic() > deadline:
                    server.failure = f"not up after {timeout_s:.0f} s: {server.complaint()}"
                if server.failure is not None:
                    self.starts[server.name] = server.failure
                    say(f"{server.name} FAILED to start: {server.failure}")
                    server.signal(signal.SIGKILL)
            waiting = [s for s in waiting if not s.is_up and s.failure is None]
            if waiting:
                threading.Event().wait(0.2)

    def names(self) -> list[str]:
        """Return the servers that have not been stopped."""
        return list(self._servers)

    def stop(self, names: Iterable[str]) -> None:
        """End servers: politely, then by force."""
        stopped = [self._servers.pop(name) for name in names]
        for server in stopped:
            server.signal(signal.SIGCONT)
            server.signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_S
        for server in stopped:
            server.wait_until_ended(deadline)


_BEGAN = time.monotonic()


def say(text: str) -> None:
    """Print progress with the seconds since the start."""
    print(f"[{time.monotonic() - _BEGAN:6.1f}] {text}", flush=True)
