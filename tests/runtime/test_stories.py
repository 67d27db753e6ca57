"""Stories and views: what two endpoints tell of their rooms, and that it stays bounded."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Iterable
from typing import get_args

import msgspec
import pytest
from runtime.test_pair import AT_ONCE, WAIT_S, pair_by

from kvferry.ids import Generation, Peer, Room, Session
from kvferry.layout.intervals import Span
from kvferry.observe.steps import MAX_STORY_STEPS, Moment, RoomStory
from kvferry.observe.views import Wishes
from kvferry.observe.waterfall import join
from kvferry.plan.choose import Path
from kvferry.plan.plan import Request
from kvferry.protocol.codec import decode, encode
from kvferry.protocol.messages import Accept, Body, Envelope, Heartbeat, Offer, RoomMessage, Table
from kvferry.protocol.outcome import Done, Failure, FailureCode
from kvferry.runtime.bundles import Bundle, bundle
from kvferry.runtime.handles import Handle
from kvferry.runtime.owner.ended import MOST_OF_A_PART, PART_S, SLOW_S
from kvferry.runtime.owner.journal import MESSAGES, NUM_PAGES
from kvferry.runtime.owner.stories import StoryBook, Took
from kvferry.runtime.owner.telling import HALF, Teller
from kvferry.runtime.telemetry.tags import NOBODYS, RoomTag

ME, PEER = Teller("p/0", "source"), Peer("d", 3)


def accept(room: Room) -> bytes:
    return encode(Envelope(PEER, 1, Session(1, 1), 1, Accept(room, Generation(1))))


def together(frames: list[bytes]) -> Bundle:
    (message,) = bundle(frames)
    return message


def offer(room: Room, num_pages: int = 0) -> bytes:
    tables = (Table("kv", (7,) * num_pages),) if num_pages else ()
    body = Offer(room, Generation(1), Request(4), tables, 1.0)
    return encode(Envelope(PEER, 1, Session(1, 1), 1, body))


def told(book: StoryBook, name: str, held: Handle | None = None) -> RoomStory | None:
    return next(iter(named(book, ME, name, held=held)), None)


def named(
    book: StoryBook, teller: Teller, *names: str, held: Handle | None = None
) -> list[RoomStory]:
    handles: dict[Room, Handle] = {} if held is None else {held.room: held}
    return list(book.stories(teller, names, handles.get))


def moments(story: RoomStory | None) -> list[str]:
    assert story is not None
    return [str(step.step) for step in story.steps]


def opened(book: StoryBook, room: Room, tag: RoomTag = NOBODYS) -> Handle:
    """A room that begins now, by the book's clock."""
    handle = Handle(room)
    handle.begun, handle.tag = book.now, tag
    return handle


def tidy(book: StoryBook, *held: Handle, early: Iterable[Room] = ()) -> None:
    """After a turn, while these rooms are held, and those have been offered."""
    if book.is_full:
        book.turn_page(held, set(early))


def over(
    book: StoryBook,
    room: Room,
    seconds: float = 0.0,
    *held: Handle,
    early: Iterable[Room] = (),
) -> None:
    """A room that took so long, and has ended, while others are held, or have been offered."""
    book.now += 1e-6
    handle = opened(book, room)
    handle.begun = book.now - seconds
    book.ended(handle, Done())
    tidy(book, *held, early=early)


def test_the_oldest_rooms_are_forgotten() -> None:
    book = StoryBook(40)
    for room in range(100):
        over(book, room)
    known = [room for room in range(100) if told(book, str(room))]
    assert 40 <= len(known) <= 45 + MOST_OF_A_PART
    assert known[-5:] == [95, 96, 97, 98, 99]
    assert moments(told(book, "99")) == ["opened", "done"]


