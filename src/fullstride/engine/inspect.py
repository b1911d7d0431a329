"""A ModelSpec from any `nn.Module` with a list of blocks, without memory for it and without running it.

python -m fullstride.engine.inspect SOURCE OUT.json [NAMED.json]

NAMED.json holds the parts that the user names, as `[model]` of a plan does.
"""

from __future__ import annotations

import copy
import sys
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode  # fake tensors have no public path; meta tensors know no autocast

from fullstride.engine import tracing, watching
from fullstride.engine.anatomy import Anatomy, find
from fullstride.engine.build import build_model
from fullstride.engine.tracing import Part, Tracer
from fullstride.errors import BadInput, FullstrideError, UsageError
from fullstride.files import read_json, write_json
from fullstride.model.assemble import CASTS, Tapes, assemble, merge
from fullstride.model.spec import Cast, ModelSpec, Stack, Sublayer
from fullstride.model.tape import Op, Tape, Tensor
from fullstride.plan.plan import ModelRef

_TRACED = "fullstride_trace"
_SAMPLES = (37, 41, 43, 47)
_LENGTHS = (101, 97, 89, 61, 31, 13, 7)


def spec_of_module(module: nn.Module, name: str, sequence_length: int, named: ModelRef | None = None) -> ModelSpec:
    """What a model is made of, found by tracing it on fake tensors; the module is left as it was.

    Kept tensors are those of CUDA: attention counts as fused where the model calls torch's scaled dot-product attention.

    Args:
        module: a causal language model: token ids [samples, tokens] in, logits out; parameters may be on the meta device.
        name: what to call it.
        sequence_length: tokens of a sample it must take; the trace uses fewer.
        named: which parts the user has named; none by default.

    Raises:
        BadInput: no list of blocks, no embedding, no part of a given name, or a forward that looks at values.
    """
    anatomy = find(module, named)
    samples, length = _sizes(module, anatomy, sequence_length)
    traces = {cast: _trace(module, anatomy, cast, samples, length, name) for cast in CASTS}
    blocks = [_block(module, traces, number, path) for number, path in enumerate(anatomy.blocks)]
    embedding, tail = _ends(module, anatomy, traces)
    vocab, hidden = module.get_parameter(f"{anatomy.embedding}.weight").shape
    return ModelSpec(
        name=name,
        family="module",
        hidden_size=hidden,
        vocab_size=vocab,
        max_sequence=_max_sequence(module, anatomy),
        tied_embeddings=anatomy.tied,
        embedding=embedding,
        stacks=_stacks(anatomy.block_list, blocks),
        tail=(*tail, *assemble(lambda tape: _loss(tape, vocab), compiles=False)),
    )


def _sizes(module: nn.Module, anatomy: Anatomy, sequence_length: int) -> tuple[int, int]:
    """Primes for samples and tokens that divide no size in the model and are not longer than it takes."""
    sizes = {size for tensor in (*module.parameters(), *module.buffers()) for size in tensor.shape}
    limit = min([sequence_length, *_position_rows(module, anatomy)])

    def pick(primes: tuple[int, ...], most: int) -> int:
        fit = [p for p in primes if p <= most and not any(size and size % p == 0 for size in sizes)]
        if not fit:
            raise BadInput(f"a sequence of {most} tokens is too short to be inspected", fix="give 7 tokens or more")
        return fit[0]

    return pick(_SAMPLES, max(_SAMPLES)), pick(_LENGTHS, limit)


def _position_rows(module: nn.Module, anatomy: Anatomy) -> list[int]:
    """Rows of embeddings that are not the token embedding: learned positions."""
    tables = [m for p, m in module.named_modules() if isinstance(m, nn.Embedding) and p != anatomy.embedding]
    return [int(t.num_embeddings) for t in tables]


def _max_sequence(module: nn.Module, anatomy: Anatomy) -> int:
    """The configuration's limit, else that of learned positions outside the blocks, else 0 for none known."""
    stated = getattr(getattr(module, "config", None), "max_position_embeddings", None)
    rows = _position_rows(module, anatomy)
    return int(stated) if isinstance(stated, int) else min(rows) if rows else 0


