"""A small cluster for the tests of the verbs."""

import pytest

from fullstride.cluster.cluster import Cluster, Device, Figure, Host, Link, NodeGroup


@pytest.fixture
def cluster():
    figure = Figure(value=1e9, source="assumed")
    device = Device(kind="cpu", name="some CPU", memory_bytes=Figure(value=8e9, source="measured"))
    host = Host(cpu_name="some CPU", num_cores=2, memory_bytes=16 * 10**9)
    link = Link(name="loopback", bandwidth=figure, latency=figure)
    return Cluster(name="here", groups=(NodeGroup(count=1, num_devices=2, device=device, host=host, link=link),))
