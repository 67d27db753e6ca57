"""How a status service is found at a discovery service that has no page of its own, such as etcd.

It registers as an instance of one rank under a fixed name. Endpoints send their reports to it, and
commands and routers ask it for the cluster's status.
"""

from __future__ import annotations

from kvferry.discovery.base import Discovery
from kvferry.discovery.records import DiscoveryError, DiscoveryFault, InstanceView, RankRecord
from kvferry.layout.layout import Layout, Parallel
from kvferry.layout.spec import attention

STATUS_NAME = "status@kvferry"


def web_record(instance: str, url: str, incarnation: int) -> RankRecord:
    """Return the record of an instance that only announces a URL."""
    return RankRecord(
        instance=instance,
        rank=0,
        incarnation=incarnation,
        fingerprint="",
        # A record takes a layout; this one is never used.
        layout=Layout(attention(layers=1, kv_heads=1, head_dim=1), Parallel()),
        transport="http",
        control=url,
    )


def status_url_in(view: InstanceView | None) -> str:
    """Return the URL of a registered status service; empty without one."""
    return view.ranks[0].control if view is not None else ""


async def find_status_url(discovery: Discovery) -> str:
    """Return the URL of a cluster's status. Raises ``DiscoveryError``."""
    if discovery.status_url:
        return discovery.status_url
    try:
        return status_url_in(await discovery.watch(STATUS_NAME, "", 0.0))
    except DiscoveryError as error:
        if error.fault is not DiscoveryFault.INCOMPLETE:
            raise
        raise DiscoveryError(
            DiscoveryFault.INCOMPLETE,
            f"no status service has registered at {discovery}; start one with "
            f"`kvferry serve status --discovery URL`",
        ) from None
