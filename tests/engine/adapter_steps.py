"""One step of a run with adapters from where the last one stopped: `adapter_steps.py FOLDER NUMBER CARRIER [STAGE]`, under
torchrun.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from msgspec.structs import replace

from fullstride.engine.checkpoint import load_run, save_run
from fullstride.engine.export import export
from fullstride.engine.parity import batches, share
from fullstride.engine.parity_cases import make_case, model_of
from fullstride.engine.run import prepare
from fullstride.plan.plan import Adapter


def main():
    folder, number, carrier, *stage = sys.argv[1:]
    torch.set_num_threads(1)
    ranks = 1 if carrier == "none" else 2
    case = make_case(
        "llama",
        adapter=Adapter(rank=3, alpha=6),
        ranks=ranks,
        stage=int(stage[0]) if stage else 0,
        carrier=carrier,
        micro_batch=2 // ranks,
    )
    plan = replace(case.plan, model=replace(case.plan.model, source=str(Path(folder, "base"))))
    run = prepare(model_of(case), plan, device="cpu")
    before = Path(folder, f"saved-{int(number) - 1}")
    if before.exists():
        load_run(run, before)
    batch = batches(case)[int(number) % 3]
    loss = run.step({name: tensor[share(case, run.data_rank)] for name, tensor in batch.items()}).loss
    save_run(run, Path(folder, f"saved-{number}"))
    if carrier == "ddp":
        export(run, Path(folder, "exported"))
    if run.data_rank == 0:
        Path(folder, f"loss-{number}").write_text(json.dumps(loss))
    run.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
