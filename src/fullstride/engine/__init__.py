"""Carries out a Plan with torch. The only room that imports it."""

from fullstride.engine.run import Run

__all__ = ["Run"]
