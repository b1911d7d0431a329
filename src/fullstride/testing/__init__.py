"""Fakes to test with, for this project and for its users."""
