"""Small values built by hand: a Llama-shaped model, a host without GPUs, a node of eight."""

import types
import typing

from hypothesis import strategies as st
from msgspec.structs import replace

from fullstride.cluster.cluster import Cluster, Device, Figure, Host, Link, NodeGroup
from fullstride.model.spec import Attention, Matmul, ModelSpec, Parameter, Saved, Stack, Sublayer
from fullstride.plan.plan import Batch, ModelRef, Plan, Workload


def figure(value):
    return Figure(value=value, source="datasheet")


def linear(name, n, k, saved=()):
    return Sublayer(
        name=name,
        kind="linear",
        parameters=(Parameter(name=f"{name}.weight", shape=(n, k), role="weight"),),
        matmuls=(Matmul(name=name, n=n, k=k),),
        saved=saved,
    )


def norm(name, hidden):
    return Sublayer(
        name=name,
        kind="norm",
        parameters=(Parameter(name=f"{name}.weight", shape=(hidden,), role="norm"),),
        saved=(
            Saved(name="input", elements=hidden, dtype="residual"),
            Saved(name="wide", elements=hidden, dtype="fp32", when="eager"),
        ),
        moved_elements=8 * hidden,
        fused_elements=2 * hidden,
        operators=6,
    )


def llama(hidden=64, blocks=4, heads=4, kv_heads=2, ffn=128, vocab=101, positions=256):
    size = hidden // heads
    kv = kv_heads * size
    block = (
        norm("norm1", hidden),
        linear("attn.qkv", hidden + 2 * kv, hidden, (Saved(name="in", elements=hidden, dtype="compute"),)),
        Sublayer(
            name="attn.core",
            kind="attention",
            attention=Attention(num_heads=heads, num_kv_heads=kv_heads, head_dim=size, value_dim=size),
            saved=(Saved(name="qkvo", elements=2 * hidden + 2 * kv, dtype="compute"),),
        ),
        linear("attn.out", hidden, hidden, (Saved(name="in", elements=hidden, dtype="compute"),)),
        norm("norm2", hidden),
        linear("mlp.gate_up", 2 * ffn, hidden, (Saved(name="in", elements=hidden, dtype="compute"),)),
        Sublayer(
            name="mlp.activation",
            kind="activation",
            saved=(
                Saved(name="gate_up", elements=2 * ffn, dtype="compute"),
                Saved(name="silu", elements=ffn, dtype="compute", when="eager"),
            ),
            moved_elements=5 * ffn,
            fused_elements=3 * ffn,
            operators=2,
        ),
        linear("mlp.down", hidden, ffn, (Saved(name="in", elements=ffn, dtype="compute"),)),
    )
    return ModelSpec(
        name="hand",
        family="llama",
        hidden_size=hidden,
        vocab_size=vocab,
        max_sequence=positions,
        tied_embeddings=False,
        embedding=(
            Sublayer(
                name="embedding", kind="embedding", parameters=(Parameter(name="w", shape=(vocab, hidden), role="embedding"),)
            ),
        ),
        stacks=(Stack(path="model.layers", first=0, count=blocks, sublayers=block),),
        tail=(
            norm("norm", hidden),
            Sublayer(
                name="head",
                kind="head",
                parameters=(Parameter(name="h", shape=(vocab, hidden), role="head"),),
                matmuls=(Matmul(name="head", n=vocab, k=hidden),),
                saved=(Saved(name="in", elements=hidden, dtype="compute"),),
            ),
            Sublayer(name="loss", kind="loss", operators=4),
        ),
    )


def whole_rows(spec, ranks):
    """Elements on the first of ranks that share out whole rows of each parameter."""
    stacks = [(stack.count, stack.sublayers) for stack in spec.stacks]
    parts = [(1, spec.embedding), *stacks, (1, spec.tail)]
    tensors = [(n, p) for n, sublayers in parts for s in sublayers for p in s.parameters]
    return sum(n * -(-p.shape[0] // ranks) * (p.count // p.shape[0]) for n, p in tensors)


def experts(count, per_token=2, **sizes):
    """A llama whose blocks end in a mixture of experts."""
    spec = llama(**sizes)
    stack = spec.stacks[0]
    hidden, ffn = spec.hidden_size, 32
    mixture = Sublayer(
        name="experts",
        kind="experts",
        parameters=(
            Parameter(name="up", shape=(count, 2 * ffn, hidden), role="expert"),
            Parameter(name="down", shape=(count, hidden, ffn), role="expert"),
        ),
        matmuls=(
            Matmul(name="up", n=2 * ffn, k=hidden, rows_per_token=per_token, groups=count),
            Matmul(name="down", n=hidden, k=ffn, rows_per_token=per_token, groups=count),
        ),
        saved=(Saved(name="in", elements=per_token * hidden, dtype="compute"),),
    )
    return replace(spec, stacks=(replace(stack, sublayers=(*stack.sublayers[:-3], mixture)),))


def gpus(num=8, memory=80e9, nodes=1):
    device = Device(
        kind="h100-sxm",
        name="NVIDIA H100",
        memory_bytes=figure(memory),
        peak_flops={"bf16": figure(989e12), "fp32": figure(67e12), "fp64": figure(67e12)},
        memory_bandwidth=figure(3.35e12),
    )
    host = Host(cpu_name="x", num_cores=64, memory_bytes=2**40, has_compiler=True)
    link = Link(name="nvlink4", bandwidth=figure(450e9), latency=figure(3e-6))
    network = Link(name="infiniband", bandwidth=figure(50e9), latency=figure(5e-6)) if nodes > 1 else None
    group = NodeGroup(count=nodes, num_devices=num, device=device, host=host, link=link, network=network)
    return Cluster(name="gpus", groups=(group,))


def cpus(num=2, cores=2, has_compiler=True, memory=8e9):
    device = Device(kind="cpu", name="cpu", memory_bytes=figure(memory))
    host = Host(cpu_name="x", num_cores=cores, memory_bytes=2**34, has_compiler=has_compiler)
    link = Link(name="loopback", bandwidth=figure(2e9), latency=figure(50e-6))
    return Cluster(name="host", groups=(NodeGroup(count=1, num_devices=num, device=device, host=host, link=link),))


def plan_of(**parts):
    """A legal plan on one rank, with some parts replaced."""
    base = {
        "model": ModelRef(source="tiny"),
        "workload": Workload(sequence_length=64, samples_per_step=8),
        "batch": Batch(micro_batch=8, accumulation=1),
    }
    return Plan(**{**base, **parts})


TEXT = st.text("abcµ\n\" '[]#=\\.\t", max_size=4)
PLAIN = {
    int: st.integers(-(2**50), 2**50),
    float: st.floats(allow_nan=False, allow_infinity=False, width=32),
    bool: st.booleans(),
    str: TEXT,
}


def random_field(hint):
    """Random values of the type of a plan's field."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*[random_field(argument) for argument in arguments])
    if origin is tuple:
        return st.lists(random_field(arguments[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(random_field(arguments[0]), random_field(arguments[1]), max_size=2)
    return PLAIN[hint]


def random_part(value_type):
    hints = typing.get_type_hints(value_type)
    fields = {name: random_field(hints[name]) for name in value_type.__struct_fields__}
    return st.fixed_dictionaries(fields).map(lambda content: value_type(**content))


def random_plans():
    """Any plan of the right types, however impossible."""
    hints = {name: hint for name, hint in typing.get_type_hints(Plan).items() if name in Plan.__struct_fields__}
    hints.pop("format")
    return st.fixed_dictionaries({name: random_part(hint) for name, hint in hints.items()}).map(lambda parts: Plan(**parts))
