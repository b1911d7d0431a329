"""From files on disk to this rank's samples of a step: read, tokenise once, pack, shuffle, load ahead."""

from fullstride.engine.data.loader import Loader

__all__ = ["Loader"]
