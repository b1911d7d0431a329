"""What is wrong: `Finding`."""

from fullstride.doctor.finding import Finding

__all__ = ["Finding"]
