"""Endpoints, ``kvferry plan`` and ``kvferry doctor`` use the same link costs."""

from __future__ import annotations

import pytest
from endpoint.fleets import HEADS, layout
from msgspec.structs import replace

from kvferry import EndpointConfig, LinkCost, SourceEndpoint
from kvferry.cli.doctor import DoctorRequest, cluster
from kvferry.cli.main import build_parser
from kvferry.cli.plan.command import read_cost_model
from kvferry.endpoint.link_costs import copy_speed
from kvferry.endpoint.setup import make_transport
from kvferry.memory.pools import Memory

LAYOUT = layout(HEADS)
SIDES = "--prefill tp=4 --decode tp=1 --layers 2 --kv-heads 4 --head-dim 64"


def at_start(transport: str, config: EndpointConfig) -> LinkCost:
    """The link cost of a real endpoint without a peer."""
    made = make_transport(transport)
    memory = Memory.allocate(LAYOUT, 0, 4, made.allocate)
    with SourceEndpoint(
        LAYOUT, memory, name="p", model="m", transport=made, config=config
    ) as source:
        return source.link_cost


@pytest.mark.parametrize(
    ("transport", "link"), [("nixl", "nixl-host"), ("mooncake", "mooncake"), ("shm", "shm")]
)
def test_plan_uses_the_default_costs_of_an_endpoint(transport: str, link: str) -> None:
    """All but the copy speed, which an endpoint that stages measures at its start."""
    planned = read_cost_model(link)
    copies = planned.copy_bytes_per_s if planned.maps_peer else copy_speed()
    assert at_start(transport, EndpointConfig()) == replace(planned, copy_bytes_per_s=copies)


def test_costs_can_be_configured() -> None:
    told = LinkCost(descriptor_s=1e-3, bytes_per_s=1e6, copy_bytes_per_s=1e6, slot_bytes=4096)
    config = EndpointConfig(link_cost=told)
    assert at_start("nixl", config) == told
    assert at_start("shm", config) == replace(told, maps_peer=True)


@pytest.mark.parametrize(
    ("transport", "device", "link"),
    [
        ("nixl", "cpu", "nixl-host"),
        ("nixl", "cuda", "nixl-gpu"),
        ("mooncake", "cpu", "mooncake"),
        ("shm", "cpu", "shm"),
        ("auto", "cuda", "cuda"),
    ],
)
def test_doctor_uses_the_same_costs_as_plan(transport: str, device: str, link: str) -> None:
    args = build_parser().parse_args(["doctor", *SIDES.split()])
    pairing = cluster.read_pairing(args, DoctorRequest(transport=transport, device=device))
    assert isinstance(pairing, cluster.Pairing)
    assert pairing.costs.link_cost == read_cost_model(link)
