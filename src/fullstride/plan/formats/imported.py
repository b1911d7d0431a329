"""What came of reading another framework's file, and of writing one: the plan, and all that could not be carried."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from fullstride.errors import BadInput
from fullstride.files import Value
from fullstride.model.config import spec_from_config
from fullstride.model.families.megatron_gpt import ExpertSizes, LatentSizes, MegatronShape, megatron_spec
from fullstride.model.spec import ModelSpec
from fullstride.plan.plan import Plan

Kind: TypeAlias = Literal["fullstride", "deepspeed", "megatron", "torchtitan", "accelerate"]
FOREIGN: tuple[Kind, ...] = ("deepspeed", "megatron", "torchtitan", "accelerate")

NAMES: dict[str, str] = {
    "fullstride": "fullstride plan",
    "deepspeed": "DeepSpeed JSON",
    "megatron": "Megatron-LM script or YAML",
    "torchtitan": "torchtitan TOML",
    "accelerate": "Accelerate YAML",
}
"""How a kind of file is called in sentences."""


class NotCarried(Value, frozen=True, kw_only=True):
    """One setting that stays behind."""

    key: str
    """As the file that was read spells it; on writing, the plan's entry (`recompute.mode`)."""
    value: str
    why: str
    matters: bool = True
    """Whether it can change time, memory or what is learned; logging, paths and the like do not."""


class Imported(Value, frozen=True, kw_only=True):
    """A foreign file, read: a plan where the file and the caller together say enough, else what is still missing."""

    kind: Kind
    where: str
    """The file."""
    plan: Plan | None = None
    entries: dict[str, Any] = {}
    """What the file says about a plan, by entry (`layout.tp`), before sizes are completed."""
    config: dict[str, Any] = {}
    """The model as a Hugging Face configuration, where the file describes it; else empty."""
    shape: dict[str, Any] = {}
    """The model as the fields of a `MegatronShape`, where Megatron's arguments describe it; says more than `config`."""
    config_notes: tuple[str, ...] = ()
    """How the model differs from `config`, in words; empty where it does not."""
    model_name: str = ""
    """A preset, or the name under which the framework knows the model."""
    not_carried: tuple[NotCarried, ...] = ()
    assumed: tuple[str, ...] = ()
    """What neither the file nor the caller said, and the value that was taken, in words."""
    missing: tuple[str, ...] = ()
    """What has to be given before there is a plan, in words; empty where `plan` is there."""

    def require_plan(self) -> Plan:
        """The plan.

        Raises:
            BadInput: something is missing; says what, and the option that gives it.
        """
        if self.plan is None:
            raise BadInput(
                f"{self.where}: {NAMES[self.kind]} that does not say {' nor '.join(self._needs())}",
                fix="give " + " and ".join(_option(need) for need in self.missing),
            )
        return self.plan

    def _needs(self) -> tuple[str, ...]:
        return tuple(need.partition(":")[0] for need in self.missing)

    def spec(self) -> ModelSpec | None:
        """The model that the file itself describes; None where it does not.

        Raises:
            BadInput: it describes one that cannot be read.
        """
        if self.shape:
            return megatron_spec(_shape(self.shape), self.model_name)
        if not self.config:
            return None
        return spec_from_config(self.config, self.model_name or self.where)


def _shape(raw: dict[str, Any]) -> MegatronShape:
    experts, latent = raw.get("experts"), raw.get("latent")
    parts = {"experts": ExpertSizes(**experts) if experts else None, "latent": LatentSizes(**latent) if latent else None}
    return MegatronShape(**(raw | parts | {"expert_layers": tuple(raw.get("expert_layers", ()))}))


def _option(need: str) -> str:
    return need.partition(":")[2].strip()


class Written(Value, frozen=True, kw_only=True):
    """A plan as another framework would say it."""

    kind: Kind
    text: str
    not_carried: tuple[NotCarried, ...] = ()
