"""Managers: the endpoint of one scheduler rank, behind SGLang's manager interface.

Prefill ranks are sources, decode ranks targets. SGLang creates one manager per scheduler, and
calls it on the scheduler's thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from kvferry import (
    Incoming,
    InstanceView,
    KvferryError,
    Outgoing,
    SourceEndpoint,
    TargetEndpoint,
)
from kvferry.connectors.sglang.geometry import KV, WINDOW, layout_of, memory_of
from kvferry.connectors.sglang.index_keys import check_same_pages
from kvferry.connectors.sglang.prefill_registry import PrefillRegistry
from kvferry.connectors.sglang.prompts import Prompt, prompt_of
from kvferry.connectors.sglang.settings import RankSettings
from kvferry.connectors.sglang.states import row_of
from kvferry.connectors.sglang.windows import window_pages

log = logging.getLogger("kvferry.connectors.sglang")

E = TypeVar("E", SourceEndpoint, TargetEndpoint)


class RoomFailed(KvferryError):
    """A room failed; SGLang reads the attributes."""

    def __init__(self, room: int, reason: str, *, is_from_another_rank: bool = False) -> None:
        self.bootstrap_room = room
        self.failure_reason = reason
        self.is_from_another_rank = is_from_another_rank
        super().__init__(f"kvferry: room {room}: {reason}")


class OfferedPages(NamedTuple):
    """Destination of a request's cache: pages after the prefix, state row, window pages."""

    prefix: int
    pages: list[int]
    state: int | None = None
    window: Sequence[int] = ()


class RankManager(Generic[E]):
    """Common part of both managers."""

    supports_host_destination = False
    supports_role_switch = True
    # At decode, SGLang holds a failed room's pages until is_abort_release_safe().
    supports_deferred_decode_kv_release = True
    enable_deferred_decode_kv_release = True
    endpoint: E

    def __init__(self, kv_args: Any, settings: RankSettings) -> None:
        self.kv_args = kv_args
        self.settings = settings

    def _endpoint_settings(self) -> dict[str, Any]:
        settings = self.settings
        return {
            "name": str(settings.replica),
            "rank": settings.cache.position.rank,
            "model": settings.model,
            "transport": settings.transport,
            "key": settings.key,
            "config": settings.config,
        }

    def prompt_of(self, req: Any) -> Prompt:
        """Return a request's prompt."""
        return prompt_of(req, model=self.settings.model, dtype=self.settings.dtype)

    def state_row(self, state_indices: Sequence[Any] | None) -> int | None:
        """Return a request's state row; None if the model has no linear-attention layers."""
        return row_of(state_indices) if self.settings.cache.states else None

    def window_indices(self, state_indices: Sequence[Any] | None) -> list[int]:
        """Return the pages that SGLang lists for sliding-window layers."""
        return [] if self.settings.cache.window is None else _pages_in(state_indices)

    def check_same_pages(self, pages: list[int], state_indices: Sequence[Any] | None) -> None:
        """Check that index keys and block scales are in the same pages as K and V."""
        if self.settings.cache.names_pages_twice:
            check_same_pages(pages, _pages_in(state_indices))

    def should_verify_kv_checksum(self, bootstrap_addr: str) -> bool:
        """Return True: SGLang checks itself whether the layouts can be compared."""
        return True

    def close(self) -> bool:
        """Close the endpoint; return whether no peer can use this rank's pools any more."""
        free = self.endpoint.close()
        log.info("closed endpoint=%s free=%s", self.settings.replica, free)
        return free

    def teardown(self) -> None:
        """Close the endpoint before SGLang makes a manager for its other role.

        Raises ``KvferryError`` if a peer may still use the pools: SGLang then reports the server
        as unhealthy instead of reusing them.
        """
        if not self.close():
            raise KvferryError(
                f"a peer of {self.settings.replica} may still read or write its pools; restart "
                f"this server"
            )

    def log_not_ended(self, room: int) -> None:
        """Log that a room did not end after its abort."""
        log.error("not-ended room=%s endpoint=%s", room, self.settings.replica)


