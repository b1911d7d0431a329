"""What was measured: `Measurement`, the protocol, health figures, attribution, comparison."""

from fullstride.measure.measurement import Measurement

__all__ = ["Measurement"]
