"""Rows for Megatron-LM's own conventions (megatron/core/distributed, core/optimizer, tensor_parallel).

With the distributed optimizer a parameter takes 6 + 12/d bytes: bf16 weights and fp32 main gradients in contiguous buffers that
are there from the start, masters and moments over d data- and context-parallel ranks; without it, 18. Moments are made at the
first step.
"""

from __future__ import annotations

from fullstride.cluster.cluster import Cluster
from fullstride.model.spec import Parameter
from fullstride.plan.estimate import MomentName, Row
from fullstride.plan.facts import BYTES, compute_bytes, weight_bytes
from fullstride.plan.ledger.allocator import held
from fullstride.plan.ledger.cuts import local_elements, padded_vocabulary
from fullstride.plan.ledger.local import Local
from fullstride.plan.ledger.logits import predictions
from fullstride.plan.ledger.row import ALL, LATE, STANDING, assumed, row
from fullstride.plan.ledger.states import frozen, on_device
from fullstride.plan.stages import chunks_of

MIB = 2**20
BLACKWELL = ("b200", "gb200", "b300", "gb300")
HOPPER = ("h100", "h200", "gh200", "h800", "h20")
"""Torch gives each cuBLAS handle 32 MiB there and 8.125 MiB elsewhere (aten/src/ATen/cuda/CublasHandlePool.cpp). Transformer
Engine keeps 32 MiB for cuBLASLt from Hopper on and 4 MiB before (te/pytorch/module/base.py). On Hopper it takes cuDNN's
attention, which reads [sequence, batch] as it is; elsewhere flash-attention wants [batch, sequence], and its result is
copied back."""
HANDLES = 2
"""The forward thread and autograd's thread each have a cuBLAS handle with a workspace of its own."""
MASKED = ("megatron-te", "megatron-local")
"""Families whose data loader makes an attention mask."""
BUFFERED = 3
"""Transformer Engine's workspaces where communication of tensor parallelism overlaps (`_NUM_MAX_UB_STREAMS`)."""
STREAMS = 4
"""Streams that Transformer Engine spreads grouped products over, each with a workspace (te/pytorch/cpp_extensions/gemm.py)."""
UNITS = 2
"""Whole layers that stand gathered under Megatron-FSDP."""


def _is(cluster: Cluster, kinds: tuple[str, ...]) -> bool:
    return cluster.device.kind.split("-")[0] in kinds


def _on(local: Local) -> bool:
    return local.plan.shard.carrier == "megatron"


def weights(local: Local, cluster: Cluster) -> tuple[Row, ...]:
    """Weights in the compute dtype, whole below stage 3; masters where that is narrower than fp32."""
    plan, stage = local.plan, local.plan.shard.stage
    sizes = [part.count * part.parameters * weight_bytes(plan, part) for part in local.parts]
    whole = sum(sizes) if not plan.adapter.rank else sum(p.count * p.adapters * weight_bytes(plan, p) for p in local.parts)
    rows = list(frozen(local))
    if stage == 3:
        share = local.over_shards(local.count, local.experts) / max(1, local.count)
        block = local.largest_block
        rows.append(row("weights (shards)", "weights", whole * share, f"as computed with / {local.shards}", ALL, exact=True))
        ends = sum(part.parameters * weight_bytes(plan, part) for part in (local.embedding, local.head))
        rows.append(row("gathered embedding and head", "gathered", ends, "outside the sharded units, never freed", LATE))
        rows.append(row("gathered layers", "gathered", UNITS * block, f"{UNITS} layers", (*STANDING, "backward_end")))
    else:
        rows.append(row("weights", "weights", whole, "P in the compute dtype, in one buffer", ALL, exact=True))
    if compute_bytes(plan) < 4:
        size = local.over_shards(local.trainable, local.experts) * 4 * on_device(local)
        rows.append(row("weights (masters)", "master", size, f"P x 4 B / {local.shards}", ALL, exact=True))
    return tuple(rows)


