"""Seconds: one pure function a term."""
