"""Starting workers: `Job`."""

from fullstride.launch.job import Job

__all__ = ["Job"]
