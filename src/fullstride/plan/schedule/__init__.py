"""Pipeline schedules: lists of `Action` that the simulator prices and the executor runs."""

from fullstride.plan.schedule.action import Action

__all__ = ["Action"]
