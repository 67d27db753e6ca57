"""A runner with its scripted machine, and the actions and events of its tests."""

from __future__ import annotations

from typing import Any

from endpoint.scripted_machine import (
    ME,
    PLAN,
    RecordingPorts,
    ScriptedMachine,
)

from kvferry.endpoint.runner.runner import (
    SourcePorts,
    SourceRunner,
    TargetPorts,
    TargetRunner,
)
from kvferry.ids import Generation, Op, Peer, Session
from kvferry.plan import Request
from kvferry.protocol.events import (
    Action,
    Connect,
    Disconnect,
    Disconnected,
    Event,
    Send,
    Tick,
    TransferRequest,
    Write,
)
from kvferry.protocol.messages import (
    Arrived,
    Body,
    Envelope,
)

PEER, OTHER = Peer("decode", 0), Peer("decode", 1)
LIFE, NEXT_LIFE = 7, 8
ONE, TWO, THREE = (Session(LIFE, number) for number in (1, 2, 3))
REQUEST = Request(1)
LEAST_S = 1.0


class Bench:
    """A runner with its scripted machine and recording ports."""

    def __init__(self, script: ScriptedMachine | None = None) -> None:
        self.script = script or ScriptedMachine()
        self.ports = RecordingPorts()
        machine: Any = self.script
        self.runner: Any = (
            TargetRunner(machine, TargetPorts(*[self.ports] * 4))
            if machine.exposed
            else SourceRunner(machine, SourcePorts(*[self.ports] * 4))
        )

    def do(self, *actions: Action, at: float = 0.0) -> list[tuple[str, object]]:
        """Let the machine perform these actions. Return the calls of the ports."""
        return self.take(Tick(), *actions, at=at)

    def take(self, event: Event, *answer: Action, at: float = 0.0) -> list[tuple[str, object]]:
        self.script.answers[event] = list(answer)
        self.ports.asked.clear()
        self.runner.take(event, at)
        return list(self.ports.asked)

    def meet(self, session: Session = ONE, peer: Peer = PEER, life: int = LIFE) -> None:
        self.do(Connect(peer, life, session, b"metadata"))

    def fly(self, op: int, session: Session = ONE) -> None:
        self.do(write(op, session))


def frame(body: Body, session: Session = ONE) -> Envelope:
    return Envelope(ME, 1, session, 1, body)


def say(body: Body, peer: Peer = PEER) -> Send:
    return Send(peer, frame(body))


def note(op: int) -> Arrived:
    return Arrived(f"room-{op}", Generation(1), ())


def write(op: int, session: Session = ONE) -> Write:
    return Write(Op(op), transfer(op, session), (), frame(note(op), session))


def transfer(op: int, session: Session = ONE) -> TransferRequest:
    return TransferRequest(f"room-{op}", session, Generation(1), 0, PEER, PLAN, REQUEST, ())


def drop(session: Session = ONE) -> Disconnect:
    return Disconnect(session)


def proof(session: Session = ONE) -> Disconnected:
    return Disconnected(session)
