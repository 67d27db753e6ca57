"""Selects the copier for a device without importing torch and triton early."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.regions import Device

if TYPE_CHECKING:
    from kvferry.memory.copy.gpu import GpuCopier


def copier_on(device: Device) -> GpuCopier:
    """Return a warmed-up copier for a GPU. Waiting for its copies yields the core."""
    from kvferry.memory.copy.gpu import GpuCopier  # noqa: PLC0415 - needs torch, triton and a driver

    copier = GpuCopier(device, yields=True)
    copier.warm_up()
    return copier
