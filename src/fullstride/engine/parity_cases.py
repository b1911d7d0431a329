"""Cases of the parity check: a model, a Plan and the seed of its data."""

from __future__ import annotations

from typing import Any

from torch import nn

from fullstride.engine.build import from_config, parameters_on_meta
from fullstride.engine.parity_models import FAMILIES, WIDENING, LooseModel, PlainModel
from fullstride.files import Value
from fullstride.plan.plan import (
    Adapter,
    Batch,
    Compile,
    Layout,
    Loss,
    ModelRef,
    Overlap,
    Pipeline,
    Plan,
    Precision,
    Recipe,
    Recompute,
    Shard,
    Workload,
)

LENGTH = 12
"""Tokens of a sample."""


class Case(Value, frozen=True, kw_only=True):
    """A model, a Plan and the seed of its data."""

    name: str
    family: str
    tied: bool
    seed: int
    plan: Plan
    layers: int = 3
    """Blocks of the model."""
    changes: dict[str, Any] = {}
    """Entries of the family's configuration that are another here."""

    @property
    def vocab(self) -> int:
        """Size of the vocabulary."""
        return int({**FAMILIES[self.family], **self.changes}["vocab_size"])

    @property
    def widens(self) -> bool:
        """Whether the model itself computes parts in fp32."""
        return self.family in WIDENING


def model_of(case: Case) -> nn.Module:
    """The unmodified model of a case, parameters on meta."""
    if case.plan.model.named:
        with parameters_on_meta():
            return LooseModel(case.vocab, depth=case.layers, tied=case.tied)
    if case.family in ("plain", "modular"):
        with parameters_on_meta():
            return PlainModel(case.vocab, depth=case.layers, tied=case.tied, modular=case.family == "modular")
    layers: dict[str, Any] = {name: case.layers for name in ("num_hidden_layers", "n_layer") if name in FAMILIES[case.family]}
    told = {**FAMILIES[case.family], **layers, **case.changes, "tie_word_embeddings": case.tied}
    return from_config(told, case.family)


def make_case(
    family: str,
    *,
    tied: bool = False,
    stage: int = 0,
    ranks: int = 1,
    replicate: int = 1,
    accumulation: int = 1,
    recompute: Recompute | None = None,
    loss: Loss | None = None,
    dtype: str = "fp64",
    reshard: dict[str, bool] | None = None,
    seed: int = 0,
    micro_batch: int = 2,
    carrier: str = "",
    pp: int = 1,
    schedule: str = "1f1b",
    chunks: int = 1,
    layers_per_stage: tuple[int, ...] = (),
    micro_batch_per_stage: tuple[int, ...] = (),
    layers: int = 3,
    tp: int = 1,
    sequence_parallel: bool = True,
    overlap: bool = False,
    changes: dict[str, Any] | None = None,
    compiled: bool = False,
    adapter: Adapter | None = None,
    loose: bool = False,
) -> Case:
    """A case from the choices that matter; its name lists them.

    `ranks` are those of data parallelism; `loose` takes a model whose parts the plan has to name.
    """
    carrier = carrier or ("none" if ranks == 1 else "ddp" if stage == 0 else "fsdp2")
    recompute, loss = recompute or Recompute(), loss or Loss()
    layout = Layout(
        dp_replicate=ranks if stage == 0 else replicate,
        dp_shard=1 if stage == 0 else ranks // replicate,
        pp=pp,
        tp=tp,
        sequence_parallel=sequence_parallel,
    )
    pipeline = Pipeline(
        schedule=schedule,  # type: ignore[arg-type]
        chunks=chunks,
        layers_per_stage=layers_per_stage,
        micro_batch_per_stage=micro_batch_per_stage,
    )
    roles = ("embedding", "block", "head", "loss", "gradient", "reduction", "master", "optimizer_state")
    parts = {**LooseModel.named, "blocks": tuple(f"b{number}" for number in range(layers))}
    plan = Plan(
        model=ModelRef(source="parity", **(parts if loose else {})),
        workload=Workload(sequence_length=LENGTH, samples_per_step=micro_batch * accumulation * ranks),
        recipe=Recipe(steps=10, learning_rate=1e-3, warmup_steps=2, seed=seed, clip_norm=0.5),
        layout=layout,
        pipeline=Pipeline() if pp == 1 else pipeline,
        shard=Shard(carrier=carrier, stage=stage, reshard=reshard or {}),  # type: ignore[arg-type]
        batch=Batch(micro_batch=micro_batch, accumulation=accumulation),
        recompute=recompute,
        precision=Precision(**dict.fromkeys(roles, dtype)),  # type: ignore[arg-type]
        loss=loss,
        compile=Compile(mode="block" if compiled else "off"),
        overlap=Overlap(tensor=overlap),
        adapter=adapter or Adapter(),
    )
    name = f"{family}{' tied' if tied else ''} ranks={ranks} stage={stage} replicate={layout.dp_replicate}"
    name += f" {carrier} accumulation={accumulation} recompute={recompute.mode}/{recompute.every} loss={loss.kind}"
    name += f" {dtype} reshard={sorted((reshard or {}).items())} seed={seed}"
    if pp > 1:
        name += f" pp={pp} {schedule} chunks={chunks} layers={layers_per_stage or layers} sizes={micro_batch_per_stage}"
    name += f" tp={tp}{' sequence' if sequence_parallel else ''}" if tp > 1 else ""
    name += " overlap" if overlap else ""
    name += f" {sorted(changes.items())}" if changes else ""
    name += " compiled" if compiled else ""
    name += " loose" if loose else ""
    name += f" adapter={adapter.rank} alpha={adapter.alpha} {'+'.join(adapter.targets)}" if adapter else ""
    return Case(name=name, family=family, tied=tied, seed=seed, plan=plan, layers=layers, changes=changes or {})
