"""Discovery on etcd v3, through its JSON gateway.

One key per rank, ``PREFIX/instances/NAME/ranks/RANK``, holds the rank's record as JSON under an
etcd lease. etcd removes the key when the lease ends. A registration revokes the lease of the
incarnation that it replaces, so the replaced process learns it at its next renewal.

Readers derive instances from the keys with the same registry as the built-in service. The version
of a view is a digest of its content, so all readers agree on it.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
import math
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any
from urllib.parse import quote
from weakref import WeakSet

import aiohttp
import msgspec

from kvferry.discovery.address import EtcdAddress, parse_etcd_url
from kvferry.discovery.base import Discovery
from kvferry.discovery.records import (
    DiscoveryError,
    DiscoveryFault,
    InstanceView,
    RankRecord,
    Summaries,
)
from kvferry.discovery.registry import InstanceRegistry
from kvferry.errors import KvferryError
from kvferry.ids import Peer

log = logging.getLogger("kvferry.discovery")

CALL_S = 5.0
# For all keys below a prefix, tens of megabytes in a large cluster.
LIST_S = 30.0
# A watch that is behind for longer, without any event, is taken for lost.
LATE_S = 2.0
CLOSE_S, CLOSE_POLL_S = 2.0, 0.005
LOGIN = "auth/authenticate"
MAX_ANSWER_BYTES = 64 << 20
# An etcd cluster has no limits of kvferry's own.
NO_LIMIT = 1 << 40

Json = dict[str, Any]


class EtcdDiscovery(Discovery):
    """Ranks as keys of an etcd cluster. Any member answers; a lost one is replaced by the next."""

    def __init__(self, url: str) -> None:
        self._address = parse_etcd_url(url)
        self._gateway = _Gateway(self._address)
        # The lease of each rank that this object has registered.
        self._leases: dict[Peer, str] = {}
        self._mirror: _Mirror | None = None

    def __str__(self) -> str:
        return str(self._address)

    async def register(self, record: RankRecord, lease_s: float) -> None:
        """Put the record under a new lease, and revoke the lease that it replaces."""
        lease = await self._grant(lease_s)
        put = {
            "key": _encode(self._key(record.peer)),
            "value": _encode(msgspec.json.encode(record)),
            "lease": lease,
            "prev_kv": True,
        }
        answer = await self._gateway.call("kv/put", put)
        self._leases[record.peer] = lease
        replaced = answer.get("prev_kv", {}).get("lease", "0")
        if replaced not in ("0", lease):
            await self._revoke(replaced)

    async def renew(self, record: RankRecord, lease_s: float) -> float:
        """Keep the lease alive. Its length stays that of the registration."""
        lease = self._leases.get(record.peer)
        if lease is None:
            lease = await self._demand_own(record)
        answer = await self._gateway.call("lease/keepalive", {"ID": lease})
        if int(answer.get("result", {}).get("TTL", 0)) > 0:
            self._leases[record.peer] = lease
            return lease_s / 3
        self._leases.pop(record.peer, None)
        await self._demand_own(record)
        raise _no_lease(record)

    async def withdraw(self, record: RankRecord) -> None:
        """Delete the record, if it is still that of this incarnation."""
        key = _encode(self._key(record.peer))
        own = {"key": key, "target": "VALUE", "result": "EQUAL"}
        answer = await self._gateway.call(
            "kv/txn",
            {
                "compare": [own | {"value": _encode(msgspec.json.encode(record))}],
                "success": [{"request_delete_range": {"key": key}}],
            },
        )
        lease = self._leases.pop(record.peer, None)
        if not answer.get("succeeded"):
            await self._demand_own(record)
            raise _no_lease(record)
        if lease is not None:
            await self._revoke(lease)

    async def watch(self, name: str, version: str, wait_s: float) -> InstanceView | None:
        """Read the instance's keys, and again after each change of one of them."""
        end = asyncio.get_running_loop().time() + wait_s
        prefix = self._instance_prefix(name)
        while True:
            registry, revision = await self._read(prefix)
            view = _versioned(registry.resolve(name))
            if view is not None and view.version != version:
                return view
            remaining_s = end - asyncio.get_running_loop().time()
            gone = view is None and bool(version)
            if gone or remaining_s <= 0 or not await self._changed(prefix, revision, remaining_s):
                if view is not None:
                    return None
                raise DiscoveryError(DiscoveryFault.INCOMPLETE, registry.explain(name))

    async def list(self) -> Summaries:
        """Return the list from a mirror of all keys, which the first call makes."""
        if self._mirror is None or self._mirror.is_over:
            self._mirror = _Mirror(self._gateway, f"{self._address.prefix}/instances/")
        return await self._mirror.summaries()

    async def close(self) -> None:
        """Close the connections."""
        if self._mirror is not None:
            await self._mirror.close()
        await self._gateway.close()

    # ------------------------------------------------------------ keys and leases

    def _instance_prefix(self, name: str) -> str:
        return f"{self._address.prefix}/instances/{quote(name, safe='')}/ranks/"

    def _key(self, peer: Peer) -> str:
        return f"{self._instance_prefix(peer.instance)}{peer.rank}"

    async def _grant(self, lease_s: float) -> str:
        answer = await self._gateway.call("lease/grant", {"TTL": math.ceil(lease_s)})
        return str(answer["ID"])

    async def _revoke(self, lease: str) -> None:
        # It may have ended meanwhile, and ends by itself if etcd cannot be reached.
        with suppress(DiscoveryError):
            await self._gateway.call("lease/revoke", {"ID": lease})

    async def _demand_own(self, record: RankRecord) -> str:
        """Return the lease of a registered record; raise if it is missing or another's."""
        answer = await self._gateway.call("kv/range", {"key": _encode(self._key(record.peer))})
        for item in answer.get("kvs", ()):
            found = _decoded(item)
            if found is not None and found.incarnation != record.incarnation:
                raise DiscoveryError(
                    DiscoveryFault.REPLACED,
                    f"another process has registered as {record.peer}; "
                    f"give each its own name or rank",
                )
            return str(item.get("lease", "0"))
        raise _no_lease(record)

    # ------------------------------------------------------------ reading

    async def _read(self, prefix: str) -> tuple[InstanceRegistry, int]:
        """Return the records below a prefix as a registry, and the revision that was read."""
        answer = await self._gateway.call("kv/range", _range(prefix))
        registry = _new_registry()
        for record in filter(None, map(_decoded, answer.get("kvs", ()))):
            registry.register(record, 0.0, 0.0)
        return registry, int(answer["header"]["revision"])

    async def _changed(self, prefix: str, revision: int, wait_s: float) -> bool:
        """Wait for a change after ``revision``; return False when the time is over."""
        request = {"create_request": _range(prefix) | {"start_revision": str(revision + 1)}}
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                async with aclosing(self._gateway.stream("watch", request)) as answers:
                    async for answer in answers:
                        result = answer.get("result", {})
                        # A compacted revision cancels the watch: read anew.
                        if result.get("events") or result.get("canceled"):
                            return True
                raise DiscoveryError(
                    DiscoveryFault.UNREACHABLE, f"{self} ended a watch; it may be restarting"
                )
        return False


