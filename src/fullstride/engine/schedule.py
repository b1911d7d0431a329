"""The learning rate as a function of the step."""

from __future__ import annotations

import math

from fullstride.plan.plan import Recipe


def learning_rate(step: int, recipe: Recipe) -> float:
    """Rate of step `step` (counted from 0): linear warm-up, then the schedule down to `min_lr_ratio` at the last step.

    The cosine is SGDR's (Loshchilov and Hutter, 2017) without restarts. Steps after the last keep the last rate.
    """
    if step < recipe.warmup_steps:
        return recipe.learning_rate * (step + 1) / recipe.warmup_steps
    length = max(recipe.steps - 1 - recipe.warmup_steps, 1)
    done = min((step - recipe.warmup_steps) / length, 1.0)
    shape = {"constant": 1.0, "linear": 1.0 - done, "cosine": (1.0 + math.cos(math.pi * done)) / 2.0}[recipe.schedule]
    if recipe.schedule == "constant":
        return recipe.learning_rate
    return recipe.learning_rate * (recipe.min_lr_ratio + (1.0 - recipe.min_lr_ratio) * shape)
