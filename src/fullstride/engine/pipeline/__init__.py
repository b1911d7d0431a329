"""Pipelines: a model cut to a rank's stages, and the executor that walks a schedule's actions."""