class _Mirror:
    """All records below a prefix, read once and kept up to date by one watch.

    Reading all keys for each list would cost etcd and the reader megabytes a second. A task reads
    and watches, so a caller that gives up does not interrupt it.
    """

    def __init__(self, gateway: _Gateway, prefix: str) -> None:
        self._gateway = gateway
        self._prefix = prefix
        self._registry = _new_registry()
        # By key. None for what another program has put there.
        self._records: dict[str, RankRecord | None] = {}
        self._views: dict[str, InstanceView] = {}
        self._listed: tuple[int, Summaries] | None = None
        self._is_loaded = False
        self._changed = asyncio.Event()
        self._num_changes = 0
        self._task = asyncio.create_task(self._run())
        # Without a caller that waits, nobody looks at the exception.
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())

    @property
    def is_over(self) -> bool:
        """Whether the watch has ended, so that another mirror is needed."""
        return self._task.done()

    async def close(self) -> None:
        """End the watch."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def summaries(self) -> Summaries:
        """Return the list, with every key that exists now. Raises ``DiscoveryError``."""
        while not self._is_loaded:
            await self._next_change()
        counting = _range(self._prefix) | {"count_only": True}
        answer = await self._gateway.call("kv/range", counting)
        num_changes = self._num_changes
        with suppress(TimeoutError):
            async with asyncio.timeout(LATE_S):
                while len(self._records) != int(answer.get("count", 0)):
                    await self._next_change()
        if num_changes == self._num_changes and len(self._records) != int(answer.get("count", 0)):
            # The watch hangs, such as on a member that was cut off.
            self._task.cancel()
            raise _lost_watch()
        return self._list()

    async def _next_change(self) -> None:
        self._changed.clear()
        changed = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait([changed, self._task], return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()
        if self._task.done():
            raise (None if self._task.cancelled() else self._task.exception()) or _lost_watch()

    async def _run(self) -> None:
        answer = await self._gateway.call("kv/range", _range(self._prefix), LIST_S)
        for item in answer.get("kvs", ()):
            self._put(item)
        self._is_loaded = True
        self._changed.set()
        revision = int(answer["header"]["revision"])
        request = _range(self._prefix) | {"start_revision": str(revision + 1)}
        async for change in self._gateway.stream("watch", {"create_request": request}):
            result = change.get("result", {})
            for event in result.get("events", ()):
                if event.get("type") == "DELETE":
                    self._delete(event["kv"]["key"])
                else:
                    self._put(event["kv"])
            self._num_changes += 1
            self._changed.set()
            if result.get("canceled"):
                break
        raise _lost_watch()

    def _put(self, item: Json) -> None:
        record = self._records[item["key"]] = _decoded(item)
        if record is not None:
            self._registry.register(record, 0.0, 0.0)

    def _delete(self, key: str) -> None:
        record = self._records.pop(key, None)
        if record is not None:
            with suppress(DiscoveryError):
                self._registry.withdraw(record.instance, record.rank, record.incarnation)

    def _list(self) -> Summaries:
        revision = self._registry.revision
        if self._listed is None or self._listed[0] != revision:
            lines = self._registry.summaries()
            self._views = {one.name: view for one in lines if (view := self._view_of(one.name))}
            versions = {name: view.version for name, view in self._views.items()}
            listed = [
                msgspec.structs.replace(one, version=versions.get(one.name, "")) for one in lines
            ]
            self._listed = revision, Summaries(tuple(listed))
        return self._listed[1]

    def _view_of(self, name: str) -> InstanceView | None:
        """Return an instance's view with its version, made anew only after a change."""
        view, known = self._registry.resolve(name), self._views.get(name)
        return known if view is not None and view.same_as(known) else _versioned(view)


