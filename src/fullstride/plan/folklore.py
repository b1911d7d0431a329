"""What is often said of a setting, and what is true: short notes that `explain` adds where a plan touches one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from fullstride.model.spec import ModelSpec
from fullstride.plan.cost.comm import volumes
from fullstride.plan.facts import BYTES, num_parameters, num_trainable
from fullstride.plan.plan import Plan
from fullstride.plan.schedule.bubble import bubble_share
from fullstride.units import format_percent

Note: TypeAlias = Callable[[Plan, ModelSpec], str]
"""The note, or an empty text where the plan does not touch it."""


def ring_bytes(num_bytes: float, ranks: int) -> float:
    """What a ring all-reduce moves out of each rank: 2 (n - 1) / n of the buffer (nccl-tests, PERFORMANCE.md)."""
    return 2 * (ranks - 1) / ranks * num_bytes


def gain(seconds: float, tokens: float, new_seconds: float, new_tokens: float) -> tuple[float, float]:
    """How much faster something became: by step times, and by tokens a second, which alone counts where steps differ."""
    return seconds / new_seconds, (new_tokens / new_seconds) / (tokens / seconds)


def gain_words(seconds: float, tokens: float, new_seconds: float, new_tokens: float) -> str:
    """The gain in words; says so where the tokens of a step are not the same."""
    by_step, by_token = gain(seconds, tokens, new_seconds, new_tokens)
    if tokens == new_tokens:
        return f"{by_token:.2f} times the tokens a second."
    return (
        f"{by_token:.2f} times the tokens a second. Step times alone say {by_step:.2f}, and compare unequal work: {tokens:.6g} "
        f"tokens a step against {new_tokens:.6g}."
    )


def _gigabytes(amount: float) -> str:
    return f"{amount / 1e9:.3g} GB"


def _gradient_bytes(plan: Plan, spec: ModelSpec) -> float:
    """Bytes of the gradients that one data-parallel group reduces."""
    share = plan.layout.tp * plan.layout.pp
    return num_trainable(spec) * BYTES[plan.precision.reduction] / share


def _volume(plan: Plan, spec: ModelSpec) -> str:
    ranks = plan.layout.data_parallel
    if ranks < 2 or plan.shard.stage > 1:
        return ""
    size = _gradient_bytes(plan, spec)
    return (
        f"One reduction of {_gigabytes(size)} of gradients over {ranks} ranks moves 2(n-1)/n of it out of each, "
        f"{_gigabytes(ring_bytes(size, ranks))}, not n times it ({_gigabytes(ranks * size)}): a ring passes pieces on."
    )


def _zero_2(plan: Plan, spec: ModelSpec) -> str:
    if plan.shard.stage != 2:
        return ""
    micro, moved = plan.batch.accumulation, volumes(plan, spec).total / num_parameters(spec)
    told = "ZeRO-2 does not double what is moved: plain data parallelism, ZeRO-1 and ZeRO-2 move 2P elements a step, ZeRO-3 3P"
    if micro == 1:
        return f"{told} (arXiv 1910.02054, section 7)."
    return (
        f"{told}. What costs here is that gradients are reduced for each of {micro} micro-batches: (m + 1)P, so {moved:.3g}P."
    )


def _zero_3(plan: Plan, spec: ModelSpec) -> str:
    if plan.shard.stage != 3:
        return ""
    moved = volumes(plan, spec).total / num_parameters(spec)
    return (
        f"ZeRO-3 moves {moved:.3g}P elements a step here (3P for one micro-batch "
        "where all is freed after forward). Freeing is a choice for each module, true by default for all but the root; what it "
        "costs depends on what hides it."
    )


def _bubble(plan: Plan, spec: ModelSpec) -> str:
    pipe, pp, count = plan.pipeline, plan.layout.pp, plan.batch.accumulation
    if pp == 1:
        return ""
    plain = (pp - 1) / (count + pp - 1)
    if pipe.schedule in ("gpipe", "1f1b"):
        return (
            f"1F1B and GPipe have the same bubble, (p-1)/(m+p-1) = {format_percent(plain)} of the whole; 1F1B bounds the "
            f"activations alive to {min(pp, count)} micro-batches instead of {count}."
        )
    share = bubble_share(pipe.schedule, pp, pipe.chunks, count)
    if share is None:
        return ""
    kind = f"{pipe.chunks} stages on each rank" if pipe.schedule in ("interleaved", "bfs") else "weight gradients put off"
    told = f"{kind.capitalize()} shrink the bubble to {format_percent(share)} of the whole"
    return f"{told}, where 1F1B has {format_percent(plain)}."


def _tensor(plan: Plan, spec: ModelSpec) -> str:
    tp = plan.layout.tp
    if tp == 1:
        return ""
    size = 2 * plan.workload.sequence_length // plan.layout.cp * plan.batch.micro_batch * spec.hidden_size
    return (
        "Tensor parallelism does not divide communication by its degree: it moves activations, four all-reduces (or gather and "
        f"scatter pairs) of 2sbh = {size / 2**20:.3g} MiB a layer and micro-batch, whatever tp is."
    )


def _recompute(plan: Plan, spec: ModelSpec) -> str:
    if plan.recompute.mode == "full":
        return (
            "Whole-block recompute keeps a block's input and nothing else: recompute of attention alone cannot use less memory."
        )
    if plan.recompute.mode == "attention" and plan.kernels.attention == "sdpa":
        return "Flash attention never stores its scores: recomputing attention under it saves next to nothing, and costs time."
    return ""


def _disk(plan: Plan, spec: ModelSpec) -> str:
    if not plan.optimizer.nvme_share:
        return ""
    moved = 24 * plan.optimizer.nvme_share * num_trainable(spec) / plan.layout.tp / plan.layout.pp
    return (
        f"AdamW states on disk are read and written every step, 24 bytes a parameter: {_gigabytes(moved)} here over all ranks "
        "that share one copy. Disks do not make a step faster."
    )


def _fp16(plan: Plan, spec: ModelSpec) -> str:
    if "fp16" not in (plan.precision.block, plan.precision.head):
        return ""
    return "fp16 is not faster than bf16: tensor cores run both at one rate, and fp16 needs a loss scaler."


VARIABLES: dict[str, Callable[[str], str]] = {
    "NCCL_IB_REGULARIZE": lambda value: "no such variable: silently ignored",
    "NCCL_NTHREADS": lambda value: (
        "" if value in ("64", "128", "256", "512") else "threads of a CUDA block, 64 to 512; others are refused and 512 is used"
    ),
    "NCCL_PROTO": lambda value: (
        ""
        if all(part.strip("^").lower() in ("ll", "ll128", "simple") for part in value.split(","))
        else "a protocol that is none (LL, LL128, Simple): from 2.24 initialisation fails, before it only the valid ones remain"
    ),
    "NCCL_ALGO": lambda value: (
        "valid, but shuts out NVLS, NVLSTree, CollNet and PAT" if set(value.lower().split(",")) <= {"ring", "tree"} else ""
    ),
    "NCCL_IB_GID_INDEX": lambda value: "RoCE only; bypasses dynamic selection (2.21 and newer), often wrong in containers",
    "NCCL_SOCKET_NTHREADS": lambda value: "concerns TCP sockets: inert beside InfiniBand",
}
"""What often-copied variables really do."""


def _variables(plan: Plan, spec: ModelSpec) -> str:
    told = [f"{name}={value}: {words}" for name, value in plan.comm.env.items() if (words := _variable(name, value))]
    return "; ".join(told) + "." if told else ""


def _variable(name: str, value: str) -> str:
    return VARIABLES[name](value) if name in VARIABLES else ""


NOTES: tuple[Note, ...] = (_volume, _zero_2, _zero_3, _bubble, _tensor, _recompute, _disk, _fp16, _variables)
"""All notes, in the order in which they are told."""


def notes(plan: Plan, spec: ModelSpec) -> tuple[str, ...]:
    """What a plan touches, a paragraph each."""
    return tuple(words for note in NOTES if (words := note(plan, spec)))
