import math

from fullstride.events import EventWriter, StepEnd, read_events


def test_a_loss_that_is_not_finite_is_read_back(tmp_path):
    path = tmp_path / "rank00000.jsonl"
    writer = EventWriter(path)
    for loss in (math.nan, math.inf, 2.0):
        writer.write(StepEnd(time_ns=1, step=0, start_ns=0, samples=1, tokens=1, loss=loss, grad_norm=loss, lr=1e-3, order="x"))
    writer.close()
    losses = [event.loss for event in read_events(path)]
    assert math.isnan(losses[0])
    assert math.isnan(losses[1]), "JSON knows neither: both come back as NaN"
    assert losses[2] == 2.0
