"""torchtitan with the Llama shapes of the presets; run under torchrun with torchtitan's own options."""

import dataclasses

import torchtitan.models.llama3 as llama3
from torchtitan.train import Trainer, main

Args = llama3.TransformerModelArgs
llama3.llama3_args["1B"] = Args(
    dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, ffn_dim_multiplier=1.5, multiple_of=1024, rope_theta=500000
)
llama3.llama3_args["3B"] = Args(
    dim=3072, n_layers=28, n_heads=24, n_kv_heads=8, ffn_dim_multiplier=1.0, multiple_of=1024, rope_theta=500000
)
llama3.llama3_args["8B-half"] = dataclasses.replace(llama3.llama3_args["8B"], n_layers=16)

if __name__ == "__main__":
    main(Trainer)