def optimizer_states(local: Local, cluster: Cluster) -> tuple[Row, ...]:
    """AdamW's two moments, made in the first step."""
    each = BYTES[local.plan.precision.optimizer_state]
    size = local.over_shards(local.trainable, local.experts) * 2 * each * on_device(local)
    found = [row("AdamW moments", "optimizer", size, f"P x 2 x {each} B / {local.shards}", LATE, exact=True)]
    if (waste := held(local)) > 0:
        source = "tensors that share segments of 20 MiB leave pieces too small to be split"
        found.append(row("rounding of state tensors", "optimizer", waste, source, LATE))
    return tuple(found)


def gradients(local: Local, cluster: Cluster) -> tuple[Row, ...]:
    """Main gradients in buffers; with 2-byte ones the step makes fp32 copies of its share, which stay until the next step."""
    plan = local.plan
    each = BYTES[plan.precision.gradient]
    size: float = local.trainable * each
    if plan.shard.stage >= 2:
        size = local.over_shards(size, local.experts * each)
    found = [row("main gradients", "gradients", size, f"P x {each} B, one buffer", ALL, exact=True)]
    if each < 4 and compute_bytes(plan) < 4:
        copies = local.over_shards(local.trainable * 4, local.experts * 4)
        moments: tuple[MomentName, ...] = ("optimizer", "checkpoint")
        source = f"P x 4 B / {local.shards}, until gradients are next cleared"
        found.append(row("fp32 copies of gradients", "gradients", copies, source, moments, exact=True))
    return tuple(found)


def workspaces(local: Local, cluster: Cluster) -> tuple[Row, ...]:
    """What cuBLAS and Transformer Engine keep for matrix products, inside torch's allocator."""
    if not _on(local) or cluster.device.kind == "cpu":
        return ()
    big = _is(cluster, (*HOPPER, *BLACKWELL))
    each = _configured(local.plan.comm.env.get("CUBLAS_WORKSPACE_CONFIG", ""))
    each = each or (32 * MIB if _is(cluster, HOPPER) else 8 * MIB + 128 * 1024)
    found = [assumed("cuBLAS workspaces", "workspace", HANDLES * each, f"{HANDLES} handles x {each / MIB:g} MiB")]
    experts = {s.name for part in local.blocks for s in part.sublayers if s.kind == "experts"}
    if local.spec.family != "megatron-local" or experts:
        size = (32 if big else 4) * MIB
        copies = BUFFERED if local.plan.overlap.tensor else 1
        found.append(assumed("Transformer Engine's workspace", "workspace", copies * size, "te/pytorch/module/base.py"))
        if "experts" in experts:
            source = f"{STREAMS} streams of grouped products"
            found.append(assumed("workspaces of grouped products", "workspace", STREAMS * size, source))
    return tuple(found)


def stand_ins(local: Local, cluster: Cluster) -> tuple[Row, ...]:
    """With gradient accumulation fusion autograd still wants a gradient: Transformer Engine keeps an empty one of each shape.

    (`get_dummy_wgrad` in te/pytorch/module/_common.py and base.py: made once for each shape and dtype, never freed; Megatron's
    own head takes it from there too, core/tensor_parallel/layers.py.)
    """
    if not _on(local) or not local.plan.kernels.gradient_fusion or local.spec.family == "megatron-local":
        return ()
    shapes: dict[object, float] = {}
    for part in local.blocks:
        for sublayer in part.sublayers:
            for parameter in sublayer.parameters:
                if parameter.role in ("weight", "expert"):
                    size = local_elements(parameter, sublayer, local.plan, local.spec.vocab_size)
                    together = _held(local, parameter) if parameter.role == "expert" else 1
                    shapes[parameter.shape, sublayer.kind] = size / together
    if local.head.count:
        vocabulary = padded_vocabulary(local.plan, local.spec.vocab_size) // local.plan.layout.tp
        shapes["head"] = vocabulary * local.spec.hidden_size
    total = sum(shapes.values()) * compute_bytes(local.plan)
    return (row("stand-ins for weight gradients", "temporary", total, "one of each shape", LATE),)


