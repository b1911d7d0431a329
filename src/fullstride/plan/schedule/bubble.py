"""The bubble in closed form: the share of the whole pipeline time in which a rank idles, on average.

The whole runs from the first forward of any rank to the last backward of any; never is the bubble given over the ideal
time. Sources: Narayanan et al. (2021) for 1F1B and interleaving, Lamy-Poirier (2023) for breadth-first, Qi et al. (2023,
2024) for ZB-H1 and ZB-V. Stages alike and messages free; elsewhere simulate.
"""

from __future__ import annotations


def bubble_share(
    schedule: str,
    pp: int,
    chunks: int,
    micro_batches: int,
    forward: float = 1.0,
    input_grad: float = 1.0,
    weight_grad: float = 1.0,
    *,
    synchronised: bool = True,
) -> float | None:
    """Share of the whole that is bubble, between 0 and 1; None where no closed form is exact.

    Args:
        schedule: as in `generate`.
        pp: ranks of the pipeline.
        chunks: stages on each rank.
        micro_batches: of a step, the same for all stages.
        forward: seconds of one stage for one micro-batch.
        input_grad: the same for the gradient of inputs.
        weight_grad: the same for the gradient of weights; a whole backward is the sum of both.
        synchronised: whether the optimizer waits for all ranks, as clipping by the global norm makes it. Without it a rank
            that ended goes on, and ZB-V has no bubble.
    """
    if pp == 1:
        return 0.0
    if schedule in ("gpipe", "1f1b"):
        return (pp - 1) / (micro_batches + pp - 1)
    if schedule == "bfs":
        return (pp - 1) / (chunks * micro_batches + pp - 1) if micro_batches >= pp or chunks == 1 else None
    if schedule == "interleaved":
        return (pp - 1) / (chunks * micro_batches + pp - 1) if micro_batches % pp == 0 else None
    work = micro_batches * chunks * (forward + input_grad + weight_grad)
    if schedule == "zb-h1":
        lost = (pp - 1) * (forward + input_grad - weight_grad)
        exact = micro_batches >= pp and weight_grad <= min(forward, input_grad)
    else:
        lost = (pp - 1) * forward if synchronised else 0.0
        exact = micro_batches >= 2 * pp - 1 and forward == input_grad and forward / 2 <= weight_grad <= forward
    return lost / (work + lost) if exact else None
