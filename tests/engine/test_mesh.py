"""Groups of ranks."""

import datetime
from types import SimpleNamespace

import pytest
import torch

from fullstride.engine import mesh
from fullstride.plan.plan import Comm, Layout


@pytest.mark.parametrize("seconds", [8.0, 600.0])
def test_every_group_waits_no_longer_than_the_plan_says(seconds, monkeypatch):
    made = []
    monkeypatch.setattr(mesh, "_made", {})
    fake = SimpleNamespace(
        is_initialized=lambda: True,
        get_rank=lambda: 1,
        group=SimpleNamespace(WORLD=object()),
        new_subgroups_by_enumeration=lambda ranks, **options: made.append((ranks, options)) or (object(), None),
    )
    monkeypatch.setattr(mesh, "dist", fake)
    here = mesh.Mesh(Layout(tp=2, dp_shard=2), torch.device("cpu"), Comm(timeout_seconds=seconds))
    assert here.group("tp") is here.group("tp") is not None
    assert here.group("dp_shard") is not None
    wait = datetime.timedelta(seconds=seconds)
    assert made == [([[0, 1], [2, 3]], {"timeout": wait}), ([[0, 2], [1, 3]], {"timeout": wait})]
    assert here.group("dp_replicate") is None
