"""The closed loop: `Trial`, the levers, the driver."""

from fullstride.tune.trial import Trial

__all__ = ["Trial"]
