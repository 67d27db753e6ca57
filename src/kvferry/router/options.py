"""Options of a router, validated when created."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from kvferry import InputError, check_discovery_url, checked_address


class BalancePolicy(StrEnum):
    """How the router chooses among the workers that are up."""

    ROUND_ROBIN = "round-robin"
    LEAST_LOADED = "least-loaded"


class OnFailure(StrEnum):
    """Reaction to a failed transfer of a prompt's cache.

    RETRY tries another prefill worker, LOCAL lets the decode worker compute the prompt, FAIL
    returns the error to the client.
    """

    RETRY = "retry"
    LOCAL = "local"
    FAIL = "fail"


class EngineName(StrEnum):
    """Engine of the workers: the reference engine, or vLLM or SGLang with kvferry's connector."""

    KVFERRY = "kvferry"
    VLLM = "vllm"
    SGLANG = "sglang"


class FirstTokenFrom(StrEnum):
    """Which of vLLM's workers sends the first token of a stream to the client.

    PREFILL sends it as soon as the prompt is computed, where the answer stays exact; the transfer
    then begins after prefill. DECODE sends it after the transfer, which overlaps with prefill.
    """

    PREFILL = "prefill"
    DECODE = "decode"


# A healthy worker responds in milliseconds, unless its machine is overloaded.
CHECK_S = 1.5
MAX_REPLICAS = 4096
# A single missed check may be a busy machine.
MAX_MISSES = 2


class PullOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether and when the router has prefill workers pull a conversation's cache.

    ``fixed_s``, ``token_s`` and ``compute_token_s`` begin the cost model, which is then fitted to
    the answers of the reference engine: the seconds of any pull, those of a token in it, and those
    of a token to compute. ``max_pieces`` and ``max_bytes`` bound the memory.
    """

    enabled: bool = True
    fixed_s: float = 0.01
    token_s: float = 5e-6
    compute_token_s: float = 5e-5
    max_pieces: int = 65536
    max_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) < 0:
                raise InputError(f"{name} must be 0 or more, not {getattr(self, name):g}")


class RouterOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a router. It uses workers of the discovery service and at the given URLs.

    ``max_in_flight`` limits the requests at a decode worker that reports no limit of its own. If
    all workers are full, up to ``max_queued`` requests wait, each until ``queue_s`` from its start.
    ``deadline_s`` limits a whole request, ``room_s`` the prefill and transfer of one attempt. A
    worker that misses two health checks gets no new requests; after ``lost_s`` without a
    successful check its requests in flight fail. Prefill workers of vLLM are given as
    ``NAME=URL`` with their instance's name at discovery, or ``NAME*N=URL`` if N data-parallel
    replicas share the URL; those of SGLang as ``HOST:PORT=URL`` with their bootstrap address. With
    another ``decode_engine`` those of vLLM are given as ``HOST:PORT=URL``, too, with the address of
    a discovery service that has no other instance.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    discovery: str | None = None
    key: str | None = None
    engine: EngineName = EngineName.KVFERRY
    decode_engine: EngineName | None = None
    prefill_urls: tuple[str, ...] = ()
    decode_urls: tuple[str, ...] = ()
    policy: BalancePolicy = BalancePolicy.LEAST_LOADED
    on_failure: OnFailure = OnFailure.LOCAL
    first_token: FirstTokenFrom = FirstTokenFrom.PREFILL
    pull: PullOptions = PullOptions()
    attempts: int = 3
    max_in_flight: int | None = None
    max_queued: int = 256
    queue_s: float = 30.0
    deadline_s: float = 600.0
    room_s: float = 120.0
    poll_s: float = 1.0
    lost_s: float = 20.0

    @property
    def check_s(self) -> float:
        """Timeout of a health check."""
        return min(CHECK_S, self.lost_s)

    @property
    def left_out_s(self) -> float:
        """Longest time from a worker's last successful check until it gets no new requests."""
        return MAX_MISSES * (self.poll_s + self.check_s)

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise InputError(f"attempts must be at least 1, not {self.attempts}")
        if self.max_queued < 0:
            raise InputError(f"max_queued must be 0 or more, not {self.max_queued}")
        if self.max_in_flight is not None and self.max_in_flight < 1:
            raise InputError(
                f"max_in_flight must be at least 1, not {self.max_in_flight}; leave it out for none"
            )
        for name in ("deadline_s", "room_s", "poll_s", "lost_s", "queue_s"):
            if not 0 < getattr(self, name) <= 86400:
                raise InputError(
                    f"{name} must be above 0 and at most 86400, not {getattr(self, name):g}"
                )
        if self.discovery is not None:
            check_discovery_url(self.discovery)
        for text in (*self.prefill_urls, *self.decode_urls):
            named_url(text)
        self._check_names()

    def _check_names(self) -> None:
        is_pair = self.decode_engine not in (None, self.engine)
        if is_pair and EngineName.KVFERRY in (self.engine, self.decode_engine):
            raise InputError(
                "the router pairs vLLM and SGLang with each other only; leave out decode_engine"
            )
        for text in self.prefill_urls:
            name = named_url(text)[0]
            if is_pair and not name.rpartition(":")[2].isdecimal():
                raise InputError(
                    f"with two engines a prefill worker is named by the address of its discovery "
                    f"or bootstrap service; give {text!r:.200} as HOST:PORT=URL"
                )
            if is_pair:
                continue
            if self.engine is EngineName.VLLM and not name:
                raise InputError(
                    f"vLLM does not report its instance's name; give {text!r:.200} as "
                    f"NAME=URL, such as prefill-0=http://10.0.0.2:8000"
                )
            if self.engine is EngineName.VLLM:
                replicated(name)
            if self.engine is EngineName.SGLANG and not name.rpartition(":")[2].isdecimal():
                raise InputError(
                    f"SGLang does not report its bootstrap port; give {text!r:.200} as "
                    f"HOST:PORT=URL, such as 10.0.0.2:8998=http://10.0.0.2:30000"
                )


def named_url(text: str) -> tuple[str, str]:
    """Return a worker's name, empty if none is given, and its URL."""
    name, equals, url = text.partition("=")
    return (name, checked_url(url)) if equals else ("", checked_url(text))


def replicated(name: str) -> tuple[str, int]:
    """Return a vLLM prefill worker's name and its number of data-parallel replicas."""
    instance, star, count = name.rpartition("*")
    if not star:
        return name, 1
    if not (instance and count.isdecimal() and 1 < int(count) <= MAX_REPLICAS):
        raise InputError(
            f"{name!r:.200} has no valid number of replicas; write NAME*N, such as "
            f"prefill-0*2, with N from 2 to {MAX_REPLICAS}"
        )
    return instance, int(count)


def checked_url(url: str) -> str:
    """Return a worker's URL without a trailing slash."""
    return checked_address(url, "worker's address", "http://10.0.0.2:8100")
