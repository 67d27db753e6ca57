"""Stories and views: what two endpoints tell of their rooms, and that it stays bounded."""

from __future__ import annotations

import gc
import threading

from runtime.test_pair import AT_ONCE, WAIT_S, pair_by

from kvferry.ids import Generation, Peer, Session
from kvferry.layout.intervals import Span
from kvferry.observe.steps import MAX_STORY_STEPS, Moment, RoomStory
from kvferry.observe.views import Wishes
from kvferry.observe.waterfall import join
from kvferry.plan.choose import Path
from kvferry.protocol.codec import decode, encode
from kvferry.protocol.events import Open, Push, Received
from kvferry.protocol.messages import Accept, Envelope, Heartbeat
from kvferry.protocol.outcome import Done, Failure, FailureCode
from kvferry.runtime.owner.stories import StoryBook
from kvferry.runtime.telemetry.tags import NOBODYS, RoomTag

PEER = Peer("d", 3)


def accept(room: int) -> Received:
    return Received(Envelope(PEER, 1, Session(1, 1), 1, Accept(room, Generation(1))))


def told(book: StoryBook, name: str) -> RoomStory | None:
    return next(book.stories(Peer("p", 0), "source", [name]), None)


def moments(story: RoomStory | None) -> list[str]:
    assert story is not None
    return [str(step.step) for step in story.steps]


def test_the_oldest_steps_are_forgotten() -> None:
    book = StoryBook(8)
    for room in range(100):
        book.heard(accept(room))
    assert len(book) == 8
    assert told(book, "91") is None
    assert moments(told(book, "92")) == ["accepted"]


def test_of_a_long_room_its_beginning_and_its_end_are_told() -> None:
    book = StoryBook(10_000)
    book.asked(Open("r", 1.0), RoomTag("req", "00-1-2-01"))
    for i in range(1000):
        book.asked(Push("r", Span(i, i + 1)))
    book.ended("r", Done(), 0.0, NOBODYS)
    story = told(book, "r")
    assert story is not None
    assert (len(story.steps), story.left_out) == (MAX_STORY_STEPS, 1002 - MAX_STORY_STEPS)
    assert (story.steps[0].step, story.steps[-1].step) == (Moment.OPENED, Moment.DONE)
    assert (story.request, story.traceparent) == ("req", "00-1-2-01")


def test_nothing_is_kept_that_python_s_collector_has_to_look_at() -> None:
    book = StoryBook(100)
    book.heard(accept(1))
    book.said(PEER, accept(1).envelope)
    book.asked(Open(1, 1.0), RoomTag("req", ""))
    book.asked(Push(1, Span(0, 4)))
    book.wrote(1, PEER, Path.RUNS, 10, 0.1)
    book.ended(1, Done(), 0.0, NOBODYS)
    gc.collect()
    assert not any(gc.is_tracked(step) for step in book._ring)


def test_nothing_is_kept_where_nothing_is_wanted() -> None:
    book = StoryBook(0)
    book.heard(accept(1))
    book.ended(1, Failure.of(FailureCode.DEADLINE, "late"), 0.0, NOBODYS)
    assert (len(book), len(book.failures), book.slowest(0.0, 8)) == (0, 0, [])


def test_the_slowest_come_first() -> None:
    book = StoryBook(100)
    for begun in (-3.0, -1.0, -2.0):
        book.ended(f"{begun:g}", Done(), begun, NOBODYS)
    assert [ended.room for ended in book.slowest(0.0, 2)] == ["-3", "-2"]


def test_a_heartbeat_of_an_earlier_peer_is_still_one() -> None:
    """Its fields may be left out: who lacks them is understood."""
    frame = Envelope(PEER, 1, Session(1, 1), 1, Heartbeat(1.5, 2.5, 3.5))
    assert decode(encode(frame)) == frame
    bare = Envelope(PEER, 1, Session(1, 1), 1, Heartbeat())
    old = encode(bare).replace(b"\x94\xa9heartbeat\xc0\xc0\xc0", b"\x91\xa9heartbeat")
    assert len(old) == len(encode(bare)) - 3
    assert decode(old) == bare


def test_two_endpoints_tell_one_story() -> None:
    with pair_by(AT_ONCE) as pair:
        out = pair.source.open(7, request="req-7")
        into = pair.target.receive(7, prefill=pair.view, tokens=8, pages=[1, 2])
        out.push((0, 8), [3, 4])
        out.close()
        assert isinstance(into.wait(WAIT_S), Done)
        out.wait_released(WAIT_S)
        stories = [pair.source.story(7), pair.target.story(7)]
        views = [each.view(Wishes(layout=True)).result(WAIT_S) for each in pair[:2]]
        assert pair.source.story(8) is None
    known = [story for story in stories if story is not None]
    assert {"opened", "offered", "pushed", "written", "finished", "closed", "done"} <= set(
        moments(known[0])
    )
    assert {"asked", "offered", "closed", "done"} <= set(moments(known[1]))
    whole = join(known, {})
    assert (whole.outcome, whole.request, whole.room) == ("done", "req-7", "7")
    assert sum(bar.num_bytes for bar in whole.bars) == sum(
        sent.num_bytes for link in views[0].links for sent in link.sent
    )
    assert [(view.role, view.num_done, view.num_open) for view in views] == [
        ("source", 1, 0),
        ("target", 1, 0),
    ]
    assert views[0].layout == views[1].layout
    assert views[0].slow[0].request == "req-7"


def test_a_failure_is_told_in_words() -> None:
    with pair_by(AT_ONCE) as pair:
        out = pair.source.open("gone", request="req-8")
        out.abort()
        out.wait_released(WAIT_S)
        view = pair.source.view().result(WAIT_S)
        story = pair.source.story("gone")
    (failure,) = view.failures
    assert (failure.room, failure.code, failure.request) == ("gone", "aborted", "req-8")
    assert moments(story)[-2:] == ["failed", "released"]


def test_who_no_longer_waits_for_a_view_disturbs_nobody() -> None:
    with pair_by(AT_ONCE) as pair:
        held, going = threading.Event(), threading.Event()

        def hold() -> None:
            going.set()
            held.wait(WAIT_S)

        pair.source._owner.look(hold)
        assert going.wait(WAIT_S)
        given_up = pair.source.view()
        assert given_up.cancel()
        held.set()
        assert pair.source.view().result(WAIT_S).role == "source"
