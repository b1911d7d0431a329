"""The price of a pipeline whose waiting is simulated, for comparing schedules and stages that the closed forms take as alike.

A closed form knows ranks of equal work and enough micro-batches. The simulator knows this plan's schedule: with few
micro-batches, stages that differ or a schedule from a file, the two part.
"""

from __future__ import annotations

from msgspec.structs import replace

from fullstride.cluster.cluster import Cluster
from fullstride.errors import FullstrideError
from fullstride.model.spec import ModelSpec
from fullstride.plan.estimate import Estimate, Term
from fullstride.plan.pipeline import num_passes, plan_timeline, schedule_of
from fullstride.plan.plan import Plan
from fullstride.plan.price import price
from fullstride.plan.refine import MOST_PASSES

_BUBBLE, _MESSAGES = "pipeline bubble", "messages between stages"


def simulated_price(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Estimate:
    """`price`, with the bubble as the busiest rank has it in the simulator, from its first forward to the last backward of any.

    Without a pipeline, with too many passes of stages to simulate or with a schedule that cannot be made it is `price` itself.
    """
    estimate = price(plan, spec, cluster)
    if plan.layout.pp == 1 or num_passes(plan) > MOST_PASSES:
        return estimate
    try:
        timeline = plan_timeline(plan, spec, cluster, record=False)
    except FullstrideError:  # the rules, or whoever runs it, say why
        return estimate
    idle = timeline.span_seconds - max(rank.busy_seconds for rank in timeline.ranks)
    return _with_idle(estimate, max(0.0, idle), f"simulated, {schedule_of(plan)}")


def _with_idle(estimate: Estimate, idle: float, source: str) -> Estimate:
    """Waiting is for messages first, as far as they are waited for at all; the rest of it is the bubble."""
    sent = next((term for term in estimate.terms if term.name == _MESSAGES), None)
    waited = min(idle, sent.exposed_seconds) if sent else 0.0
    bubble = Term(
        name=_BUBBLE,
        kind="bubble",
        seconds=idle - waited,
        exposed_seconds=idle - waited,
        source=source,
        confidence="modelled",
    )
    others = (replace(term, exposed_seconds=waited) if term is sent else term for term in estimate.terms)
    # A bubble of nothing stays, too: it says that this is a pipeline.
    terms = (*(term for term in others if term.name != _BUBBLE), bubble)
    seconds = sum(term.exposed_seconds for term in terms)
    faster = estimate.step_seconds / seconds
    return replace(
        estimate,
        terms=terms,
        step_seconds=seconds,
        tokens_per_second=estimate.tokens_per_second * faster,
        mfu_full=estimate.mfu_full and estimate.mfu_full * faster,
        mfu_causal=estimate.mfu_causal and estimate.mfu_causal * faster,
    )