def test_a_room_that_goes_on_keeps_its_steps() -> None:
    book = StoryBook(16)
    handle = opened(book, "long", RoomTag("req"))
    book.pushed("long", Span(0, 4))
    for room in range(100):
        if room == 50:
            book.pushed("long", Span(4, 8))
        over(book, room, 0.0, handle)
        assert "pushed" in moments(told(book, "long", handle))
    book.ended(handle, Done())
    story = told(book, "long", handle)
    assert moments(story) == ["opened", "pushed", "pushed", "done"]
    assert (story and story.request, told(book, "long")) == ("req", story)


def test_a_room_that_has_just_begun_has_a_story() -> None:
    book = StoryBook(16)
    handle = opened(book, 7, RoomTag("req"))
    story = told(book, "7", handle)
    assert (moments(story), story and story.request) == (["opened"], "req")
    (there,) = named(book, Teller("d/0", "target"), "7", held=handle)
    assert moments(there) == ["asked"]


def test_a_room_that_went_on_is_forgotten_as_a_whole_with_those_that_end_with_it() -> None:
    book = StoryBook(64)
    # No part of the slowest ends before others are slower.
    book.now = 1000 * PART_S
    handle = opened(book, "long")
    book.pushed("long", Span(0, 4))
    for room in range(300):
        over(book, room, 0.0, handle)
    book.ended(handle, Done())
    over(book, "short")
    stories: dict[str, list[RoomStory]] = {"long": [], "short": []}
    for room in range(300, 600):
        book.now += 0.1
        over(book, room, 1.0)
        for name, known in stories.items():
            known.extend(named(book, ME, name))
    assert abs(len(stories["long"]) - len(stories["short"])) <= 64 / NUM_PAGES
    assert 60 <= len(stories["long"]) <= 100
    assert {tuple(map(str, moments(one))) for one in stories["long"]} == {
        ("opened", "pushed", "done")
    }


def test_a_room_whose_first_steps_are_forgotten_is_not_told_of() -> None:
    book = StoryBook(16)
    # No part of the slowest ends before others are slower.
    book.now = 1000 * PART_S
    handle = opened(book, "long")
    book.pushed("long", Span(0, 4))
    for room in range(5):
        book.now += 1.0
        over(book, room, 500.0)
    book.ended(handle, Done())
    stories = []
    for room in range(5, 30):
        book.now += 1.0
        over(book, room, 500.0)
        stories.append(told(book, "long"))
    assert stories[-1] is None
    assert {tuple(moments(story)) for story in stories if story} == {("opened", "pushed", "done")}


def test_an_offer_that_came_before_its_room_is_part_of_its_story() -> None:
    book = StoryBook(16)
    book.heard_together(together([offer(7)]))
    assert told(book, "7") is None
    for room in range(100, 200):
        over(book, room, early=[7])
    handle = opened(book, 7)
    assert set(moments(told(book, "7", handle))) == {"opened", "offered"}
    for room in range(200, 300):
        over(book, room, 0.0, handle)
    assert set(moments(told(book, "7", handle))) == {"opened", "offered"}


def test_an_offer_whose_page_lasts_longer_than_the_room_is_early_is_kept() -> None:
    """It is opened pages after its offer was heard, and before that page is forgotten."""
    book = StoryBook(16)
    book.heard_together(together([offer(7)]))
    for room in range(100, 105):
        over(book, room, early=[7])
    book.now += 1.0
    handle = opened(book, 7)
    for room in range(200, 300):
        over(book, room, 0.0, handle)
    assert set(moments(told(book, "7", handle))) == {"opened", "offered"}


def test_offers_for_rooms_that_nobody_opens_are_forgotten() -> None:
    book = StoryBook(16)
    book.heard_together(together([offer(0)]))
    for room in range(100, 200):
        over(book, room)
    handle = opened(book, 0)
    assert moments(told(book, "0", handle)) == ["opened"]


