"""Devices and the servers they are in: what a plan is compiled for."""

from superscaler.cluster.cluster import Cluster, Device
from superscaler.cluster.devices import PRESETS, DeviceKind
from superscaler.cluster.links import LINKS, LOCAL, Link, Links
from superscaler.cluster.mesh import Mesh

__all__ = ["LINKS", "LOCAL", "PRESETS", "Cluster", "Device", "DeviceKind", "Link", "Links", "Mesh"]