class _Gateway:
    """Requests to the JSON gateway of one etcd cluster. Belongs to one event loop."""

    def __init__(self, address: EtcdAddress) -> None:
        self._address = address
        self._member = 0
        self._token: str | None = None
        self._session: aiohttp.ClientSession | None = None
        self._sockets: WeakSet[socket.socket] = WeakSet()

    async def close(self) -> None:
        """Close all connections, and wait until their sockets are closed."""
        if self._session is not None:
            await self._session.close()
        # aiohttp does not wait for TLS's closing handshake of a request that was cancelled.
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                while any(one.fileno() >= 0 for one in self._sockets):
                    await asyncio.sleep(CLOSE_POLL_S)

    async def call(self, method: str, body: Json, timeout_s: float = CALL_S) -> Json:
        """Return the first answer of a method. Tries each member once."""
        problem = ""
        for _ in self._address.members:
            try:
                async with self._post(method, body, timeout_s) as response:
                    answers = [json.loads(line) async for line in _lines(response)]
                if answers:
                    return dict(answers[0])
                problem = "it sent no answer"
            except (aiohttp.ClientError, OSError, ValueError) as error:
                problem = str(error) or type(error).__name__
            self._member = (self._member + 1) % len(self._address.members)
        raise DiscoveryError(
            DiscoveryFault.UNREACHABLE,
            f"cannot use {self._address}: {problem}; check the URL and the cluster",
        )

    async def stream(self, method: str, body: Json) -> AsyncGenerator[Json]:
        """Yield the answers of a method until the member ends the stream."""
        try:
            async with self._post(method, body, None) as response:
                async for line in _lines(response):
                    yield json.loads(line)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            self._member = (self._member + 1) % len(self._address.members)
            raise DiscoveryError(
                DiscoveryFault.UNREACHABLE, f"lost the connection to {self._address}: {error}"
            ) from None

    @asynccontextmanager
    async def _post(
        self, method: str, body: Json, timeout_s: float | None = CALL_S
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request and yield its successful response. Closes a connection in use at exit."""
        session = self._open_session()
        for attempt in range(2):
            async with session.post(
                f"{self._address.members[self._member]}/v3/{method}",
                json=body,
                headers=await self._authorization(method),
                timeout=aiohttp.ClientTimeout(total=timeout_s),
            ) as response:
                if response.status == 401 and attempt == 0:
                    # Tokens expire; ask for a new one.
                    self._token = None
                    continue
                if response.status >= 300:
                    answer = await response.content.read(4096)
                    raise _refusal(self._address, response.status, answer)
                yield response
                return

    async def _authorization(self, method: str) -> dict[str, str]:
        if self._address.user is None or method == LOGIN:
            return {}
        if self._token is None:
            login = {"name": self._address.user, "password": self._address.password or ""}
            async with self._post(LOGIN, login) as response:
                self._token = str(json.loads(await response.content.read())["token"])
        return {"Authorization": self._token}

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            # Each watch holds a connection, so connections are not limited here.
            connector = aiohttp.TCPConnector(
                limit=0, ssl=_tls(self._address), socket_factory=self._new_socket
            )
            self._session = aiohttp.ClientSession(connector=connector)
        return self._session

    def _new_socket(self, address: aiohttp.AddrInfoType) -> socket.socket:
        made = socket.socket(*address[:3])
        self._sockets.add(made)
        return made


def _new_registry() -> InstanceRegistry:
    return InstanceRegistry("", NO_LIMIT, NO_LIMIT)


def _tls(address: EtcdAddress) -> ssl.SSLContext | bool:
    if not address.tls:
        return True
    try:
        context = ssl.create_default_context(cafile=address.tls.get("ca"))
        if "cert" in address.tls:
            context.load_cert_chain(address.tls["cert"], address.tls.get("key"))
    except OSError as error:
        raise DiscoveryError(
            DiscoveryFault.UNREACHABLE,
            f"cannot read the TLS files of {address}: {error}; check their paths",
        ) from None
    return context


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the gateway's answers, one JSON document per line, of any length."""
    rest = b""
    async for part in response.content.iter_any():
        *lines, rest = (rest + part).split(b"\n")
        if len(rest) > MAX_ANSWER_BYTES:
            raise ValueError("the answer is too large")
        for line in lines:
            yield line
    if rest:
        yield rest


def _refusal(address: EtcdAddress, status: int, answer: bytes) -> DiscoveryError:
    try:
        message = str(json.loads(answer).get("message", ""))
    except ValueError:
        message = ""
    remedy = "check user and password" if status in (400, 401, 403) else "check the cluster"
    return DiscoveryError(
        DiscoveryFault.UNREACHABLE,
        f"{address} refuses a request (status {status} {message:.200}); {remedy}",
    )


def _range(prefix: str) -> Json:
    first = prefix.encode()
    return {"key": _encode(first), "range_end": _encode(first[:-1] + bytes([first[-1] + 1]))}


def _encode(data: str | bytes) -> str:
    return base64.b64encode(data.encode() if isinstance(data, str) else data).decode()


def _decoded(item: Json) -> RankRecord | None:
    """Return a key's record; None, with a log line, for what another program has put there."""
    try:
        return msgspec.json.decode(base64.b64decode(item["value"]), type=RankRecord)
    except (KeyError, ValueError, KvferryError) as error:
        key = base64.b64decode(item.get("key", "")).decode(errors="replace")
        log.warning("foreign-key key=%r error=%r", key[:200], str(error)[:200])
        return None


def _versioned(view: InstanceView | None) -> InstanceView | None:
    if view is None:
        return None
    plain = msgspec.json.encode(msgspec.structs.replace(view, version=""))
    return msgspec.structs.replace(view, version=hashlib.sha256(plain).hexdigest()[:32])


def _lost_watch() -> DiscoveryError:
    return DiscoveryError(
        DiscoveryFault.UNREACHABLE, "the watch of all instances has ended; etcd may be restarting"
    )


def _no_lease(record: RankRecord) -> DiscoveryError:
    return DiscoveryError(DiscoveryFault.NO_LEASE, f"{record.peer} is not registered; register it")
