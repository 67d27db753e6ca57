"""Capacity: what a load does to instances that hand requests over. Pure.

``predict`` runs a discrete-event simulation over the costs of ``plan/cost.py``. Requests arrive at
random (Poisson). The router gives each to the prefill and the decode instance with the fewest
requests. A request waits until decode has room for its tokens, then for its turn at prefill, and
is handed over when its prompt is computed. The hand-offs of a rank take turns of one staging slot;
writes into mapped memory go one after the other. Decode keeps the tokens until the answer is
complete.

Not modelled: batches whose steps get slower as they grow, chunks that are pushed while later ones
are computed (so predictions are on the safe side), failures, and cached prefixes.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from enum import StrEnum
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.errors import InputError
from kvferry.plan.choose import TransferMode
from kvferry.plan.estimate import Estimate

# Simulated requests. The first part fills the instances and is not counted.
NUM_REQUESTS = 20_000
WARM_UP = 0.2
MAX_INSTANCES = 4096
# Hand-offs that share a link are simulated in at most so many turns; more change little.
MAX_TURNS = 8
# A resource that is busier than this has no useful queue: its waits grow without bound.
SATURATED = 0.98


class Resource(StrEnum):
    """What requests wait for."""

    PREFILL = "prefill compute"
    SENDING = "prefill links"
    RECEIVING = "decode links"
    CACHE = "decode cache"


class ServingLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A load, and the instances that share it.

    ``prefill_tokens_per_s`` is the speed of one prefill instance, ``token_s`` the time per output
    token at decode, ``cache_tokens`` the capacity of one decode instance.
    """

    requests_per_s: float
    num_input: int
    num_output: int
    num_prefill: int
    num_decode: int
    prefill_tokens_per_s: float
    token_s: float
    cache_tokens: int

    def __post_init__(self) -> None:
        for name in ("requests_per_s", "prefill_tokens_per_s", "token_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"{name} must be above 0 and finite, not {getattr(self, name):g}")
        for name in ("num_input", "num_output", "num_prefill", "num_decode"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, not {getattr(self, name)}")
        if max(self.num_prefill, self.num_decode) > MAX_INSTANCES:
            raise InputError(f"at most {MAX_INSTANCES} instances of a side can be simulated")
        if self.num_tokens > self.cache_tokens:
            raise InputError(
                f"a request of {self.num_tokens} tokens does not fit into a decode cache of "
                f"{self.cache_tokens}; give a larger one"
            )

    @property
    def num_tokens(self) -> int:
        """Tokens of a request at its end."""
        return self.num_input + self.num_output

    @property
    def prefill_s(self) -> float:
        """Time to compute a prompt."""
        return self.num_input / self.prefill_tokens_per_s

    @property
    def decode_s(self) -> float:
        """Time to decode an answer."""
        return self.num_output * self.token_s


class HandOffCost(NamedTuple):
    """The cost of one hand-off.

    ``alone_s`` is its duration when nothing else runs: bytes and messages. ``send_s`` and
    ``receive_s`` are the busy time of the busiest rank of either side, ``sent_bytes`` and
    ``received_bytes`` its bytes. Hand-offs that share a link take turns, ``num_turns`` each.
    """

    alone_s: float
    send_s: float
    receive_s: float
    num_bytes: int
    sent_bytes: int
    received_bytes: int
    is_staged: bool
    num_turns: int = 1


def hand_off_cost(costs: Estimate) -> HandOffCost:
    """Return the cost of a hand-off from the estimate of its plan."""
    link = costs.link_cost
    send_s: dict[int, float] = {}
    receive_s: dict[int, float] = {}
    sent: dict[int, int] = {}
    received: dict[int, int] = {}
    for one in costs.moves:
        num_bytes, move = one.shape.num_bytes, one.move
        is_staged = one.choice.mode is TransferMode.STAGED
        scatter_s = num_bytes / link.copy_bytes_per_s if is_staged else 0.0
        busy_s = one.choice.predicted_s - scatter_s
        send_s[move.source] = send_s.get(move.source, 0.0) + busy_s
        receive_s[move.target] = (
            receive_s.get(move.target, 0.0) + link.wire_s(num_bytes) + scatter_s
        )
        sent[move.source] = sent.get(move.source, 0) + num_bytes
        received[move.target] = received.get(move.target, 0) + num_bytes
    return HandOffCost(
        costs.predicted_s() + link.room_s,
        max(send_s.values(), default=0.0),
        max(receive_s.values(), default=0.0),
        costs.num_bytes,
        max(sent.values(), default=0),
        max(received.values(), default=0),
        costs.chosen is TransferMode.STAGED,
        _num_turns(costs),
    )


def _num_turns(costs: Estimate) -> int:
    """Return in how many turns a source sends a hand-off while others share its link.

    A mapped transport copies one write after the other. The target grants staging slots in turns,
    and a transport shares its link among the direct writes in flight.
    """
    if costs.link_cost.maps_peer:
        return 1
    if costs.chosen is not TransferMode.STAGED:
        return MAX_TURNS
    slots: dict[int, int] = {}
    for one in costs.moves:
        count = costs.link_cost.num_slots(one.shape.num_bytes)
        slots[one.move.source] = slots.get(one.move.source, 0) + count
    return min(max(slots.values()), MAX_TURNS)


class Percentiles(NamedTuple):
    """The median and the 99th percentile of a time, in seconds."""

    p50: float
    p99: float


class LoadPrediction(NamedTuple):
    """What the simulation saw after its warm-up.

    ``added_s`` is the time from the end of prefill until the hand-off is complete, and
    ``link_wait_s`` the part of it in which the hand-off waited for a rank. ``ready_s`` is the time
    from the request's arrival until decode can begin. ``in_flight`` is the mean number of
    hand-offs in flight. ``prefill_tokens`` and ``decode_tokens`` are the mean numbers of pinned
    tokens. ``limits`` are the requests per second at which each resource is full, ``busy`` the
    share of them that this load is.
    """

    added_s: Percentiles
    ready_s: Percentiles
    link_wait_s: Percentiles
    in_flight: float
    in_flight_p99: int
    prefill_tokens: float
    decode_tokens: float
    busy: dict[Resource, float]
    limits: dict[Resource, float]

    @property
    def first(self) -> Resource:
        """The resource that saturates first."""
        return min(self.limits, key=lambda one: self.limits[one])

    @property
    def is_stable(self) -> bool:
        """Whether no resource is saturated, so that waits stay bounded."""
        return max(self.busy.values()) < SATURATED


def limits_of(load: ServingLoad, cost: HandOffCost) -> dict[Resource, float]:
    """Return the requests per second at which each resource is full."""

    def rate(count: float, seconds: float) -> float:
        return count / seconds if seconds else math.inf

    held_s = load.prefill_s + cost.alone_s + load.decode_s
    held = load.cache_tokens // load.num_tokens
    return {
        Resource.PREFILL: rate(load.num_prefill, load.prefill_s),
        Resource.SENDING: rate(load.num_prefill, cost.send_s),
        Resource.RECEIVING: rate(load.num_decode, cost.receive_s),
        Resource.CACHE: rate(load.num_decode * held, held_s),
    }


def predict(
    load: ServingLoad, cost: HandOffCost, *, num_requests: int = NUM_REQUESTS, seed: int = 0
) -> LoadPrediction:
    """Simulate a load and return what it does. Equal arguments give equal results."""
    gaps = np.random.default_rng(seed).exponential(1 / load.requests_per_s, num_requests)
    times = _Simulation(load, cost, np.cumsum(gaps)).run()
    arrived, began, computed, sent, done, ended = times.T
    limits = limits_of(load, cost)
    # Requests are counted from here on.
    first = int(num_requests * WARM_UP)
    window = float(arrived[first]), float(arrived[-1])
    return LoadPrediction(
        _percentiles((done - computed)[first:]),
        _percentiles((done - arrived)[first:]),
        # To a nanosecond, because the turns of a hand-off do not add up exactly.
        _percentiles(np.maximum(np.round(sent - computed, 9), 0.0)[first:]),
        _mean(computed, done, window),
        int(np.percentile(_counts(computed, done, window), 99)),
        _mean(began, done, window) * load.num_input,
        _mean(began, ended, window) * load.num_tokens,
        {one: load.requests_per_s / limit for one, limit in limits.items()},
        limits,
    )


class _SimulatedInstance:
    """One instance: when its link is free, and the requests that it has.

    ``sending``: requests that take turns at a prefill instance's link; the first has it.
    """

    __slots__ = ("free_at", "held_tokens", "link_free_at", "num_requests", "sending", "waiting")

    def __init__(self) -> None:
        self.free_at = self.link_free_at = 0.0
        self.held_tokens = self.num_requests = 0
        self.waiting: deque[int] = deque()
        self.sending: deque[int] = deque()


class _Kind(NamedTuple):
    """Kinds of events, in the order in which events of one time are handled."""

    ended: int = 0
    done: int = 1
    sent: int = 2
    computed: int = 3
    arrived: int = 4


_EVENT = _Kind()


class _Simulation:
    """The event loop. Each request has six times: see ``run``."""

    def __init__(
        self, load: ServingLoad, cost: HandOffCost, arrivals: npt.NDArray[np.float64]
    ) -> None:
        self._load, self._cost = load, cost
        self._prefill = [_SimulatedInstance() for _ in range(load.num_prefill)]
        self._decode = [_SimulatedInstance() for _ in range(load.num_decode)]
        # The least busy instance of each side, as (requests, instance); entries may be stale.
        self._idle_prefill = [(0, i) for i in range(load.num_prefill)]
        self._idle_decode = [(0, i) for i in range(load.num_decode)]
        self._pairs: list[tuple[int, int]] = []
        self._times = np.zeros((len(arrivals), 6))
        self._times[:, 0] = arrivals
        # Turns that each hand-off still needs.
        self._turns = [cost.num_turns] * len(arrivals)
        self._events = [(float(at), _EVENT.arrived, i) for i, at in enumerate(arrivals)]

    def run(self) -> npt.NDArray[np.float64]:
        """Return for each request: arrived, began, computed, sending began, done, ended."""
        events = self._events
        handle = {
            _EVENT.arrived: self._arrived,
            _EVENT.computed: self._computed,
            _EVENT.sent: self._sent,
            _EVENT.done: self._done,
            _EVENT.ended: self._ended,
        }
        while events:
            now, kind, request = heapq.heappop(events)
            handle[kind](request, now)
        return self._times

    def _arrived(self, request: int, now: float) -> None:
        prefill = _least_busy(self._prefill, self._idle_prefill)
        decode = _least_busy(self._decode, self._idle_decode)
        self._pairs.append((prefill, decode))
        self._decode[decode].waiting.append(request)
        self._admit(decode, now)

    def _admit(self, index: int, now: float) -> None:
        """Begin the requests that fit into a decode instance's cache."""
        load, decode = self._load, self._decode[index]
        while decode.waiting and decode.held_tokens + load.num_tokens <= load.cache_tokens:
            request = decode.waiting.popleft()
            decode.held_tokens += load.num_tokens
            prefill = self._prefill[self._pairs[request][0]]
            self._times[request, 1] = begin = max(now, prefill.free_at)
            prefill.free_at = computed = begin + load.prefill_s
            heapq.heappush(self._events, (computed, _EVENT.computed, request))

    def _computed(self, request: int, now: float) -> None:
        self._times[request, 2] = now
        prefill = self._prefill[self._pairs[request][0]]
        prefill.sending.append(request)
        if len(prefill.sending) == 1:
            self._send(prefill, now)

    def _send(self, prefill: _SimulatedInstance, now: float) -> None:
        """Give the link to the first hand-off for a turn."""
        cost, request = self._cost, prefill.sending[0]
        decode = self._decode[self._pairs[request][1]]
        send_s, receive_s = cost.send_s / cost.num_turns, cost.receive_s / cost.num_turns
        receiving = max(now, decode.link_free_at)
        decode.link_free_at = receiving + receive_s
        self._turns[request] -= 1
        heapq.heappush(self._events, (now + send_s, _EVENT.sent, request))
        if not self._turns[request]:
            rest_s = cost.alone_s - cost.send_s
            done = max(now + send_s + rest_s, receiving + receive_s)
            # The wait is the time in which not both ranks served this hand-off.
            self._times[request, 3:5] = done - cost.alone_s, done
            heapq.heappush(self._events, (done, _EVENT.done, request))

    def _sent(self, request: int, now: float) -> None:
        """End a turn at a link, and begin the next one."""
        prefill = self._prefill[self._pairs[request][0]]
        prefill.sending.popleft()
        if self._turns[request]:
            prefill.sending.append(request)
        if prefill.sending:
            self._send(prefill, now)

    def _done(self, request: int, now: float) -> None:
        _leave(self._prefill, self._idle_prefill, self._pairs[request][0])
        heapq.heappush(self._events, (now + self._load.decode_s, _EVENT.ended, request))

    def _ended(self, request: int, now: float) -> None:
        self._times[request, 5] = now
        index = self._pairs[request][1]
        self._decode[index].held_tokens -= self._load.num_tokens
        _leave(self._decode, self._idle_decode, index)
        self._admit(index, now)


def _least_busy(instances: list[_SimulatedInstance], idle: list[tuple[int, int]]) -> int:
    """Return the instance with the fewest requests, and count one more there."""
    while True:
        count, index = heapq.heappop(idle)
        instance = instances[index]
        if count == instance.num_requests:
            instance.num_requests += 1
            heapq.heappush(idle, (instance.num_requests, index))
            return index


def _leave(instances: list[_SimulatedInstance], idle: list[tuple[int, int]], index: int) -> None:
    instances[index].num_requests -= 1
    heapq.heappush(idle, (instances[index].num_requests, index))


def _percentiles(seconds: npt.NDArray[np.float64]) -> Percentiles:
    p50, p99 = np.percentile(seconds, (50, 99))
    return Percentiles(float(p50), float(p99))


def _mean(
    begins: npt.NDArray[np.float64], ends: npt.NDArray[np.float64], window: tuple[float, float]
) -> float:
    """Return the mean number of intervals that cover a time of the window."""
    begin, end = window
    covered = np.minimum(ends, end) - np.maximum(begins, begin)
    return float(np.maximum(covered, 0.0).sum() / (end - begin))


def _counts(
    begins: npt.NDArray[np.float64], ends: npt.NDArray[np.float64], window: tuple[float, float]
) -> npt.NDArray[np.int64]:
    """Return how many intervals cover each of 10,000 times of the window."""
    at = np.linspace(*window, 10_000)
    started = np.searchsorted(np.sort(begins), at, side="right")
    return started - np.searchsorted(np.sort(ends), at, side="right")
