"""Devices and the servers that hold them: the target of a compilation."""

from superscaler.cluster.cluster import Cluster, Device
from superscaler.cluster.devices import DeviceKind, Preset
from superscaler.cluster.known import PRESETS
from superscaler.cluster.links import LOCAL, Link, Links
from superscaler.cluster.mesh import Mesh

__all__ = ["LOCAL", "PRESETS", "Cluster", "Device", "DeviceKind", "Link", "Links", "Mesh", "Preset"]