def test_offers_that_were_taken_back_are_forgotten_too() -> None:
    book = StoryBook(16)
    book.heard_together(together([offer(0)]))
    for room in range(100, 200):
        over(book, room, early=[0])
    assert 0 in book._journal._aside
    for room in range(200, 300):
        book.now += 1.0
        over(book, room)
    assert 0 not in book._journal._aside
    assert not book._journal._unended


def test_an_id_that_is_used_again_tells_of_its_last_use() -> None:
    book = StoryBook(1000)
    handle = opened(book, 1, RoomTag("first"))
    book.ended(handle, Failure.of(FailureCode.DEADLINE, "late"))
    book.released(1)
    book.heard_together(together([offer(1)]))
    book.now += 1.0
    again = opened(book, 1, RoomTag("second"))
    story = told(book, "1", again)
    assert (moments(story), story and story.request) == (["offered", "opened"], "second")
    book.ended(again, Done())
    assert moments(told(book, "1")) == ["offered", "opened", "done"]


def test_a_text_and_a_number_may_have_one_name() -> None:
    book = StoryBook(1000)
    for room in (7, "7", "07"):
        over(book, room)
    assert len(named(book, ME, "7")) == 2
    assert len(named(book, ME, "07")) == 1
    assert named(book, ME, "\u0667", "-7", "7.0", "") == []


@pytest.mark.parametrize("num_kept", [100, 10_000], ids=["most put aside", "all in pages"])
def test_of_a_long_room_its_beginning_and_its_end_are_told(num_kept: int) -> None:
    book = StoryBook(num_kept)
    handle = opened(book, "r", RoomTag("req", "00-1-2-01"))
    for i in range(3000):
        book.now += 1.0
        book.pushed("r", Span(i, i + 1))
        tidy(book, handle)
    assert all(len(steps) <= 4 * HALF for steps in book._journal._aside.values())
    book.now += 1.0
    book.ended(handle, Done())
    story = told(book, "r")
    assert story is not None
    assert (len(story.steps), story.left_out) == (MAX_STORY_STEPS, 3002 - MAX_STORY_STEPS)
    assert (story.steps[0].step, story.steps[-1].step) == (Moment.OPENED, Moment.DONE)
    assert [story.steps[i].detail for i in (1, -2)] == ["tokens 0 to 1", "tokens 2999 to 3000"]
    assert (story.request, story.traceparent) == ("req", "00-1-2-01")


