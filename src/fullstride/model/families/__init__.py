"""Families of networks: each writes the eager forward of its block on a tape."""

__all__: list[str] = []
