"""The gated MLP of the Llama line."""

from __future__ import annotations

from fullstride.model.families import parts
from fullstride.model.families.shape import Shape
from fullstride.model.tape import Tape, Tensor


def gated_mlp(tape: Tape, x: Tensor, shape: Shape, ffn: int, *, path: str = "mlp", name: str = "mlp") -> Tensor:
    """down(act(gate(x)) up(x)) (GLU variants, arXiv 2002.05202)."""
    tape.at(f"{name}.gate_up", "linear")
    if shape.fused_projections:
        both = tape.linear(x, f"{path}.gate_up_proj", 2 * ffn, shape.hidden)
        gate, up = tape.view(both, ffn), tape.view(both, ffn)
    else:
        names = ("gate_proj", "up_proj")
        gate, up = (tape.linear(x, f"{path}.{n}", ffn, shape.hidden, bias=shape.mlp_bias) for n in names)
    tape.at(f"{name}.activation", "activation")
    product = tape.mul(parts.activation(tape, gate, shape.activation), up)
    tape.at(f"{name}.down", "linear")
    return tape.linear(product, f"{path}.down_proj", shape.hidden, ffn, bias=shape.mlp_bias)
