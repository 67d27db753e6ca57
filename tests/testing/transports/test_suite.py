"""The conformance suite itself: transports that break one promise, and the cases that fail."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

# Each broken transport is shared memory with one mistake. ``Posted`` is correct: its writes travel
# as files in a folder, and the target stores them when it polls.
TRANSPORTS = """
    import ctypes, os, pickle, secrets, tempfile, threading, time
    from pathlib import Path

    from kvferry.errors import TransportError
    from kvferry.plan.bind import Binding
    from kvferry.protocol.events import WriteFate
    from kvferry.transports import bounds
    from kvferry.transports.base import RemoteMemory, WriteEnded
    from kvferry.transports.shm import ShmTransport


    class Posted(ShmTransport):
        name = "posted"
        supports_write_now = False
        needs_polling = True

        def __init__(self, setup):
            super().__init__(setup)
            self.box = Path(tempfile.mkdtemp(dir=os.environ["MAIL"]))
            self.boxes = {}

        def metadata(self):
            return bytes(self.box) + b"|" + super().metadata()

        def connect(self, metadata):
            box, _, rest = metadata.partition(b"|")
            remote = super().connect(rest)
            self.boxes[remote] = Path(os.fsdecode(box))
            return remote

        def write(self, remote, op, pieces):
            outside = bounds.find_violation(pieces, self._bounds, remote.bounds)
            if outside:
                self._ended.append(WriteEnded(op, WriteFate.FAILED, outside))
                return
            rows = zip(*(column.tolist() for column in pieces.descriptors()), strict=True)
            self.post(self.boxes[remote], "write", (self.box, op, [
                (region, to, ctypes.string_at(self._addresses[source] + at, length))
                for source, at, region, to, length in rows
            ]))

        def post(self, box, kind, content):
            draft = self.box / "draft"
            draft.write_bytes(pickle.dumps(content))
            draft.rename(box / f"{kind}-{secrets.token_hex(8)}")

        def taken(self, kind):
            for mail in self.box.glob(f"{kind}-*"):
                yield pickle.loads(mail.read_bytes())
                mail.unlink()

        def poll(self):
            for sender, op, rows in self.taken("write"):
                for region, to, data in rows:
                    ctypes.memmove(self._addresses[region] + to, data, len(data))
                self.landed(sender, op)
            self._ended += [WriteEnded(op, None) for op in self.taken("landed")]
            return super().poll()

        def landed(self, sender, op):
            self.post(sender, "landed", op)


    class EndsWhenSent(Posted):
        name = "ends-when-sent"

        def write(self, remote, op, pieces):
            super().write(remote, op, pieces)
            self._ended.append(WriteEnded(op, None))

        def landed(self, sender, op):
            pass


    class EarlyEnd(ShmTransport):
        name = "early-end"

        def write_now(self, remote, op, pieces):
            nothing = super().write_now(remote, op, Binding(()))
            threading.Timer(1, super().write_now, (remote, op, pieces)).start()
            return nothing


    class ChecksTooLate(ShmTransport):
        name = "checks-too-late"

        def write_now(self, remote, op, pieces):
            for part in pieces.parts:
                ended = super().write_now(remote, op, Binding((part,)))
                if ended.fate:
                    break
            return ended


    class OneThreadOnly(ShmTransport):
        name = "one-thread-only"

        def write_now(self, remote, op, pieces):
            self.doing = pieces
            time.sleep(0.001)
            return super().write_now(remote, op, self.doing)


    class TellsTwice(ShmTransport):
        name = "tells-twice"

        def write(self, remote, op, pieces):
            super().write(remote, op, pieces)
            self._ended.append(self._ended[-1])


    class ForgetsSome(ShmTransport):
        name = "forgets-some"

        def poll(self):
            return [ended for ended in super().poll() if ended.op != 7]


    class StaysSilent(ShmTransport):
        name = "stays-silent"

        def write(self, remote, op, pieces):
            self.on_completion, kept = (lambda: None), self.on_completion
            super().write(remote, op, pieces)
            self.on_completion = kept


    class TakesAnything(ShmTransport):
        name = "takes-anything"

        def connect(self, metadata):
            try:
                return super().connect(metadata)
            except TransportError:
                return RemoteMemory()


    class ClosesOnce(ShmTransport):
        name = "closes-once"

        def close(self):
            super().close()
            del self._remotes


    class Possessive(ShmTransport):
        name = "possessive"

        def connect(self, metadata):
            self.segments = __import__("msgspec").msgpack.decode(metadata)["segments"]
            return super().connect(metadata)

        def close(self):
            super().close()
            for name in self.__dict__.pop("segments", ()):
                __import__("_posixshmem").shm_unlink(name)
