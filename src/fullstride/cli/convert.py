"""`fullstride convert`: one framework's configuration as another's."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import msgspec
from msgspec.structs import replace

from fullstride.cli.command import positive, refuse_existing
from fullstride.cli.foreign import tell
from fullstride.cli.output import Output
from fullstride.errors import BadInput
from fullstride.files import write_bytes
from fullstride.launch.inspector import spec_of
from fullstride.model.config import spec_from_config
from fullstride.model.source import is_module_source
from fullstride.plan.formats.detect import read_any, write_as
from fullstride.plan.formats.imported import FOREIGN, NAMES, Imported, Kind, Written
from fullstride.plan.formats.page import carried_document
from fullstride.plan.plan import ModelRef, Plan


class Convert:
    """Carry a configuration over to another framework, and list what could not be carried.

    FILE is a fullstride plan, a DeepSpeed JSON, Megatron-LM arguments (a launch script or YAML), a torchtitan TOML or
    an Accelerate YAML, told apart by content. Without -o the new file goes to stdout and the lists to stderr. What FILE does
    not say (the model, the number of GPUs) is given with --model and --gpus.
    """

    name = "convert"

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        """Options of the verb."""
        parser.add_argument("file", metavar="FILE", help="configuration of any of these kinds")
        parser.add_argument("--to", required=True, choices=(*FOREIGN, "fullstride"), help="the kind to write")
        parser.add_argument("-o", dest="output", metavar="OUT", help="the new file (stdout)")
        parser.add_argument("--model", metavar="MODEL", help="preset, config.json or model directory, before what FILE says")
        parser.add_argument("--gpus", type=positive, metavar="N", help="GPUs in all, before what FILE says")
        parser.add_argument("--seq", type=positive, metavar="S", help="tokens of a sample, before what FILE says")

    def run(self, args: argparse.Namespace, out: Output) -> int:
        """Read, write, list."""
        target = Path(args.output) if args.output else None
        if target:
            refuse_existing(target)
        imported = read_any(args.file, args.model, num_ranks=args.gpus, sequence_length=args.seq)
        plan = imported.require_plan()
        spec = imported.spec()
        if spec is None and is_module_source(plan.model.source):
            spec = spec_of(plan.model)
        if args.to == "fullstride":
            plan = _with_config(plan, imported, target, out)
        written = write_as(plan, args.to, spec)
        if target:
            write_bytes(target, written.text.encode())
            out.note(f"wrote {target}")
        elif not out.json:
            sys.stdout.write(written.text)
        _show(imported, written, target, out)
        return 0


def _with_config(plan: Plan, imported: Imported, target: Path | None, out: Output) -> Plan:
    """A plan whose model can be loaded: the configuration that the file describes stands beside it."""
    if not (imported.config or imported.shape):
        return plan
    if not imported.config:
        raise BadInput(
            f"{imported.where}: describes a model of no family that fullstride can build ({'; '.join(imported.config_notes)})",
            fix="`fullstride explain` prices it; or name another with --model",
        )
    if target is None:
        raise BadInput(
            f"{imported.where}: describes its model by sizes, and a plan names a file for it",
            fix="give -o OUT, beside which the config.json is written, or --model",
        )
    path = target.with_name(f"{target.stem}.config.json")
    refuse_existing(path)
    spec = spec_from_config(imported.config, str(path))
    write_bytes(path, (json.dumps(imported.config, indent=2) + "\n").encode())
    out.note(f"wrote {path}")
    for note in imported.config_notes:
        out.warn(f"{path} is near the file's model, and not it: {note}")
    return replace(plan, model=ModelRef(source=str(path), digest=spec.digest))


def _show(imported: Imported, written: Written, target: Path | None, out: Output) -> None:
    if out.json:
        raw = msgspec.to_builtins
        data = {
            "from": imported.kind,
            "to": written.kind,
            "file": str(target) if target else None,
            "text": written.text,
            "assumed": list(imported.assumed),
            "not_carried": {"read": raw(imported.not_carried), "written": raw(written.not_carried)},
        }
        out.show(None, data, "converted")
    elif target:
        out.show(carried_document(imported, written), None)
    else:
        tell(imported, out)
        tell_written(written, out)


def tell_written(written: Written, out: Output) -> None:
    """Say on stderr what of the plan the new file cannot say."""
    kind: Kind = written.kind
    for one in written.not_carried:
        out.note(f"not in the {NAMES[kind]}: {one.key} = {one.value} ({one.why})")


VERB = Convert()
