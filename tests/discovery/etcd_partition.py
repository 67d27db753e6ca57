"""A client of an etcd cluster whose members are in networks of their own.

Run as ``-m discovery.etcd_partition FOLDER`` in a new network namespace. Each of three members has
a network namespace, joined to a bridge by a virtual cable. The leader's cable is cut and mended.
Prints the views that a watcher saw, as a JSON document.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from threading import Event
from urllib.error import URLError
from urllib.request import Request, urlopen

from discovery.etcd_cluster import member_command
from msgspec.structs import replace

from kvferry.discovery.client import DiscoveryClient
from kvferry.discovery.records import InstanceView
from kvferry.testing.discovery import ENOUGH_S, NAME, RECORDS, lives

NET = "10.202.1"
NUMBER = 3
PATIENCE_S = 60.0


def shell(words: str) -> None:
    subprocess.run(words.split(), check=True)


def address(number: int) -> str:
    return f"{NET}.{10 + number}"


def start_member(folder: Path, number: int) -> subprocess.Popen[bytes]:
    """Start a member in a network of its own. It waits for its cable."""
    client, peer = f"http://{address(number)}:2379", f"http://{address(number)}:2380"
    cluster = ",".join(f"m{each}=http://{address(each)}:2380" for each in range(NUMBER))
    words = member_command(folder, f"m{number}", client, peer, cluster)
    process = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", 'echo apart; read -r _; exec "$@"', "sh", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=(folder / f"m{number}.log").open("wb"),
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.readline()
    shell(f"ip link add v{number} type veth peer name e{number} netns {process.pid}")
    shell(f"ip link set v{number} master bridge0 up")
    inside = f"nsenter --net --target {process.pid} ip"
    shell(f"{inside} addr add {address(number)}/24 dev e{number}")
    shell(f"{inside} link set e{number} up")
    shell(f"{inside} link set lo up")
    process.stdin.write(b"\n")
    process.stdin.close()
    return process


def leads(number: int) -> bool:
    url = f"http://{address(number)}:2379/v3/maintenance/status"
    try:
        with urlopen(Request(url, b"{}"), timeout=2.0) as answer:
            status = json.load(answer)
    except (URLError, OSError):
        return False
    return bool(status.get("leader", "0") == status["header"]["member_id"])


def wait_for_leader(among: set[int]) -> int:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for number in among:
            if leads(number):
                return number
        Event().wait(0.1)
    raise AssertionError("no member leads")


def main(folder: Path) -> None:
    """Register, cut the leader off, register anew, mend, register anew."""
    shell("ip link set lo up")
    shell("ip link add bridge0 type bridge")
    shell(f"ip addr add {NET}.1/24 dev bridge0")
    shell("ip link set bridge0 up")
    members = [start_member(folder, number) for number in range(NUMBER)]
    try:
        leader = wait_for_leader(set(range(NUMBER)))
        # The leader comes first, so the client uses the member that will be cut off.
        order = [leader, *(number for number in range(NUMBER) if number != leader)]
        url = f"etcd://{','.join(f'{address(number)}:2379' for number in order)}/k"
        seen: list[list[int | None]] = []
        came = Event()

        def hear(view: InstanceView | None) -> None:
            seen.append(lives(view))
            came.set()

        def wait_for(*incarnations: int) -> None:
            while not seen or seen[-1] != list(incarnations):
                came.clear()
                assert came.wait(PATIENCE_S), seen

        with DiscoveryClient(url) as owner, DiscoveryClient(url) as follower:
            follower.watch(NAME, hear)
            for record in RECORDS:
                owner.register(record, 60.0).result(ENOUGH_S)
            wait_for(100, 101)
            shell(f"ip link set v{leader} down")
            wait_for_leader(set(range(NUMBER)) - {leader})
            owner.register(replace(RECORDS[1], incarnation=7), 60.0).result(ENOUGH_S)
            wait_for(100, 7)
            shell(f"ip link set v{leader} up")
            wait_for_leader(set(range(NUMBER)))
            owner.register(replace(RECORDS[0], incarnation=8), 60.0).result(ENOUGH_S)
            wait_for(8, 7)
        print(json.dumps(seen))
    finally:
        for member in members:
            member.kill()
            member.wait()


if __name__ == "__main__":
    assert os.geteuid() == 0
    main(Path(sys.argv[1]))