# -- tracing -------------------------------------------------------------------------------------------------------------


def _trace(module: nn.Module, anatomy: Anatomy, cast: Cast, samples: int, length: int, name: str) -> Tracer:
    tracer = Tracer(cast, samples, length)
    with FakeTensorMode(allow_non_fake_inputs=True):
        twin = _twin(module, cast)
        tracer.constants = {tracing.storage_key(t) for t in (*twin.parameters(), *twin.buffers())}
        _without_mask(twin, tracer)
        tokens = torch.zeros(samples, length, dtype=torch.int64)
        hooks = torch.autograd.graph.saved_tensors_hooks(_keeper(tracer), lambda t: t)
        auto = torch.autocast("cpu", dtype=torch.bfloat16) if cast == "autocast" else nullcontext()
        try:
            with watching.watch(tracer, twin, anatomy.blocks), auto, hooks, tracing.FusedAttention(tracer), tracer:
                twin(tokens)
        except FullstrideError:
            raise
        except Exception as error:  # the user's forward may raise anything
            line = (str(error).strip().splitlines() or ["no message"])[0]
            raise BadInput(
                f"{name}: forward on token ids [{samples}, {length}] failed: {type(error).__name__}: {line}",
                fix="forward must take token ids alone and not look at values",
            ) from error
    missing = [path for number, path in enumerate(anatomy.blocks) if number not in tracer.blocks]
    if missing:
        raise BadInput(f"{name}: {missing[0]} was never called by forward", fix="call every block as a module")
    return tracer


def _keeper(tracer: Tracer) -> Any:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        tracer.keep(tensor)
        return tensor

    return pack


def _twin(module: nn.Module, cast: Cast) -> nn.Module:
    """A copy on fake tensors, floating parameters in the cast's dtype; shared parameters stay shared."""
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        dtype = tensor.dtype
        if isinstance(tensor, nn.Parameter) and dtype.is_floating_point:
            dtype = torch.bfloat16 if cast == "weights" else torch.float32
        empty = torch.empty(tensor.shape, dtype=dtype)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    twin = copy.deepcopy(module, memo).train()
    config: Any = getattr(twin, "config", None)
    if config is not None:
        config.use_cache = False
    return twin


def _without_mask(twin: Any, tracer: Tracer) -> None:
    """Let a model of transformers call fused attention as it does on real tensors, where a plain causal mask is left out.

    On fake tensors transformers cannot see that positions are not packed and makes a mask, with which grouped keys are
    repeated. Its own registry takes an attention without masks, which also says each block's window.
    """
    if getattr(getattr(twin, "config", None), "_attn_implementation", None) != "sdpa":
        return
    from transformers import AttentionInterface, AttentionMaskInterface

    def attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **more: Any) -> tuple[Any, None]:
        tracer.window = int(more.get("sliding_window") or 0)
        grouped = key.shape[1] != query.shape[1]
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register(_TRACED, attend)
    AttentionMaskInterface.register(_TRACED, lambda *args, **kwargs: None)
    twin.set_attn_implementation(_TRACED)


# -- from traces to sublayers --------------------------------------------------------------------------------------------


def _block(module: nn.Module, traces: dict[Cast, Tracer], number: int, path: str) -> tuple[Sublayer, ...]:
    parts = {cast: tracer.blocks[number] for cast, tracer in traces.items()}
    _align(parts)
    for part in parts.values():
        watching.add_parameters(part, module, f"{path}.")
    return merge(watching.tapes_of(parts))


def _align(parts: dict[Cast, Part]) -> None:
    """Give all casts the same sublayers in the same order: a cast may run a module that makes no operator in another."""
    order = list(dict.fromkeys(path for part in parts.values() for path in part.sections))
    kinds = {path: part.eager.sections[i].kind for part in parts.values() for path, i in part.sections.items()}
    for part in parts.values():
        for path in order:
            part.section(path, kinds[path])
        moved = {part.sections[path]: new for new, path in enumerate(order)}
        for tape in (part.eager, part.compiled):
            tape.sections = [tape.sections[part.sections[path]] for path in order]
            for op in tape.ops:
                op.sub = moved[op.sub]
        part.sections = {path: new for new, path in enumerate(order)}