def _held(local: Local, parameter: Parameter) -> int:
    """Experts of this parameter on the rank: they share one stand-in."""
    return max(1, parameter.shape[0] // local.plan.layout.ep)


def _configured(text: str) -> int:
    """Bytes that `CUBLAS_WORKSPACE_CONFIG` asks for: `:4096:8` is 8 pieces of 4096 KiB; 0 when it says nothing."""
    numbers = [int(word) for word in text.split(":") if word.isdigit()]
    return sum(size * count * 1024 for size, count in zip(numbers[::2], numbers[1::2], strict=False))


def attention_buffers(local: Local, cluster: Cluster) -> tuple[Row, ...]:
    """A global buffer that scores are made in (Megatron's own attention), and copies of flash-attention's result."""
    plan, found = local.plan, []
    cores = [(s.attention, part) for part in local.blocks for s in part.sublayers if s.attention is not None]
    if not _on(local) or not cores:
        return ()
    size = compute_bytes(plan)
    if plan.kernels.attention == "sdpa":
        if _is(cluster, HOPPER) or cluster.device.kind == "cpu":
            return ()
        copies = sum(part.count * part.alive * c.num_heads * c.value_dim for c, part in cores) / plan.layout.tp
        source = "flash-attention's [batch, sequence] result, copied back"
        if plan.recompute.mode == "none":
            found.append(row("attention's result, copied", "activations", copies * local.micro_tokens * size, source, STANDING))
        return tuple(found)
    length = plan.workload.sequence_length
    scores = max(c.num_heads for c, _ in cores) / plan.layout.tp * local.micro_tokens * length * size
    if local.spec.family == "megatron-local":
        return (row("score buffer", "temporary", scores, "heads x tokens x sequence, kept for ever", ALL),)
    return ()


def mask(local: Local, cluster: Cluster) -> tuple[Row, ...]:
    """The attention mask that the data loader makes: one byte a pair, on the first and last stage."""
    if not _on(local) or local.spec.family not in MASKED:
        return ()
    plan = local.plan
    size = local.micro_tokens * plan.workload.sequence_length
    return (row("attention mask", "temporary", size, "tokens x sequence x 1 B", (*STANDING, "backward_end")),)


def left_over(local: Local, cluster: Cluster) -> tuple[Row, ...]:
    """What the pipeline schedule still refers to between steps: each chunk's last input and its gradient, and the last mask."""
    plan = local.plan
    if not _on(local) or plan.layout.pp == 1:
        return ()
    ends = 2 if local.rank else 1  # the first stage has no input from another
    chunks = chunks_of(plan)
    size = chunks * ends * local.stream_tokens * local.spec.hidden_size * compute_bytes(plan)
    if local.spec.family in MASKED:
        size += local.micro_tokens * plan.workload.sequence_length
    return (row("left by the pipeline", "temporary", size, "inputs and gradients of chunks, mask", ("checkpoint",)),)


def graph_inputs(local: Local, cluster: Cluster) -> tuple[Row, ...]:
    """What CUDA graphs of layers read from fixed places, for each layer and micro-batch in flight: the stream and a mask
    (`get_layer_static_inputs` in core/transformer/transformer_layer.py; te/pytorch/graph.py shares them between those that are
    not), and the mask once more in the graphs' own pool (its size follows published bytes, not a line of code).
    """
    plan = local.plan
    if not _on(local) or not plan.compile.graphs:
        return ()
    held = sum(part.count * part.alive for part in local.blocks) + (predictions(local) if local.head.count else 0)
    mask = local.micro_tokens * plan.workload.sequence_length if local.spec.family in MASKED else 0.0
    each = local.stream_tokens * local.spec.hidden_size * compute_bytes(plan) + 2 * mask
    source = f"{held:g} x (tokens x hidden x {compute_bytes(plan)} B + 2 x tokens x sequence x 1 B)"
    return (row("inputs of CUDA graphs", "temporary", held * each, source, LATE),)


def fp8_copies(local: Local, cluster: Cluster) -> tuple[Row, ...]:
    """Weights in fp8 beside those in bf16: one for forward, and before Blackwell its transpose for backward."""
    plan = local.plan
    if plan.precision.fp8 == "off":
        return ()
    weights_of = sum(part.count * part.matmul_weights for part in local.blocks)
    copies = 1 if _is(cluster, BLACKWELL) else 2
    if not _on(local):
        largest = max((part.matmul_weights for part in local.blocks), default=0)
        return (
            row("weights in fp8", "temporary", copies * largest, "one block's, cast at each use", (*STANDING, "backward_end")),
        )
    return (row("weights in fp8", "weights", copies * weights_of, f"weights of products x {copies} B", LATE),)
