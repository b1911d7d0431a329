"""Carries out a Plan with torch. The only room that imports it."""