"""

BROKEN = {
    "EndsWhenSent": ["test_ended_writes_have_arrived_if_the_target_does_not_poll"],
    "EarlyEnd": [
        "test_a_later_write_wins",
        "test_ended_writes_have_arrived",
        "test_immediate_writes",
    ],
    "ChecksTooLate": [
        "test_a_piece_outside_its_region_fails_the_write[far away]",
        "test_an_immediate_write_outside_its_region_fails",
    ],
    "OneThreadOnly": ["test_immediate_writes_of_two_threads"],
    "TellsTwice": ["test_a_later_write_wins"],
    "ForgetsSome": ["test_a_peer_that_dies_during_many_writes"],
    "StaysSilent": ["test_a_peer_that_dies_during_many_writes"],
    "TakesAnything": ["test_garbage_metadata_is_refused"],
    "ClosesOnce": ["test_close_without_a_write"],
    "Possessive": ["test_the_end_of_a_source_keeps_its_target_reachable"],
}
SOUND = {
    "Posted": [
        "test_many_writes_in_flight_to_several_peers",
        "test_ended_writes_have_arrived",
        "test_ended_writes_have_arrived_if_the_target_does_not_poll",
        "test_empty_writes",
        "test_two_transports_in_two_threads",
        "test_garbage_metadata_is_refused",
    ]
}


class Case(NamedTuple):
    transport: str
    name: str


def run_cases(folder: Path) -> dict[Case, bool]:
    """Run the chosen cases of all these transports at once; return whether each failed."""
    _install(folder)
    wanted = [
        f"test_them.py::Test{name}::{case}"
        for name, chosen in (BROKEN | SOUND).items()
        for case in chosen
    ]
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--junitxml=results.xml"]
    # Where CI is set, pytest prints long comparisons of what a failing case asserts.
    subprocess.run(
        [*pytest, *wanted],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "MAIL": str(folder), "CI": "true"},
        capture_output=True,
        check=False,
        timeout=200,
    )
    cases = ElementTree.parse(folder / "results.xml").getroot().iter("testcase")
    failed: dict[Case, bool] = {}
    for case in cases:
        key = Case(case.attrib["classname"].split(".Test")[1], case.attrib["name"])
        bad = case.find("failure") is not None or case.find("error") is not None
        failed[key] = failed.get(key, False) or bad
    return failed


def _install(folder: Path) -> None:
    (folder / "ferries.py").write_text(textwrap.dedent(TRANSPORTS))
    info = folder / "ferries-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ferries\nVersion: 1.0\n")
    names = [*BROKEN, *SOUND]
    entries = [f"{_dashed(name)} = ferries:{name}" for name in names]
    (info / "entry_points.txt").write_text("\n".join(["[kvferry.transports]", *entries]))
    tests = ["from kvferry.testing.transports import TransportSuite as Suite"]
    for name in names:
        tests.append(f"class Test{name}(Suite):")
        tests.append(f"    transport = {_dashed(name)!r}")
        tests.append("    patience_s = 4")
    (folder / "test_them.py").write_text("\n".join(tests))
    (folder / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")


def _dashed(name: str) -> str:
    return "".join(f"-{letter.lower()}" if letter.isupper() else letter for letter in name)[1:]


def test_every_broken_promise_fails_its_cases(tmp_path: Path) -> None:
    """One test, because the transports share one run."""
    failed = run_cases(tmp_path)
    assert {case for case, bad in failed.items() if bad} == {
        Case(name, case) for name in BROKEN for case in BROKEN[name]
    }
    sound = {case.name.partition("[")[0] for case in failed if case.transport in SOUND}
    assert sound == {name for names in SOUND.values() for name in names}


def test_only_the_suite_needs_pytest() -> None:
    code = (
        "import sys, kvferry.testing.transports as suite, kvferry.testing.transports.process; "
        "assert suite.binding_of and 'pytest' not in sys.modules; "
        "assert suite.TransportSuite is suite.TransportSuite and 'pytest' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
