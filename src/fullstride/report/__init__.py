"""Showing values to a person: `Document` and its writers."""

from fullstride.report.document import Document

__all__ = ["Document"]
