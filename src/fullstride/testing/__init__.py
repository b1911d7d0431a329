"""Fakes and faults to test with, for this project and for its users."""

from fullstride.testing.clock import FakeClock

__all__ = ["FakeClock"]
