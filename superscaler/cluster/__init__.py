"""Devices and the servers they are in: what a plan is compiled for."""

from __future__ import annotations

from superscaler.cluster.cluster import Cluster, Device
from superscaler.cluster.presets import LOCAL, PRESETS, DeviceKind

__all__ = ["LOCAL", "PRESETS", "Cluster", "Device", "DeviceKind"]
