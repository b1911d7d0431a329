"""The network: `ModelSpec`, from a configuration file or a preset."""

from fullstride.model.spec import ModelSpec

__all__ = ["ModelSpec"]
