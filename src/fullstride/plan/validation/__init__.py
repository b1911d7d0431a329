"""Predictions held against published runs and our own measurements."""

from __future__ import annotations

__all__: list[str] = []
