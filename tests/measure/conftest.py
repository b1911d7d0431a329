import pytest

from fullstride.cluster.cluster import Cluster, Device, Figure, Host, Link, NodeGroup
from fullstride.plan.plan import Batch, Layout, ModelRef, Plan, Shard, Workload


@pytest.fixture
def cluster():
    figure = Figure(value=80e9, source="datasheet")
    link = Link(name="nvlink", bandwidth=Figure(value=4e11, source="datasheet"), latency=Figure(value=1e-6, source="assumed"))
    device = Device(kind="gpu", name="GPU", memory_bytes=figure, peak_flops={"fp32": Figure(value=1e12, source="datasheet")})
    host = Host(cpu_name="cpu", num_cores=8, memory_bytes=2**36)
    return Cluster(name="here", groups=(NodeGroup(count=1, num_devices=2, device=device, host=host, link=link),))


@pytest.fixture
def plan():
    return Plan(
        model=ModelRef(source="tiny"),
        workload=Workload(sequence_length=100, samples_per_step=8),
        layout=Layout(dp_replicate=2),
        shard=Shard(carrier="ddp"),
        batch=Batch(micro_batch=2, accumulation=2),
    )
