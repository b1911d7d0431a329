"""The hardware: `Cluster`, how it is read, and what is known about devices and links."""

from fullstride.cluster.cluster import Cluster

__all__ = ["Cluster"]
