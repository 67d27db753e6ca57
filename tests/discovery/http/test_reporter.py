"""The status reporter: an endpoint is shown while it runs."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from discovery.parts import ENOUGH_S, wait_until
from telemetry.scenes import Scene

from kvferry.dashboard.client import StatusClient
from kvferry.discovery.http.reporter import StatusReporter
from kvferry.discovery.http.server import DiscoveryServer
from kvferry.ids import Peer
from kvferry.telemetry.status import EndpointStatus, ReportRequest


def made_view(request: ReportRequest) -> Future[EndpointStatus]:
    made: Future[EndpointStatus] = Future()
    made.set_result(Scene("", {}, {"d": 1}).view("target", "d", 0, 1))
    return made


def test_a_view_whose_answer_is_missing_is_removed_at_close() -> None:
    stored, answered, removed = threading.Event(), threading.Event(), threading.Event()

    class Service(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            stored.set()
            answered.wait()

        def do_DELETE(self) -> None:
            removed.set()
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as service:
        threading.Thread(target=service.serve_forever).start()
        reporter = StatusReporter(None, Peer("d", 0), 1, made_view)
        reporter.report_to(f"http://127.0.0.1:{service.server_address[1]}")
        assert stored.wait(ENOUGH_S)
        reporter.close()
        answered.set()
        service.shutdown()
    assert removed.is_set()


def test_an_endpoint_is_shown_until_its_reporter_closes() -> None:
    with DiscoveryServer() as server:
        scene = Scene(server.url, {}, {"d": 1})

        def make(request: ReportRequest) -> Future[EndpointStatus]:
            made: Future[EndpointStatus] = Future()
            made.set_result(scene.view("target", "d", 0, 1))
            return made

        def shown() -> list[str]:
            return [one.name for one in StatusClient(server.url).cluster().instances]

        reporter = StatusReporter(None, Peer("d", 0), 1, make)
        reporter.report_to(server.url)
        wait_until(lambda: shown() == ["d"])
        reporter.close()
        reporter.close()
        assert shown() == []
        assert "kvferry-status-reporter" not in {each.name for each in threading.enumerate()}
