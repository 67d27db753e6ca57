"""Copies on a GPU, for whoever names a device and need not know what copies there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.regions import Device

if TYPE_CHECKING:
    from kvferry.memory.copy.gpu import GpuCopier


def copier_on(device: Device) -> GpuCopier:
    """What copies on that GPU, ready; waiting for its copies costs no core."""
    from kvferry.memory.copy.gpu import GpuCopier  # noqa: PLC0415 - needs torch, triton and a driver

    copier = GpuCopier(device, yields=True)
    copier.warm_up()
    return copier