def _pages_in(state_indices: Sequence[Any] | None) -> list[int]:
    """Return the pages of the only kind of state."""
    if not state_indices:
        return []
    pages: list[int] = np.asarray(state_indices[0]).reshape(-1).tolist()
    return pages


class PrefillManager(RankManager[SourceEndpoint]):
    """Manager of a prefill rank: a source, registered at its server's bootstrap port."""

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
        """Do nothing: the endpoint registers itself."""

    def open(self, room: int) -> Outgoing:
        """Open a request's room; its deadline covers bootstrap, prefill and transfer."""
        return self.endpoint.open(room)

    def refusal(self, room: int, *, named: bool) -> str | None:
        """Return why a request is at the wrong replica; None if it is not.

        Unless the request names a replica, a decode server uses ``room % dp_size``.
        """
        replica = self.settings.replica
        if named or room % replica.size == replica.rank:
            return None
        return (
            f"room {room} belongs to replica {room % replica.size} of {replica.size}, and this "
            f"is {replica.rank}; route by the room, or name the replica in "
            f"disagg_prefill_dp_rank"
        )


class DecodeManager(RankManager[TargetEndpoint]):
    """Manager of a decode rank: a target, and its rooms until SGLang clears them."""

    def __init__(self, kv_args: Any, settings: RankSettings) -> None:
        super().__init__(kv_args, settings)
        cache = settings.cache
        self.endpoint = TargetEndpoint(
            layout_of(cache),
            memory_of(cache),
            # To report its status; rooms get their views from the registry.
            discovery=settings.discovery,
            **self._endpoint_settings(),
        )
        self.prefill_info_table = PrefillRegistry(settings.key, settings.discovery)
        self._rooms: dict[int, Incoming] = {}

    def register_to_bootstrap(self) -> None:
        """Do nothing: prefill servers do not look decode servers up."""

    def close(self) -> bool:
        """Close the endpoint, and forget the prefill servers."""
        free = super().close()
        self.prefill_info_table.close()
        return free

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Return whether the prefill server is known; query it if not. SGLang tries 15 times."""
        return self.prefill_info_table.find(bootstrap_addr) is not None

    def receive(
        self, room: int, view: InstanceView, prompt: Prompt, offered: OfferedPages
    ) -> Incoming:
        """Offer a room's pages to the prefill server."""
        self.settings.synchronize()
        cache, num_tokens = self.settings.cache, prompt.num_tokens
        own = cache.own_pages(offered.pages, offered.prefix, num_tokens)
        pages: list[int] | dict[str, list[int]] = own
        if cache.window is not None:
            kept = window_pages(cache.window, offered.window, num_tokens, offered.prefix)
            pages = {KV: own, WINDOW: kept}
        handle = self.endpoint.receive(
            room,
            prefill=view,
            tokens=num_tokens,
            prefix=offered.prefix,
            pages=pages,
            states=offered.state,
            digest=prompt.digest,
        )
        self._rooms[room] = handle
        return handle

    def decline(self, room: int, view: InstanceView) -> None:
        """Tell a prefill server that this room will get no offer."""
        self.settings.synchronize()
        self.endpoint.decline(room, prefill=view)

    def forget(self, room: int, handle: Incoming) -> None:
        """Drop a room that SGLang has cleared."""
        if self._rooms.get(room) is handle:
            del self._rooms[room]

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """Return whether no peer can write to a failed room's pages any more."""
        handle = self._rooms.get(bootstrap_room)
        return handle is None or handle.released

    def clear_deferred_abort_state(self, bootstrap_room: int) -> None:
        """Do nothing: clearing the receiver follows."""

    def submit_prefill_recompute(self, receiver: Any, payload: Any) -> None:
        """Fail a retracted request that SGLang would prefill again in the same room."""
        receiver.fail(
            "recomputing retracted requests at prefill is not supported; use "
            "--disaggregation-decode-retraction-backup"
        )
