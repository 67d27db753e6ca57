"""Managers: the endpoint of one scheduler rank, with what SGLang asks of it beside rooms.

A prefill server's ranks are sources, a decode server's targets. SGLang makes one manager a
scheduler and keeps it; it is the scheduler thread's.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvferry import Incoming, InstanceView, Outgoing, SourceEndpoint, TargetEndpoint
from kvferry.connectors.sglang.geometry import KV, WINDOW, layout_of, memory_of
from kvferry.connectors.sglang.index_keys import demand_same_pages
from kvferry.connectors.sglang.prefill_registry import PrefillRegistry
from kvferry.connectors.sglang.prompts import Prompt, prompt_of
from kvferry.connectors.sglang.settings import RankSettings
from kvferry.connectors.sglang.states import row_of
from kvferry.connectors.sglang.windows import window_pages

log = logging.getLogger("kvferry.connectors.sglang")


class Offered(NamedTuple):
    """Where a request's cache is to go: pages behind a prefix, a state row, pages of a window."""

    prefix: int
    pages: list[int]
    state: int | None = None
    window: Sequence[int] = ()


class RankManager:
    """What both sides' managers have."""

    supports_host_destination = False
    supports_role_switch = False

    def __init__(self, kv_args: Any, settings: RankSettings) -> None:
        self.kv_args = kv_args
        self.settings = settings

    def _endpoint_settings(self) -> dict[str, Any]:
        settings = self.settings
        return {
            "name": str(settings.replica),
            "rank": settings.cache.place.rank,
            "model": settings.model,
            "transport": settings.transport,
            "key": settings.key,
            "config": settings.config,
        }

    def prompt_of(self, req: Any) -> Prompt:
        """What is computed for a request."""
        return prompt_of(req, model=self.settings.model, dtype=self.settings.dtype)

    def state_row(self, state_indices: Sequence[Any] | None) -> int | None:
        """A request's row of linear-attention layers; None where the model has none."""
        return row_of(state_indices) if self.settings.cache.states else None

    def window_indices(self, state_indices: Sequence[Any] | None) -> list[int]:
        """A request's pages of sliding-window layers, as SGLang names them."""
        return [] if self.settings.cache.window is None else _named(state_indices)

    def demand_same_pages(self, pages: list[int], state_indices: Sequence[Any] | None) -> None:
        """Index keys and block scales lie in the pages of K and V, which SGLang names again."""
        if self.settings.cache.names_pages_twice:
            demand_same_pages(pages, _named(state_indices))

    def complain(self, room: int) -> None:
        """A room did not end although it was given up."""
        log.error("not-ended room=%s endpoint=%s", room, self.settings.replica)


def _named(state_indices: Sequence[Any] | None) -> list[int]:
    """The pages of the one kind of state that there is."""
    if not state_indices:
        return []
    pages: list[int] = np.asarray(state_indices[0]).reshape(-1).tolist()
    return pages


class PrefillManager(RankManager):
    """One prefill rank: a source, registered at its server's bootstrap port."""

    def __init__(self, kv_args: Any, settings: RankSettings) -> None:
        super().__init__(kv_args, settings)
        cache = settings.cache
        self.endpoint = SourceEndpoint(
            layout_of(cache),
            memory_of(cache),
            discovery=settings.discovery,
            **self._endpoint_settings(),
        )

    def register_to_bootstrap(self) -> None:
        """The endpoint has done so and keeps at it."""

    def open(self, room: int) -> Outgoing:
        """A request begins here: it may wait for decode, and then be computed and carried."""
        settings = self.settings
        return self.endpoint.open(room, deadline_s=settings.bootstrap_s + settings.waiting_s)

    def refusal(self, room: int, *, named: bool) -> str | None:
        """Why a request can't be this replica's; None if it can.

        A decode server that was not told another replica looks for a room at ``room % dp_size``.
        """
        replica = self.settings.replica
        if named or room % replica.size == replica.rank:
            return None
        return (
            f"room {room} belongs to replica {room % replica.size} of {replica.size}, and this "
            f"is {replica.rank}; route by the room, or name the replica in "
            f"disagg_prefill_dp_rank"
        )


class DecodeManager(RankManager):
    """One decode rank: a target. Its rooms by their number, until SGLang has let go of them."""

    # Pages of a failed room are held until nobody can write them any more.
    supports_deferred_decode_kv_release = True
    enable_deferred_decode_kv_release = True

    def __init__(self, kv_args: Any, settings: RankSettings) -> None:
        super().__init__(kv_args, settings)
        cache = settings.cache
        self.endpoint = TargetEndpoint(
            layout_of(cache), memory_of(cache), **self._endpoint_settings()
        )
        self.prefill_info_table = PrefillRegistry(settings.key)
        self._rooms: dict[int, Incoming] = {}

    def register_to_bootstrap(self) -> None:
        """Nobody looks for a decode server: it offers its pages itself."""

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Whether the prefill server there is known; asks it if not. SGLang tries 15 times."""
        return self.prefill_info_table.find(bootstrap_addr) is not None

    def should_verify_kv_checksum(self, bootstrap_addr: str) -> bool:
        """SGLang itself compares which layout a checksum was taken of."""
        return True

    def receive(self, room: int, view: InstanceView, prompt: Prompt, offered: Offered) -> Incoming:
        """Offer a room's pages to its prefill server."""
        self.settings.settled()
        window = self.settings.cache.window
        pages: list[int] | dict[str, list[int]] = offered.pages
        if window is not None:
            kept = window_pages(window, offered.window, prompt.num_tokens, offered.prefix)
            pages = {KV: offered.pages, WINDOW: kept}
        handle = self.endpoint.receive(
            room,
            prefill=view,
            tokens=prompt.num_tokens,
            prefix=offered.prefix,
            pages=pages,
            states=offered.state,
            deadline_s=self.settings.waiting_s,
            digest=prompt.digest,
        )
        self._rooms[room] = handle
        return handle

    def decline(self, room: int, view: InstanceView) -> None:
        """Tell a prefill server that a room which was never offered is not wanted."""
        self.settings.settled()
        self.endpoint.decline(room, prefill=view, deadline_s=self.settings.waiting_s)

    def let_go(self, room: int, handle: Incoming) -> None:
        """SGLang has done with a room."""
        if self._rooms.get(room) is handle:
            del self._rooms[room]

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """Whether nobody can write a failed room's pages any more."""
        handle = self._rooms.get(bootstrap_room)
        return handle is None or handle.released

    def clear_deferred_abort_state(self, bootstrap_room: int) -> None:
        """Its receiver is cleared next, and that is all."""

    def submit_prefill_recompute(self, receiver: Any, payload: Any) -> None:
        """SGLang would have a retracted request computed again in the same room."""
        receiver.refuse(
            "retraction that recomputes at prefill is not supported; use "
            "--disaggregation-decode-retraction-backup"
        )
