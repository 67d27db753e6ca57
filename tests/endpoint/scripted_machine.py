"""A machine with scripted actions, and ports that record their calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import ClassVar

from kvferry.config import ProtocolConfig
from kvferry.endpoint.runner.sessions import SessionRecord
from kvferry.ids import Op, Peer, Room, Session
from kvferry.layout import Layout, Parallel, attention
from kvferry.plan import reshard
from kvferry.protocol.events import (
    Action,
    Choose,
    Connect,
    Event,
    Gather,
    LookUp,
    Post,
    Prove,
    Report,
    Scatter,
    Write,
)
from kvferry.protocol.links import Link
from kvferry.protocol.messages import Envelope
from kvferry.protocol.outcome import Status

ME = Peer("prefill", 0)
LAYOUT = Layout(attention(layers=1, kv_heads=1, head_dim=1), Parallel(), page_tokens=1)
PLAN = reshard(LAYOUT, LAYOUT)
# The shortest timer is a quarter of resend_s, unless a test makes another one shorter.
TIMES = ProtocolConfig(
    resend_s=4.0, status_poll_s=5.0, heartbeat_s=6.0, credit_patience_s=7.0, silence_s=60.0
)


class ScriptedMachine:
    """A machine whose actions and timers a test sets."""

    exposed: ClassVar[bool] = False
    num_quarantined = 0
    me = ME
    layout = LAYOUT
    incarnation = 1

    def __init__(self, config: ProtocolConfig = TIMES) -> None:
        self.config = config
        self.links: dict[Session, Link] = {}
        self.counts: Counter[str] = Counter()
        self.heard: list[Event] = []
        self.answers: dict[Event, list[Action]] = {}
        self.timers: list[float] = []
        self.breaks_at: Event | None = None

    def handle(self, event: Event, now: float) -> list[Action]:
        self.heard.append(event)
        if event == self.breaks_at:
            raise ZeroDivisionError
        return self.answers.pop(event, [])

    def status(self, room: Room) -> Status | None:
        return None

    def wakeup(self) -> float | None:
        return min(self.timers, default=None)


class ExposedMachine(ScriptedMachine):
    """A scripted machine whose peers write into its memory."""

    exposed: ClassVar[bool] = True


class RecordingPorts:
    """All ports in one. Records its calls; ``on_write`` and ``on_report`` may answer at once."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, object]] = []
        self.on_write: Callable[[Write], None] = lambda _: None
        self.on_report: Callable[[Room], None] = lambda _: None

    def send(self, peer: Peer, envelope: Envelope) -> None:
        self.asked.append(("send", envelope.body))

    def connect(self, action: Connect) -> None:
        self.asked.append(("connect", action.session))

    def choose(self, action: Choose) -> None:
        self.asked.append(("choose", action.ticket))

    def write(self, action: Write) -> None:
        self.asked.append(("write", action.op))
        self.on_write(action)

    def gather(self, action: Gather) -> None:
        self.asked.append(("gather", action.op))

    def post_gathered(self, action: Post) -> None:
        self.asked.append(("post", (action.op, action.slot)))

    def look_up(self, action: LookUp) -> None:
        self.asked.append(("look up", action.room))

    def discard(self, op: Op) -> None:
        self.asked.append(("discard", op))

    def cut(self, session: Session) -> None:
        self.asked.append(("cut", session))

    def forget(self, session: Session) -> None:
        self.asked.append(("forget", session))

    def scatter(self, action: Scatter) -> None:
        self.asked.append(("scatter", action.op))

    def prove(self, action: Prove) -> None:
        self.asked.append(("prove", action.op))

    def start_probing(self, record: SessionRecord) -> None:
        self.asked.append(("start_probing", record.life))

    def stop_probing(self, record: SessionRecord) -> None:
        self.asked.append(("stop_probing", record.life))

    def hint_death(self, record: SessionRecord) -> None:
        self.asked.append(("hint_death", (record.peer, record.incarnation, record.metadata)))

    def report(self, action: Report) -> None:
        self.asked.append(("report", action.room))
        self.on_report(action.room)

    def release(self, room: Room) -> None:
        self.asked.append(("release", room))
