"""Bytes: one pure function a row."""
