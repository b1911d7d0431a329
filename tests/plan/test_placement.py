from msgspec.structs import replace
from tests.plan.plan_values import figure, gpus, llama, plan_of

from fullstride.cluster.catalogue import DEVICES, assumed_cluster
from fullstride.plan.placement import devices_per_node, is_uneven, placement, slowest
from fullstride.plan.plan import Batch, Layout, ModelRef, Recipe, Shard, Workload
from fullstride.plan.price import price
from fullstride.plan.search import search

FOUR_NODES = gpus(8, nodes=4)


def words(cluster=FOUR_NODES, **degrees):
    return {place.axis: place for place in placement(plan_of(layout=Layout(**degrees)), cluster)}


def test_tensor_parallel_sits_in_a_node_and_stages_across():
    found = words(tp=8, pp=4)
    assert found["tp"].words == "tensor parallel 8: neighbouring devices of one node, over nvlink4 (450 GB/s a rank)"
    assert (found["tp"].in_node, found["tp"].link, found["tp"].stride) == (8, "nvlink4", 1)
    assert found["pp"].words == (
        "pipeline stages 4: across 4 nodes, one rank of a group on each, over infiniband (50.0 GB/s a rank)"
    )
    assert (found["pp"].in_node, found["pp"].stride) == (1, 8)


def test_axes_that_cross_nodes_use_the_network():
    found = words(tp=4, dp_shard=8)
    assert "2 ranks of a group in each of 4 nodes" in found["dp_shard"].words
    assert found["dp_shard"].link == "infiniband"
    found = words(tp=2, cp=4, dp_shard=4)
    assert found["cp"].words.startswith("context parallel 4: inside a node, every second device")
    assert words(tp=16, dp_shard=2)["tp"].link == "infiniband"


def test_the_order_of_axes_decides():
    first = placement(plan_of(layout=Layout(tp=4, pp=8, order=("tp", "dp_replicate", "dp_shard", "cp", "pp"))), FOUR_NODES)
    assert [place.axis for place in first] == ["pp", "tp"]
    assert first[0].link == "nvlink4"
    assert first[1].link == "infiniband"


def test_experts_lie_over_the_data_axes():
    found = words(tp=2, dp_shard=16, ep=4)
    assert (found["ep"].stride, found["ep"].link) == (2, "nvlink4")
    assert words(tp=2, dp_shard=16, ep=8)["ep"].link == "infiniband"


def test_one_machine_has_no_network():
    assert words(gpus(8), dp_shard=8)["dp_shard"].link == "nvlink4"
    assert placement(plan_of(), gpus(1)) == ()


def uneven(**changes):
    group = replace(FOUR_NODES.groups[0], count=2)
    return replace(FOUR_NODES, groups=(group, replace(group, **changes)))


def test_the_slowest_member_counts():
    assert slowest(FOUR_NODES) is FOUR_NODES
    assert not is_uneven(FOUR_NODES)
    old = DEVICES["a100-sxm-40"]
    mixed = uneven(device=old)
    assert is_uneven(mixed)
    assert slowest(mixed).device.memory_bytes.value == old.memory_bytes.value
    assert slowest(mixed).device.peak_flops["bf16"].value == old.peak_flops["bf16"].value
    assert "fp8" not in slowest(mixed).device.peak_flops
    link = replace(FOUR_NODES.groups[0].network, bandwidth=figure(5e9))
    assert slowest(uneven(network=link)).groups[0].network.bandwidth.value == 5e9
    narrow = uneven(num_devices=4)
    assert devices_per_node(narrow) == 4


def test_a_slow_link_or_device_makes_every_plan_slower():
    spec = llama(hidden=1024, blocks=4, heads=8, kv_heads=4, ffn=4096, vocab=8000, positions=4096)
    plan = plan_of(
        layout=Layout(dp_shard=32),
        shard=Shard(carrier="fsdp2", stage=3),
        batch=Batch(micro_batch=1),
        workload=Workload(sequence_length=2048, samples_per_step=32),
    )
    fast = price(plan, spec, FOUR_NODES).step_seconds
    link = replace(FOUR_NODES.groups[0].network, bandwidth=figure(1e9))
    assert price(plan, spec, uneven(network=link)).step_seconds > fast
    assert price(plan, spec, uneven(device=DEVICES["a100-sxm-80"])).step_seconds > fast
    assert price(plan, spec, uneven(device=DEVICES["a100-sxm-40"])).capacity_bytes == 40960 * 2**20


def test_a_search_over_uneven_nodes():
    spec = llama(hidden=256, blocks=4, heads=8, kv_heads=4, ffn=1024, vocab=8000, positions=4096)
    work = Workload(sequence_length=1024, samples_per_step=48)
    for cluster in (uneven(device=DEVICES["a100-sxm-40"]), uneven(num_devices=4), assumed_cluster("h100-sxm", 12, 8)):
        ranking = search(spec, cluster, ModelRef(source="x"), work, Recipe(), to_run=False)
        assert ranking.estimates[0].capacity_bytes == min(g.device.memory_bytes.value for g in cluster.groups)
        assert ranking.best[0].layout.world_size == cluster.num_devices
