"""A router's options: frozen, checked when made."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from kvferry import InputError, checked_address


class BalancePolicy(StrEnum):
    """How a worker is chosen among those that are up."""

    ROUND_ROBIN = "round-robin"
    LEAST_LOADED = "least-loaded"


class OnFailure(StrEnum):
    """What to do when a prompt's cache does not come: ask another prefill worker, let the
    decode worker compute the prompt itself, or answer with the reason.
    """

    RETRY = "retry"
    LOCAL = "local"
    FAIL = "fail"


class EngineName(StrEnum):
    """What the workers run: the reference engine, or vLLM or SGLang with kvferry inside."""

    KVFERRY = "kvferry"
    VLLM = "vllm"
    SGLANG = "sglang"


# A worker that is well answers in milliseconds, unless its machine has far too much to do.
CHECK_S = 1.5
MAX_REPLICAS = 4096
# One missed check may be a busy machine.
MOST_MISSES = 2


class RouterOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A router. It finds workers at the discovery service and at the addresses it is given.

    ``deadline_s`` bounds a whole request and ``room_s`` one attempt's prompt and
    transfer. A worker that has not said that it is well for ``lost_s`` is given up
    with everything that it was asked for; one that misses two checks is left out before.
    vLLM's prefill workers are given as ``NAME=URL``, with their instance's name at discovery,
    or ``NAME*N=URL`` where N data-parallel replicas share the address; SGLang's with their
    bootstrap address as the name.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    discovery: str | None = None
    key: str | None = None
    engine: EngineName = EngineName.KVFERRY
    prefill_urls: tuple[str, ...] = ()
    decode_urls: tuple[str, ...] = ()
    policy: BalancePolicy = BalancePolicy.LEAST_LOADED
    on_failure: OnFailure = OnFailure.LOCAL
    attempts: int = 3
    deadline_s: float = 600.0
    room_s: float = 120.0
    poll_s: float = 1.0
    lost_s: float = 20.0

    @property
    def check_s(self) -> float:
        """How long a worker may take to say how it is."""
        return min(CHECK_S, self.lost_s)

    @property
    def left_out_s(self) -> float:
        """From a worker's last sign to when it is left out, at most."""
        return MOST_MISSES * (self.poll_s + self.check_s)

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise InputError(f"attempts must be at least 1, not {self.attempts}")
        for name in ("deadline_s", "room_s", "poll_s", "lost_s"):
            if not 0 < getattr(self, name) <= 86400:
                raise InputError(
                    f"{name} must be above 0 and at most 86400, not {getattr(self, name):g}"
                )
        for text in (*self.prefill_urls, *self.decode_urls):
            named_url(text)
        self._demand_names()

    def _demand_names(self) -> None:
        for text in self.prefill_urls:
            name = named_url(text)[0]
            if self.engine is EngineName.VLLM and not name:
                raise InputError(
                    f"vLLM does not say what its instance is called; give {text!r:.200} as "
                    f"NAME=URL, such as prefill-0=http://10.0.0.2:8000"
                )
            if self.engine is EngineName.VLLM:
                replicated(name)
            if self.engine is EngineName.SGLANG and not name.rpartition(":")[2].isdecimal():
                raise InputError(
                    f"SGLang does not say where its bootstrap port is; give {text!r:.200} as "
                    f"HOST:PORT=URL, such as 10.0.0.2:8998=http://10.0.0.2:30000"
                )


def named_url(text: str) -> tuple[str, str]:
    """A worker's name, where one was given, and its address."""
    name, equals, url = text.partition("=")
    return (name, checked_url(url)) if equals else ("", checked_url(text))


def replicated(name: str) -> tuple[str, int]:
    """A vLLM prefill's name, and how many data-parallel replicas share its address."""
    instance, star, count = name.rpartition("*")
    if not star:
        return name, 1
    if not (instance and count.isdecimal() and 1 < int(count) <= MAX_REPLICAS):
        raise InputError(
            f"{name!r:.200} does not say how many replicas there are; write NAME*N, such as "
            f"prefill-0*2, with N from 2 to {MAX_REPLICAS}"
        )
    return instance, int(count)


def checked_url(url: str) -> str:
    """The address of a worker, without a slash at its end."""
    return checked_address(url, "worker's address", "http://10.0.0.2:8100")
