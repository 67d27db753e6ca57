"""Senders and receivers over real endpoints, without SGLang: bytes, failures and aborts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from connectors.sglang.schedulers import (
    ENOUGH_S,
    SchedulerRows,
    buffers_of,
    new_pool,
    request,
    settings_of,
    until,
)
from discovery.etcd_cluster import EtcdCluster
from numpy.typing import NDArray

from kvferry import (
    DiscoveryServer,
    KvferryError,
    ProofMode,
    Status,
    TransferMode,
    attention,
    make_transport,
)
from kvferry.connectors.sglang.geometry import head_span
from kvferry.connectors.sglang.instances import Replica
from kvferry.connectors.sglang.managers import DecodeManager, PrefillManager, RoomFailed
from kvferry.connectors.sglang.pools import KvHeads, RankPosition, SglangCache
from kvferry.connectors.sglang.receiver import RoomReceiver
from kvferry.connectors.sglang.sender import RoomSender
from kvferry.connectors.sglang.settings import RankSettings
from kvferry.testing.faulty_transport import ContentFault, FaultyTransport
from kvferry.transports.base import Transport

LAYERS, DIM, TOKENS = 2, 4, 64


class Rank:
    """One SGLang scheduler: pools of K and V by layer, and metadata rows."""

    def __init__(self, *, tp: int, tp_rank: int, heads: int, page: int) -> None:
        self.transport: Transport = make_transport("shm")
        self.heads = KvHeads(total=heads, k_dim=DIM, v_dim=DIM)
        self.span = head_span(self.heads, tp, tp_rank)
        self.position = RankPosition(tp=tp, tp_rank=tp_rank)
        self.page = page
        shape = (TOKENS, len(self.span), DIM)
        self.pools = [new_pool(self.transport, *shape) for _ in range(2 * LAYERS)]
        self.rows = SchedulerRows()

    def damage(self, fault: ContentFault) -> None:
        """Make a fault in a write of this rank."""
        spec = attention(layers=LAYERS, kv_heads=self.heads.total, head_dim=DIM)
        self.transport = FaultyTransport(self.transport, fault, spec)

    def settings(self, replica: Replica, discovery: str | None, deadline_s: float) -> RankSettings:
        layers = tuple(range(LAYERS))
        cache = SglangCache(
            num_layers=LAYERS,
            layers=layers,
            stages=(LAYERS,),
            position=self.position,
            heads=self.heads,
            buffers=buffers_of(self.pools, layers, self.page),
        )
        return settings_of(
            cache,
            self.rows,
            replica,
            self.transport,
            discovery=discovery,
            deadline_s=deadline_s,
        )

    def compute(self, pages: list[int], num_tokens: int, seed: int) -> None:
        """Fill a request's pages: every value says of which request, buffer, token and head."""
        for buffer, pool in enumerate(self.pools):
            for token in range(num_tokens):
                slot = pages[token // self.page] * self.page + token % self.page
                for place, head in enumerate(range(self.span.first, self.span.end)):
                    pool[slot, place] = said(seed, buffer, token, head)

    def found(self, pages: list[int], num_tokens: int) -> NDArray[np.float32]:
        slots = [pages[t // self.page] * self.page + t % self.page for t in range(num_tokens)]
        return np.stack([pool[slots] for pool in self.pools])

    def wanted(self, num_tokens: int, seed: int) -> NDArray[np.float32]:
        heads = range(self.span.first, self.span.end)
        return np.array(
            [
                [[said(seed, buffer, token, head) for head in heads] for token in range(num_tokens)]
                for buffer in range(2 * LAYERS)
            ],
            np.float32,
        )


def said(seed: int, buffer: int, token: int, head: int) -> NDArray[np.float32]:
    return np.arange(DIM) + 10 * head + 1000 * token + 100_000 * buffer + seed * 0.125


class Pair:
    """A prefill server and decode servers, in one process."""

    def __init__(
        self, stack: ExitStack, *, heads: int, deadline_s: float, fault: ContentFault | None = None
    ) -> None:
        self._stack, self._heads, self._deadline_s = stack, heads, deadline_s
        self._fault = fault
        server = stack.enter_context(DiscoveryServer())
        self.url = server.url
        self.address = server.url.removeprefix("http://")

    def prefill(
        self, tp: int, page: int, *, dp: tuple[int, int] = (0, 1), address: str = "here"
    ) -> list[Any]:
        replica = Replica(address, *dp)
        return [self._side(PrefillManager, replica, tp, rank, page, self.url) for rank in range(tp)]

    def decode(
        self, tp: int, page: int, name: str = "decode", *, shared: str | None = None
    ) -> list[Any]:
        replica = Replica(name, 0, 1)
        sides = [self._side(DecodeManager, replica, tp, rank, page, shared) for rank in range(tp)]
        for _, manager in sides:
            until(lambda manager=manager: manager.try_ensure_parallel_info(self.address))
        return sides

    def _side(
        self, kind: Any, replica: Replica, tp: int, rank: int, page: int, url: str | None
    ) -> tuple[Rank, Any]:
        one = Rank(tp=tp, tp_rank=rank, heads=self._heads, page=page)
        if self._fault is not None and kind is PrefillManager:
            one.damage(self._fault)
        settings = one.settings(replica, url, self._deadline_s)
        if self._fault is not None:
            config = msgspec.structs.replace(settings.config, proof=ProofMode.FULL)
            settings = replace(settings, config=config)
        manager = kind(SimpleNamespace(), settings)
        self._stack.callback(manager.close)
        return one, manager


@contextmanager
def pair(
    *, heads: int = 4, deadline_s: float = ENOUGH_S, fault: ContentFault | None = None
) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack, heads=heads, deadline_s=deadline_s, fault=fault)


def receivers(
    pair: Pair, sides: list[Any], room: int, asked: SimpleNamespace
) -> list[RoomReceiver]:
    made = []
    for _, manager in sides:
        receiver = RoomReceiver(manager, pair.address, room)
        assert receiver.poll() == Status.CONNECTING
        receiver.init(0)
        assert receiver.poll() == Status.WAITING
        receiver.bind_request(asked)
        made.append(receiver)
    return made


def senders(
    sides: list[Any], room: int, asked: SimpleNamespace, num_pages: int
) -> list[RoomSender]:
    made = [RoomSender(manager, "", room) for _, manager in sides]
    for sender in made:
        sender.bind_request(asked)
        assert sender.pop_decode_prefix_len() == 0
        sender.init(num_pages, 1)
    return made


def agreed(handles: Any) -> int:
    return min(int(handle.poll()) for handle in handles)


def carry(
    pair: Pair, prefill: list[Any], decode: list[Any], room: int, num_tokens: int, seed: int = 0
) -> list[RoomSender]:
    """One request in two chunks, checked byte for byte at every decode rank."""
    asked = request(num_tokens, seed)
    first = prefill[0][0].page
    num_pages = -(-num_tokens // first)
    from_pages = list(range(1, num_pages + 1))
    to_pages = list(range(-(-num_tokens // decode[0][0].page), 0, -1))
    into = receivers(pair, decode, room, asked)
    for receiver in into:
        receiver.send_metadata(np.array(to_pages, np.int32), 2, [], decode_prefix_len=0)
    out = senders(prefill, room, asked, num_pages)
    until(lambda: agreed(out) == Status.WAITING)
    for (rank, _), sender in zip(prefill, out, strict=True):
        rank.compute(from_pages, num_tokens, seed)
        rank.rows.tokens[1, 0], rank.rows.rooms[1, 0] = 77, room
        sender.send(np.array(from_pages[:1], np.int32), None, num_kv_tokens=first)
        rest = num_tokens - first
        sender.send(np.array(from_pages[1:], np.int32), [], num_kv_tokens=rest)
    until(lambda: agreed(into) in (Status.DONE, Status.FAILED))
    for (rank, _), receiver in zip(decode, into, strict=True):
        assert receiver.poll() == Status.DONE
        assert np.array_equal(rank.found(to_pages, num_tokens), rank.wanted(num_tokens, seed))
        assert (rank.rows.tokens[2, 0], rank.rows.rooms[2, 0]) == (77, room)
        receiver.clear()
    until(lambda: agreed(out) == Status.DONE)
    return out


@pytest.mark.parametrize(
    ("heads", "prefill", "decode"),
    [(4, (1, 4), (2, 1)), (4, (2, 8), (1, 4)), (4, (4, 4), (2, 4)), (2, (4, 4), (1, 1))],
    ids=["1 to 2", "2 to 1", "4 to 2", "4 to 1 with 2 heads"],
)
def test_any_tp_and_page_size_to_any_other(
    heads: int, prefill: tuple[int, int], decode: tuple[int, int]
) -> None:
    with pair(heads=heads) as both:
        out = carry(both, both.prefill(*prefill), both.decode(*decode), room=9, num_tokens=22)
        metrics = [sender.get_transfer_metric() for sender in out]
        # Each head of each token once, although several prefill ranks may have it.
        total = 22 * heads * DIM * 4 * 2 * LAYERS
        assert sum(metric.transfer_total_bytes or 0 for metric in metrics) == total
        assert all((metric.transfer_latency_s or 1) > 0 for metric in metrics)


def test_issue_22145_one_prefill_of_four_ranks_serves_four_decodes() -> None:
    """KvHeads fewer than ranks, and four targets that share every source: no key can collide."""
    with pair(heads=2) as both:
        prefill = both.prefill(4, 4)
        for number in range(4):
            decode = both.decode(1, 4, name=f"decode-{number}")
            carry(both, prefill, decode, room=100 + number, num_tokens=13, seed=number)


def test_issue_25699_a_dense_model_completes_without_state() -> None:
    """None and an empty list both mean that there is none, and the metadata comes all the same."""
    with pair() as both:
        prefill, decode = both.prefill(1, 4), both.decode(1, 4)
        asked = request(8)
        for room, none in ((1, None), (2, [])):
            (into,) = receivers(both, decode, room, asked)
            into.send_metadata([1, 2], 0, none)
            (out,) = senders(prefill, room, asked, num_pages=2)
            prefill[0][0].rows.rooms[1, 0] = room
            out.send([3, 4], none, num_kv_tokens=8)
            until(lambda into=into: into.poll() in (Status.DONE, Status.FAILED))
            assert into.poll() == Status.DONE
            assert decode[0][0].rows.rooms[0, 0] == room


def test_issue_22536_an_abort_does_not_block_the_next_room() -> None:
    with pair() as both:
        prefill, decode = both.prefill(4, 4), both.decode(1, 4)
        for room in range(1, 9):
            asked = request(8)
            (into,) = receivers(both, decode, room, asked)
            into.send_metadata([1, 2], 0, [])
            out = senders(prefill, room, asked, num_pages=2)
            until(lambda out=out: agreed(out) == Status.WAITING)
            out[0].send([1], None, num_kv_tokens=4)
            into.abort()
            until(lambda into=into, out=out: agreed([into, *out]) == Status.FAILED)
            manager = decode[0][1]
            until(lambda room=room, manager=manager: manager.is_abort_release_safe(room, 0))
            into.clear()
        carry(both, prefill, decode, room=99, num_tokens=16)
        assert all(sender.endpoint.statuses([8]) == [None] for _, sender in prefill)


@pytest.mark.parametrize("service", ["built-in", "etcd"])
def test_servers_may_share_one_discovery_service(service: str, tmp_path: Path) -> None:
    with pair() as both, ExitStack() as stack:
        if service == "etcd":
            members = stack.enter_context(EtcdCluster(tmp_path, 1))
            both.url = members.url("sglang")
        # A request may name the server's host.
        both.address = "localhost:8998"
        prefill = both.prefill(2, 4, address="127.0.0.1:8998")
        other = both.prefill(1, 4, address="127.0.0.1:8999")
        decode = both.decode(1, 4, shared=both.url)
        carry(both, prefill, decode, room=5, num_tokens=13)
        both.address = "127.0.0.1:8999"
        until(lambda: decode[0][1].try_ensure_parallel_info(both.address))
        carry(both, other, decode, room=6, num_tokens=13)
        both.address = "127.0.0.1:9000"
        assert not decode[0][1].try_ensure_parallel_info(both.address)
        problem = decode[0][1].prefill_info_table.problem(both.address)
        assert "no instance registered" in problem
        for _, manager in (*decode, *prefill, *other):
            manager.close()


def test_cached_prefix_is_not_written() -> None:
    with pair() as both:
        (source, _), (target, _) = prefill, decode = both.prefill(1, 4)[0], both.decode(1, 4)[0]
        asked = request(12)
        (into,) = receivers(both, [decode], 5, asked)
        into.send_metadata([6, 7], 0, [], decode_prefix_len=4)
        (out,) = senders([prefill], 5, asked, num_pages=3)
        source.compute([1, 2, 3], 12, seed=3)
        source.rows.rooms[1, 0] = 5
        out.send([1, 2, 3], [], num_kv_tokens=12)
        until(lambda: agreed([into, out]) == Status.DONE)
        assert np.array_equal(target.found([0, 6, 7], 12)[:, 4:], target.wanted(12, 3)[:, 4:])
        assert out.get_transfer_metric().transfer_total_bytes == 8 * 4 * DIM * 4 * 2 * LAYERS


def test_another_prompt_in_the_same_room_fails() -> None:
    with pair() as both:
        prefill, decode = both.prefill(1, 4), both.decode(1, 4)
        (into,) = receivers(both, decode, 5, request(4, seed=0))
        into.send_metadata([1], 0, [])
        (out,) = senders(prefill, 5, request(4, seed=1), num_pages=1)
        out.send([1], [], num_kv_tokens=4)
        until(lambda: into.poll() == Status.FAILED)
        with pytest.raises(RoomFailed, match="content-differs"):
            into.failure_exception()


@pytest.mark.parametrize("fault", sorted({*ContentFault} - {ContentFault.DROP_STATE}))
def test_damaged_content_is_never_decoded_from(fault: ContentFault) -> None:
    """The receiver fails, and the row from which SGLang takes the first token stays empty."""
    with pair(fault=fault) as both:
        prefill, decode = both.prefill(2, 4), both.decode(1, 8)
        (into,) = receivers(both, decode, 5, request(20))
        into.send_metadata([3, 1, 2], 2, [])
        out = senders(prefill, 5, request(20), num_pages=5)
        for (rank, _), sender in zip(prefill, out, strict=True):
            rank.compute([1, 2, 3, 4, 5], 20, seed=1)
            rank.rows.tokens[1, 0], rank.rows.rooms[1, 0] = 77, 5
            sender.send([1, 2, 3, 4, 5], [], num_kv_tokens=20)
        until(lambda: into.poll() in (Status.DONE, Status.FAILED))
        with pytest.raises(RoomFailed, match="content-corrupt"):
            into.failure_exception()
        target = decode[0][0]
        assert (target.rows.tokens[2, 0], target.rows.rooms[2, 0]) == (0, 0)


def test_abort_at_prefill_returns_after_the_end() -> None:
    with pair() as both:
        prefill, decode = both.prefill(2, 4), both.decode(1, 4)
        (into,) = receivers(both, decode, 5, request(4))
        into.send_metadata([1], 0, [])
        out = senders(prefill, 5, request(4), num_pages=1)
        out[0].abort()
        assert out[0].poll() == Status.FAILED
        until(lambda: into.poll() == Status.FAILED)
        with pytest.raises(RoomFailed, match="aborted"):
            out[0].failure_exception()
        # Sent after the end: no error, and nothing comes of it.
        out[0].send([1], [], num_kv_tokens=4)


def test_a_rank_fails_with_the_other_ranks() -> None:
    with pair() as both:
        prefill = both.prefill(2, 4)
        out = senders(prefill, 5, request(4), num_pages=1)
        with pytest.raises(RoomFailed) as raised:
            out[1].failure_exception()
        assert raised.value.is_from_another_rank
        assert out[1].poll() == Status.FAILED


def test_deadline_ends_a_room_without_prefill() -> None:
    with pair(deadline_s=0.2) as both:
        both.prefill(1, 4)
        decode = both.decode(1, 4)
        (into,) = receivers(both, decode, 5, request(4))
        into.send_metadata([1], 0, [])
        until(lambda: into.poll() == Status.FAILED)
        with pytest.raises(RoomFailed, match="deadline"):
            into.failure_exception()
        into.ensure_abort_notified(force_arm=True)
        assert into.abort_notified
        until(lambda: decode[0][1].is_abort_release_safe(5, 0))


def test_room_selects_the_replica() -> None:
    with pair() as both:
        (_, one), (_, two) = both.prefill(1, 4, dp=(0, 2))[0], both.prefill(1, 4, dp=(1, 2))[0]
        decode = both.decode(1, 4)
        assert decode[0][1].prefill_info_table.get(both.address).dp_size == 2
        assert one.refusal(4, named=False) is None
        wrong = RoomSender(two, "", 4)
        assert wrong.poll() == Status.FAILED
        with pytest.raises(RoomFailed, match="replica 0 of 2, and this is 1"):
            wrong.failure_exception()
        assert RoomSender(two, "", 4, req_has_disagg_prefill_dp_rank=True).poll() != Status.FAILED


@pytest.mark.parametrize("step", [1, 2], ids=["contiguous", "fragmented"])
def test_a_chunk_is_one_write_of_whole_pages(step: int) -> None:
    num_pages, page, num_chunks = 8, 4, 2
    with pair() as both:
        ((source, sending),), ((target, receiving),) = both.prefill(1, page), both.decode(1, page)
        pages = list(range(0, step * num_pages, step))
        (into,) = receivers(both, [(target, receiving)], 5, request(num_pages * page))
        into.send_metadata(np.array(pages, np.int32), 0, [])
        (out,) = senders([(source, sending)], 5, request(num_pages * page), num_pages)
        until(lambda: out.poll() == Status.WAITING)
        source.compute(pages, num_pages * page, seed=1)
        source.rows.rooms[1, 0] = 5
        half = num_pages // num_chunks
        for chunk in (pages[:half], pages[half:]):
            last: list[Any] | None = [] if chunk[-1] == pages[-1] else None
            out.send(np.array(chunk, np.int32), last, num_kv_tokens=half * page)
        until(lambda: agreed([into, out]) == Status.DONE)
        assert np.array_equal(
            target.found(pages, num_pages * page), source.wanted(num_pages * page, 1)
        )
        modes = sending.endpoint.stats.modes
        assert modes[TransferMode.RUNS].writes == num_chunks
        assert sum(mode.writes for mode in modes.values()) == num_chunks


@pytest.mark.parametrize("room", [0, None])
def test_room_ids_of_zero_are_rejected(room: int | None) -> None:
    with pair() as both:
        both.prefill(1, 4)
        receiver = RoomReceiver(both.decode(1, 4)[0][1], both.address, room)
        with pytest.raises(RoomFailed, match="above 0"):
            receiver.failure_exception()


def test_an_unreachable_bootstrap_address_fails_the_room() -> None:
    with pair() as both:
        both.prefill(1, 4)
        ((_, manager),) = both.decode(1, 4)
        assert not manager.try_ensure_parallel_info("127.0.0.1:1")
        assert not manager.try_ensure_parallel_info("not an address")
        for address in ("127.0.0.1:1", "not an address"):
            receiver = RoomReceiver(manager, address, 5)
            receiver.abort()
            assert receiver.poll() == Status.FAILED
            with pytest.raises(RoomFailed, match="cannot be used"):
                receiver.failure_exception()


def test_an_open_room_is_not_opened_twice() -> None:
    with pair() as both:
        ((_, manager),) = both.prefill(1, 4)
        first, second = RoomSender(manager, "", 5), RoomSender(manager, "", 5)
        assert (first.poll(), second.poll()) == (Status.CONNECTING, Status.FAILED)


def test_two_ranks_swap_their_roles_several_times() -> None:
    """SGLang keeps the pools, and makes a manager of the other role for them."""

    def settings(rank: Rank, name: str, discovery: str | None) -> RankSettings:
        return replace(rank.settings(Replica(name, 0, 1), discovery, ENOUGH_S), transport="nixl")

    with pair() as both:
        ranks = [Rank(tp=1, tp_rank=0, heads=4, page=4) for _ in range(2)]
        pages, num_tokens = [3, 1, 2], 10
        for turn in range(4):
            source, target = ranks[turn % 2], ranks[1 - turn % 2]
            prefill_name, decode_name = f"server-{turn % 2}", f"decode-server-{1 - turn % 2}"
            sending = PrefillManager(SimpleNamespace(), settings(source, prefill_name, both.url))
            receiving = DecodeManager(SimpleNamespace(), settings(target, decode_name, None))
            until(lambda manager=receiving: manager.try_ensure_parallel_info(both.address))
            (into,) = receivers(both, [(target, receiving)], 7, request(num_tokens, turn))
            into.send_metadata(pages, 0, [])
            (out,) = senders([(source, sending)], 7, request(num_tokens, turn), len(pages))
            source.compute(pages, num_tokens, turn)
            source.rows.rooms[1, 0] = 7
            out.send(pages, [], num_kv_tokens=num_tokens)
            until(lambda ends=(into, out): agreed(ends) == Status.DONE)
            expected = source.wanted(num_tokens, turn)
            assert np.array_equal(target.found(pages, num_tokens), expected)
            into.clear()
            sending.teardown()
            receiving.teardown()
            assert receiving.prefill_info_table.get(both.address) is None


def test_a_role_switch_fails_if_a_peer_may_still_use_the_pools() -> None:
    class UnprovenEndpoint:
        def close(self) -> bool:
            return False

    with pair() as both:
        ((_, manager),) = both.prefill(1, 4)
        manager.close()
        manager.endpoint = UnprovenEndpoint()
        with pytest.raises(KvferryError, match=r"sglang/here/dp0of1 may still .* restart"):
            manager.teardown()
