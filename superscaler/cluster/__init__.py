"""Devices and the servers that hold them: the target of a compilation."""

from superscaler.cluster.cluster import Cluster, Device
from superscaler.cluster.devices import DeviceKind, Preset
from superscaler.cluster.links import LOCAL, Link, Links
from superscaler.cluster.mesh import Mesh
from superscaler.cluster.presets import PRESETS

__all__ = ["LOCAL", "PRESETS", "Cluster", "Device", "DeviceKind", "Link", "Links", "Mesh", "Preset"]
