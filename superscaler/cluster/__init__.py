"""Devices and the servers that hold them: the target of a compilation."""

from superscaler.cluster.cluster import Cluster, Device
from superscaler.cluster.devices import PRESETS, DeviceKind
from superscaler.cluster.links import LINKS, LOCAL, Link, Links
from superscaler.cluster.mesh import Mesh

__all__ = ["LINKS", "LOCAL", "PRESETS", "Cluster", "Device", "DeviceKind", "Link", "Links", "Mesh"]
