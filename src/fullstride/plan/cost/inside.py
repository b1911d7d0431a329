"""Communication inside forward and backward: tensor, context and expert parallelism, one part and one micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fullstride.cluster import rates
from fullstride.cluster.cluster import Cluster
from fullstride.plan.adapted import adapted
from fullstride.plan.cost.exchanges import exchanges, stream_width
from fullstride.plan.facts import OTHER_CARRIERS, Part, compute_bytes, experts_cut, micro_tokens
from fullstride.plan.plan import Plan


class Moved(NamedTuple):
    """Seconds of communication in forward and backward, and what of them computation does not hide."""

    forward: float = 0.0
    backward: float = 0.0
    forward_exposed: float = 0.0
    backward_exposed: float = 0.0
    again: float = 0.0
    """Exposed seconds more where a block is made again in backward."""


NOTHING = Moved()


def ranks_inside(plan: Plan, cluster: Cluster, axis: str) -> int:
    """How many ranks of a group along this axis share a node: the axes after it in the layout's order come first."""
    layout = plan.layout
    degree: dict[str, int] = {name: getattr(layout, name) for name in layout.order}
    names: tuple[str, ...] = layout.order
    place = names.index(axis) if axis in names else len(names)
    stride = 1
    for name in names[place + 1 :]:
        stride *= degree[name]
    size = degree.get(axis, 1)
    return max(1, min(size, cluster.groups[0].num_devices // stride))


def data_inside(plan: Plan, cluster: Cluster) -> int:
    """Ranks of a sharding group (data and context ranks) on one node."""
    layout = plan.layout
    return max(1, min(layout.dp_shard * layout.cp, cluster.groups[0].num_devices // layout.tp))


def expert_weights(part: Part) -> int:
    """Elements of a part's experts."""
    return sum(m.n * m.k * m.groups for s in part.sublayers for m in s.matmuls if m.groups > 1)


def local_parameters(part: Part, plan: Plan) -> float:
    """Elements of one of these parts on one rank, before any sharding by data ranks."""
    sparse = expert_weights(part)
    return (part.parameters - sparse) / plan.layout.tp + sparse / experts_cut(plan, plan.layout.ep)


def adapter_parameters(part: Part, plan: Plan) -> int:
    """Elements of the low-rank adapters in one of these parts; 0 without any."""
    return plan.adapter.rank * sum(m.n + m.k for s in part.sublayers for m in adapted(plan, s))


def trained_parameters(part: Part, plan: Plan) -> float:
    """Elements of one of these parts that have gradients, on one rank, before any sharding by data ranks."""
    if plan.adapter.rank:
        return adapter_parameters(part, plan) / plan.layout.tp
    return local_parameters(part, plan) * part.trainable / max(1, part.parameters)


def _hidden(seconds: float, share: float, contention: float) -> float:
    return seconds * (1 - share + contention * share)


def overlaps(cluster: Cluster, tp: int) -> bool:
    """Whether exchange over `tp` ranks can run beside products: a CPU's cores do both."""
    return tp > 1 and cluster.device.kind != "cpu"


def tensor(part: Part, plan: Plan, cluster: Cluster) -> Moved:
    """Tensor parallelism: after each product cut along its inner size the parts are summed (Shoeybi et al., arXiv 1909.08053).

    With sequence parallelism an all-gather before and a reduce-scatter after move what the all-reduce did (arXiv 2205.05198);
    backward the same, and one more gather of the saved input, which the products of its gradient hide.
    """
    tp = plan.layout.tp
    if tp == 1:
        return NOTHING
    near, contention = ranks_inside(plan, cluster, "tp"), cluster.reached.contention

    def one(op: str, size: float) -> float:
        seconds = rates.collective_seconds(cluster, op, size, tp, per_node=near).seconds  # type: ignore[arg-type]
        return seconds + cluster.reached.meet_seconds

    wanted = plan.overlap.tensor and part.group == "blocks" and overlaps(cluster, tp)
    share = cluster.reached.tensor_hidden if wanted else 0.0
    if plan.shard.carrier in OTHER_CARRIERS:
        return _others(part, plan, one, share, contention)
    seconds, shown = dict.fromkeys(("forward", "backward", "input", "again"), 0.0), dict.fromkeys(("forward", "backward"), 0.0)
    for item in exchanges(part, plan):
        each = item.times * one(item.op, item.size)
        seconds[item.when] += each
        if item.when in shown:
            shown[item.when] += _hidden(each, share if item.split else 0.0, contention)
    beside = contention * seconds["input"]
    return Moved(
        seconds["forward"],
        seconds["backward"] + seconds["input"],
        shown["forward"],
        shown["backward"] + beside,
        seconds["again"] - beside if seconds["again"] else 0.0,
    )


def _others(part: Part, plan: Plan, one: Callable[[str, float], float], share: float, contention: float) -> Moved:
    """Of Megatron and DeepSpeed, whose embedding scatters what it sums. All of forward is done again with a block, as
    `Piece.forward` has it.
    """
    size = micro_tokens(plan) / plan.layout.cp * stream_width(part) * compute_bytes(plan)
    split = plan.layout.sequence_parallel
    pair = one("all_gather", size) + one("reduce_scatter", size) if split else one("all_reduce", size)
    sums = sum(s.kind == "linear" and s.name.rsplit(".", 1)[-1] in ("out", "down") for s in part.sublayers)
    forward = backward = sums * pair
    if part.group == "embedding":
        forward, backward = (one("reduce_scatter", size), one("all_gather", size)) if split else (one("all_reduce", size), 0.0)
    elif part.group == "head":
        forward, backward = (one("all_gather", size), one("reduce_scatter", size)) if split else (0.0, one("all_reduce", size))
    there, back = (_hidden(t, share, contention) for t in (forward, backward))
    return Moved(forward, backward, there, back, there if plan.recompute.mode == "full" else 0.0)


def context(part: Part, plan: Plan, cluster: Cluster, forward: float, backward: float) -> Moved:
    """Context parallelism by a ring: keys and values go round while queries meet them (Liu et al., arXiv 2310.01889).

    `forward` and `backward` are the attention's own seconds, which hide the messages. Backward sends gradients too.
    """
    cp = plan.layout.cp
    cores = [s.attention for s in part.sublayers if s.attention is not None]
    if cp == 1 or not cores:
        return NOTHING
    core = cores[0]
    each = core.num_kv_heads * (core.head_dim + core.value_dim) / plan.layout.tp
    size = micro_tokens(plan) / cp * each * compute_bytes(plan)
    near = ranks_inside(plan, cluster, "cp")
    message = _message(cluster, size, across=near < cp)
    there, back = (cp - 1) * message, 2 * (cp - 1) * message
    share, contention = cluster.reached.hidden_share, cluster.reached.contention
    shown = []
    for seconds, cover in ((there, forward), (back, backward)):
        hidden = min(seconds, share * cover)
        shown.append(seconds - hidden + contention * hidden)
    return Moved(there, back, *shown)


def _message(cluster: Cluster, size: float, *, across: bool) -> float:
    """Seconds of one message to a neighbour, which may be on another node."""
    return rates.collective_seconds(cluster, "send_recv", size, 2, per_node=1 if across else 2).seconds


def experts(part: Part, plan: Plan, cluster: Cluster) -> Moved:
    """Expert parallelism: each token's rows go to their experts and back, forward and backward (all-to-all, balanced)."""
    ep = plan.layout.ep
    rows = max((m.rows_per_token for s in part.sublayers for m in s.matmuls if m.groups > 1), default=0.0)
    if ep == 1 or not rows:
        return NOTHING
    tokens = micro_tokens(plan) / plan.layout.cp / plan.layout.tp
    each = tokens * stream_width(part) * compute_bytes(plan)
    near = max(1, min(ep, cluster.groups[0].num_devices // (plan.layout.tp * plan.layout.cp)))
    if plan.shard.carrier == "megatron" and near < ep:
        one = _once_a_node(cluster, each, rows, ep, near)
    else:
        one = rates.collective_seconds(cluster, "all_to_all", each * rows, ep, per_node=near).seconds
    share = cluster.reached.expert_hidden if plan.overlap.experts else 0.0
    shown = _hidden(2 * one, share, cluster.reached.contention)
    return Moved(2 * one, 2 * one, shown, shown)


def _once_a_node(cluster: Cluster, each: float, rows: float, ep: int, near: int) -> float:
    """Dispatchers such as DeepEP send a token once to each node that has one of its experts, and spread it there.

    With `rows` experts a token over n nodes, (n - 1) (1 - (1 - 1/n)^rows) other nodes get it, if experts are equally likely.
    """
    group, reached, nodes = cluster.groups[0], cluster.reached, -(-ep // near)
    if group.network is None:
        return rates.collective_seconds(cluster, "all_to_all", each * rows, ep).seconds
    others = (nodes - 1) * (1 - float((1 - 1 / nodes) ** rows))
    across = each * others / (group.network.bandwidth.value * reached.network_share)
    spread = each * rows * (near - 1) / near / (group.link.bandwidth.value * reached.link_share)
    return (nodes - 1) * group.network.latency.value + max(across, spread)
