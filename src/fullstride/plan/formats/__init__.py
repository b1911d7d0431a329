"""Other frameworks' configurations, both ways: what they say as a Plan, a Plan as they would say it, and what is left over."""

from fullstride.plan.formats.imported import Imported

__all__ = ["Imported"]