class Chronicle:
    """A book, and beside it everything that ever happened to each room."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.book = StoryBook(24)
        self.held: dict[Room, Handle] = {}
        self.early: set[Room] = set()
        self.happened: dict[Room, list[str]] = defaultdict(list)
        self.ended: dict[Room, list[str]] = {}

    def step(self, fresh: Room) -> None:
        """Something happens, most often to a new room that is soon over."""
        self.book.now += self.random.choice([1e-6, 0.001, 0.5])
        match self.random.randrange(6):
            case 0:
                self._offer(fresh)
            case 1 if self.early:
                self._begin(self.random.choice(sorted(self.early, key=str)))
            case 2:
                self._begin(fresh)
            case 3 | 4 if self.held:
                self._push(self.random.choice(sorted(self.held, key=str)))
            case _ if self.held:
                self._end(self.random.choice(sorted(self.held, key=str)))
        tidy(self.book, *self.held.values(), early=self.early)

    def _offer(self, room: Room) -> None:
        now = self.book.now
        self.book._journal.write_message(now, None, together([offer(room), accept(room)]))
        self.early.add(room)
        self.happened[room] += ["offered", "accepted"]

    def _begin(self, room: Room) -> None:
        self.early.discard(room)
        self.held[room] = opened(self.book, room)
        self.happened[room] += ["opened"]

    def _push(self, room: Room) -> None:
        self.book.pushed(room, Span(0, 1))
        self.happened[room] += ["pushed"]

    def _end(self, room: Room) -> None:
        handle = self.held.pop(room)
        if self.random.random() < 0.1:
            self.book.ended(handle, Failure.of(FailureCode.ABORTED, "given up"))
            self.happened[room] += ["failed"]
        else:
            self.book.ended(handle, Done())
            self.happened[room] += ["done"]
        self.ended[room] = self.happened.pop(room)

    def demand_true(self) -> None:
        """What goes on is told in full, what has ended in full or not at all."""
        for room, handle in self.held.items():
            assert sorted(moments(told(self.book, str(room), handle))) == sorted(
                self.happened[room]
            )
        for room, steps in self.ended.items():
            story = told(self.book, str(room))
            assert story is None or sorted(moments(story)) == sorted(steps)
        lasting = {one.room for one in self.book.failures} | self.book.slow.rooms
        assert all(told(self.book, str(room)) is not None for room in lasting)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_stories_are_whole_and_the_book_is_bounded(seed: int) -> None:
    chronicle = Chronicle(seed)
    for number in range(1, 401):
        chronicle.step(number)
        if number % 20 == 0:
            chronicle.demand_true()
    journal = chronicle.book._journal
    for room, handle in list(chronicle.held.items()):
        chronicle.book.ended(handle, Done())
        del chronicle.held[room]
    chronicle.early.clear()
    for number in range(1000, 1100):
        chronicle.book.now += 1.0
        over(chronicle.book, number, seconds=1000.0)
    failed = {one.room for one in chronicle.book.failures}
    assert journal._aside.keys() <= chronicle.book.slow.rooms | failed | set(range(1000, 1100))
    assert not journal._unended.keys() - set(range(1000, 1100))


def test_nothing_large_is_kept() -> None:
    """Offers have thousands of pages, and closes a megabyte of metadata."""
    book = StoryBook(100)
    handle = opened(book, 1, RoomTag("req", ""))
    book.heard_together(together([offer(2), offer(1, num_pages=5000)]))
    book.said_together(PEER, together([accept(1)]))
    book.pushed(1, Span(0, 4))
    book.wrote(1, PEER, Path.RUNS, 10, 0.1)
    book.ended(handle, Done(b"x" * 1000))
    assert len(msgspec.msgpack.encode(book._journal.open)) < 500
    story = told(book, "1")
    assert set(moments(story)) == {*("opened", "offered", "accepted", "pushed", "written", "done")}
    assert story is not None
    heard = {str(step.step): (step.peer, step.heard) for step in story.steps if step.peer}
    assert heard["offered"] == ("d/3", True)
    assert heard["accepted"] == ("d/3", False)


def test_frames_that_leave_together_count_each() -> None:
    """So that as many rooms fit as ever, and no more."""
    book = StoryBook(64)
    for room in range(200):
        book.said_together(PEER, together([accept(n) for n in range(8 * room, 8 * room + 8)]))
        over(book, 10_000 + room)
    known = [room for room in range(200) if told(book, str(10_000 + room))]
    assert 6 <= len(known) <= 10 + MOST_OF_A_PART


def test_every_message_about_a_room_is_a_step() -> None:
    assert set(MESSAGES) == {kind for kind in get_args(Body) if issubclass(kind, RoomMessage)}
    assert len(set(MESSAGES.values())) == len(MESSAGES)


def test_bytes_that_are_no_frame_are_no_step() -> None:
    book = StoryBook(64)
    book.heard_together(together([b"", b"nonsense", accept(1)]))
    book.now += 1.0
    over(book, 1)
    assert moments(told(book, "1")) == ["accepted", "opened", "done"]


@pytest.mark.parametrize("num_pushes", [2, 3000], ids=["short", "with steps left out"])
@pytest.mark.parametrize("num_pages", [1, NUM_PAGES + 1], ids=["packed", "put aside"])
def test_a_story_stays_the_same_when_it_is_packed(num_pushes: int, num_pages: int) -> None:
    book = StoryBook(8)
    handle = opened(book, 1, RoomTag("req", "00-1-2-01"))
    book.heard_together(together([offer(1), offer(2)]))
    for i in range(num_pushes):
        book.pushed(1, Span(i, i + 1))
    handle.finished = book.now
    book.copied(1, Moment.GATHERED, PEER, book.now, Took(0.5, 9, "staged"))
    book.wrote(1, PEER, Path.RUNS, 10, 0.1)
    book.ended(handle, Done())
    book.said_together(PEER, together([accept(1)]))
    before, since = told(book, "1"), book.ended_since(ME, 0.0)
    for _ in range(num_pages):
        over(book, 3, 0.0, handle)
    assert before is not None
    assert {"offered", "pushed", "gathered", "written", "finished", "accepted"} <= set(
        moments(before)
    )
    assert (before.request, before.traceparent) == ("req", "00-1-2-01")
    assert told(book, "1") == before
    assert since == [before]
    assert before in book.ended_since(ME, 0.0)


def test_when_a_failed_room_was_released_is_told_however_many_ended_meanwhile() -> None:
    book = StoryBook(16)
    handle = opened(book, 1)
    book.ended(handle, Failure.of(FailureCode.DEADLINE, "late \udc80"))
    for number in range(2, 50):
        over(book, number, 0.0, handle)
    book.now += 1.0
    book.released(1)
    for number in range(50, 100):
        story = told(book, "1")
        assert moments(story) == ["opened", "failed", "released"]
        book.now += 1.0
        over(book, number)
    assert story is not None
    assert story.steps[1].detail == "deadline: late ?"


def test_nothing_is_kept_where_nothing_is_wanted() -> None:
    book = StoryBook(0)
    handle = opened(book, 1)
    book.heard_together(together([offer(1)]))
    book.said_together(PEER, together([offer(2)]))
    book.ended(handle, Failure.of(FailureCode.DEADLINE, "late"))
    assert (told(book, "1"), told(book, "2"), book._journal.open) == (None, None, [])
    assert (len(book.failures), book.slow.slowest(book.now)) == (0, [])


def test_the_slowest_of_the_last_minutes_are_known_however_many_came_after() -> None:
    """With their steps: what took long has to be explained."""
    book = StoryBook(64)
    start = book.now
    for number in range(24_000):
        book.now = start + number * 0.01
        over(book, number, seconds=5.0 if number % 2400 == 7 else 0.001 * (number % 90))
    slowest = [room for _, _, room, _ in book.slow.slowest(book.now, 10)]
    assert sorted(map(int, slowest)) == [7 + 2400 * i for i in range(10)]
    assert moments(told(book, "7")) == ["opened", "done"]


def test_what_was_slow_long_ago_is_forgotten() -> None:
    book = StoryBook(16)
    over(book, "slow", seconds=9.0)
    book.now += SLOW_S + 2 * PART_S
    assert book.slow.slowest(book.now) == []
    for number in range(20):
        book.now += PART_S
        over(book, number)
    assert told(book, "slow") is None
    assert len(list(book.slow)) <= SLOW_S / PART_S + 1


@pytest.mark.parametrize("seconds", [range(50), range(50, 0, -1)], ids=["rising", "falling"])
def test_the_slowest_come_first(seconds: range) -> None:
    book = StoryBook(1000)
    for took in seconds:
        over(book, f"{took}", seconds=float(took))
    longest = sorted(seconds, reverse=True)[:3]
    assert [room for _, _, room, _ in book.slow.slowest(book.now, 3)] == [str(s) for s in longest]


def test_rooms_that_took_as_long_need_no_order() -> None:
    """A room's id is a number or a text."""
    book = StoryBook(100)
    for room in (1, "one", 2, "two", *range(3, 20)):
        over(book, room)
    assert len(book.slow.slowest(book.now)) == MOST_OF_A_PART


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
    assert known[0].when(Moment.WRITTEN)[-1] <= known[0].when(Moment.CLOSED)[0]
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