def _ends(module: nn.Module, anatomy: Anatomy, traces: dict[Cast, Tracer]) -> tuple[tuple[Sublayer, ...], tuple[Sublayer, ...]]:
    """Embedding and tail; both stay eager. What blocks share (rotary tables) is kept by the embedding's part."""
    first = {cast: tracer.parts[0] for cast, tracer in traces.items()}
    last = {cast: tracer.parts[-1] for cast, tracer in traces.items()}
    for cast, part in first.items():
        sub = part.section("shared", "rotary")
        for number, (elements, dtype, per) in enumerate(traces[cast].shared.values()):
            kept = Tensor(f"shared.{number}", elements, dtype, "source", sub, per=per)
            part.eager.ops.append(Op(sub, "view", (), kept, (kept,), launches=0))
    _align(first)
    _align(last)
    after = {owner for part in last.values() for owner in part.sections}
    for cast in traces:
        head = anatomy.head
        watching.add_parameters(
            first[cast], module, "", outside=(*anatomy.inside, *after), head=head, embedding=anatomy.embedding
        )
        tail_only = _outside(module, after, anatomy)
        watching.add_parameters(last[cast], module, "", outside=tail_only, head=head)
    _name_head(last, anatomy)
    return merge(_eager(first)), merge(_eager(last))


def _outside(module: nn.Module, after: set[str], anatomy: Anatomy) -> tuple[str, ...]:
    """Owners of parameters that do not belong to the tail."""
    owners = {full.rpartition(".")[0] for full, _ in module.named_parameters()}
    return tuple(owner for owner in owners if owner not in after or anatomy.holds(owner))


def _name_head(parts: dict[Cast, Part], anatomy: Anatomy) -> None:
    for part in parts.values():
        if anatomy.head in part.sections:
            for section in part.both(part.sections[anatomy.head]):
                section.kind = "head"


def _eager(parts: dict[Cast, Part]) -> Tapes:
    eager: Tapes = {("eager", cast): part.eager for cast, part in parts.items()}
    return {**eager, **{("compiled", cast): part.eager for cast, part in parts.items()}}


def _loss(tape: Tape, vocab: int) -> None:
    """The loss of transformers, which is used where the module has none: logits widened, log-softmax kept."""
    tape.at("loss", "loss")
    labels = tape.source("labels", 1, "int64", grad=False)
    logits = tape.source("logits", vocab, "compute", counted=False)
    log_probs = tape.softmax(tape.to(logits, tape.fp32), name="log_softmax")
    tape.op("nll", (log_probs, labels), 1, saves=(log_probs, labels), kind="reduction")


def _stacks(path: str, blocks: list[tuple[Sublayer, ...]]) -> tuple[Stack, ...]:
    stacks: list[Stack] = []
    for number, sublayers in enumerate(blocks):
        if stacks and stacks[-1].sublayers == sublayers:
            old = stacks[-1]
            stacks[-1] = Stack(path=path, first=old.first, count=old.count + 1, sublayers=sublayers)
        else:
            stacks.append(Stack(path=path, first=number, count=1, sublayers=sublayers))
    return tuple(stacks)


def main(argv: list[str] | None = None) -> int:
    """Write the ModelSpec of SOURCE to OUT.json; returns the exit code, errors go to stderr in one line."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        if len(arguments) not in (2, 3):
            raise UsageError(f"got {len(arguments)} arguments, need SOURCE and OUT.json", fix="inspect net.py:make model.json")
        source, out, *more = arguments
        named = read_json(more[0], ModelRef) if more else None
        module = build_model(source)
        write_json(out, spec_of_module(module, source, _LENGTHS[0], named))
    except FullstrideError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
