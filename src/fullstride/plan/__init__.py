"""What to run: `Plan`, the rules it obeys, what it costs, and the search for a good one."""

from fullstride.plan.plan import Plan

__all__ = ["Plan"]
