"""The status reporter: an endpoint is shown while it runs."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from discovery.parts import wait_until
from telemetry.scenes import Scene

from kvferry.dashboard.client import StatusClient
from kvferry.discovery.http.reporter import StatusReporter
from kvferry.discovery.http.server import DiscoveryServer
from kvferry.ids import Peer
from kvferry.telemetry.status import EndpointStatus, ReportRequest


def test_an_endpoint_is_shown_until_its_reporter_closes() -> None:
    with DiscoveryServer() as server:
        scene = Scene(server.url, {}, {"d": 1})

        def make(request: ReportRequest) -> Future[EndpointStatus]:
            made: Future[EndpointStatus] = Future()
            made.set_result(scene.view("target", "d", 0, 1))
            return made

        def shown() -> list[str]:
            return [one.name for one in StatusClient(server.url).cluster().instances]

        reporter = StatusReporter(server.url, None, Peer("d", 0), 1, make)
        wait_until(lambda: shown() == ["d"])
        reporter.close()
        reporter.close()
        assert shown() == []
        assert "kvferry-status-reporter" not in {each.name for each in threading.enumerate()}
