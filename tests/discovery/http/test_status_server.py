"""The status service of a cluster on a real etcd: reports, the page, commands, doctor, the demo."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest
from cli.doctor.findings import only
from discovery.etcd_cluster import EtcdCluster
from discovery.parts import ENOUGH_S, ask, layout, record, wait_until
from limited import bounded
from router.fakes import site
from telemetry.scenes import Scene

from kvferry.cli.doctor import State, cluster
from kvferry.cli.main import main
from kvferry.dashboard.client import StatusClient, StatusUnavailable
from kvferry.discovery.client import DiscoveryClient
from kvferry.discovery.http.reporter import StatusReporter, follow_status_service
from kvferry.discovery.http.status_server import StatusServer
from kvferry.errors import InputError
from kvferry.ids import Peer
from kvferry.security.keys import ClusterKey
from kvferry.security.tokens import make_token
from kvferry.telemetry.status import ClusterStatus, EndpointStatus, ReportRequest

PREFIXES = (f"status-{number}" for number in count())
SCENE = Scene("", {}, {"d": 1})


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path_factory.mktemp("etcd"), number=1) as running:
        yield running


@pytest.fixture
def url(etcd: EtcdCluster) -> str:
    return etcd.url(next(PREFIXES))


def report(request: ReportRequest) -> Future[EndpointStatus]:
    made: Future[EndpointStatus] = Future()
    made.set_result(SCENE.view("target", "d", 0, 1))
    return made


def reporting(url: str, stack: ExitStack, key: ClusterKey | None = None) -> StatusReporter:
    """Start the reporter of an endpoint ``d/0`` as the endpoint does."""
    client = stack.enter_context(DiscoveryClient(url, key))
    reporter = StatusReporter(key, Peer("d", 0), 1, report)
    stack.callback(reporter.close)
    follow_status_service(client, reporter.report_to)
    return reporter


def status(server: StatusServer) -> ClusterStatus:
    return StatusClient(server.url).cluster()


def names(server: StatusServer) -> list[str]:
    return [one.name for one in status(server).instances]


def test_reports_follow_the_service_to_another_address(url: str) -> None:
    with ExitStack() as stack:
        with StatusServer(url) as first:
            reporter = reporting(url, stack)
            wait_until(lambda: names(first) == ["d"])
        with StatusServer(url) as second:
            assert second.url != first.url
            wait_until(lambda: names(second) == ["d"])
            reporter.close()
            assert names(second) == []


def test_plans_are_drawn_from_reports(url: str) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(StatusServer(url))
        reporting(url, stack)
        wait_until(lambda: names(server) == ["d"])
        assert ask(server.url, "GET", "/kvferry/plan?source=d&target=d").status == 200


def test_commands_find_it_by_discovery(
    url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["top", "--once", "--discovery", url]) == 1
    assert "kvferry serve status" in capsys.readouterr().err
    assert main(["top", "--discovery", url, "--url", "http://127.0.0.1:1"]) == 2
    assert "give one of them" in capsys.readouterr().err
    key = ClusterKey.new()
    key.write(tmp_path / "key")
    words = ["--discovery", url, "--key", str(tmp_path / "key"), "--json"]
    with ExitStack() as stack:
        server = stack.enter_context(StatusServer(url, key=key))
        reporting(url, stack, key)
        client = StatusClient(server.url, make_token(key.http, time.time() + 60))
        wait_until(lambda: len(client.cluster().instances) == 1)
        with pytest.raises(StatusUnavailable, match="token"):
            StatusClient(server.url).cluster()
        assert main(["top", *words]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in shown["instances"]] == ["d"]


def test_doctor_checks_etcd_and_the_status_service(url: str) -> None:
    found = {one.name: one for one in cluster.check_discovery(url, None)}
    assert found["discovery"].state is State.OK
    assert found["status page"].state is State.NOTE
    with StatusServer(url) as server, DiscoveryClient(url) as client:
        wait_until(lambda: [*cluster.check_discovery(url, None)][1].detail == server.url)
        # The probe has left.
        listed = client.instances().result(ENOUGH_S).instances
        assert [one.name for one in listed] == ["status@kvferry"]
    gone = only(cluster.check_discovery("etcd://127.0.0.1:1/k", None))
    assert (gone.state, "etcdctl" in gone.remedy) == (State.PROBLEM, True)


def test_a_service_with_a_page_needs_no_status_service() -> None:
    with pytest.raises(InputError, match="has a page of its own"):
        StatusServer("http://127.0.0.1:7077")
    with pytest.raises(InputError, match="others cannot reach"):
        StatusServer("etcd://127.0.0.1:1/k", "0.0.0.0", key=ClusterKey.new())


@bounded
async def test_a_router_finds_workers_and_the_page_in_etcd(url: str) -> None:
    with ExitStack() as stack:
        stack.enter_context(StatusServer(url))
        reporting(url, stack)
        client = stack.enter_context(DiscoveryClient(url))
        async with site(1, 1) as workers, site(0, 0, discovery=url) as here:
            for name in ("p0", "d0"):
                worker = workers[name]
                about = {"role": worker.role, "http": worker.url, "instance": name}
                one = record(name=f"{name}@http", layout=layout(), metadata=about)
                client.register(one).result(ENOUGH_S)
            await here.until_up("p0")
            await here.until_up("d0")
            names: list[str] = []
            # The endpoint's first report may come after the router's first list.
            while names != ["d"]:
                async with here.http.get(f"{here.url}/kvferry/cluster") as response:
                    names = [one["name"] for one in (await response.json())["instances"]]


def test_the_demo_is_exact_over_etcd(url: str) -> None:
    words = ["--tiny", "--tokens", "4", "--prefill", "tp=1", "--discovery", url, "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "kvferry", "demo", *words],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["token_exact"] is True
