"""Configurations of the kinds that are published with each framework, written anew."""

DEEPSPEED_ZERO2 = """{
  "train_batch_size": 64,
  "train_micro_batch_size_per_gpu": 2,
  "gradient_accumulation_steps": 4,
  "gradient_clipping": 1.0,
  "steps_per_print": 50,
  "wall_clock_breakdown": false,
  "bf16": {"enabled": true},
  "optimizer": {"type": "AdamW", "params": {"lr": 2e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.05}},
  "scheduler": {"type": "WarmupDecayLR",
    "params": {"warmup_min_lr": 0, "warmup_max_lr": 2e-4, "warmup_num_steps": 50, "total_num_steps": 900,
      "warmup_type": "linear"}},
  "zero_optimization": {
    "stage": 2,
    "contiguous_gradients": true,
    "overlap_comm": true,
    "reduce_scatter": true,
    "reduce_bucket_size": 2e8,
    "allgather_bucket_size": 2e8,
    "offload_optimizer": {"device": "cpu", "pin_memory": true}
  }
}"""

DEEPSPEED_AUTO = """{
  // filled in by the trainer
  "fp16": {"enabled": true, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2},
  "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
  "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
  "zero_optimization": {
    "stage": 3,
    "overlap_comm": true,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_gather_16bit_weights_on_model_save": true,
  },
  "gradient_accumulation_steps": "auto",
  "gradient_clipping": "auto",
  "train_batch_size": "auto",
  "train_micro_batch_size_per_gpu": "auto"
}"""

MEGATRON_SCRIPT = """#!/bin/bash
# Trains a GPT of a few billion weights.
export CUDA_DEVICE_MAX_CONNECTIONS=1
export NCCL_IB_TIMEOUT=22
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-"4"}
WORLD_SIZE=$(($GPUS_PER_NODE*$NNODES))
PRECISION="bf16"
TP=4; PP=2
CHECKPOINTS=$1   # where to

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NNODES
    --master_addr ${MASTER_ADDR:-localhost}
)

MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention   # eight of them
    --num-query-groups 8
    --seq-length 4096
    --max-position-embeddings 4096
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --tokenizer-type Llama2Tokenizer
    # --hidden-dropout 0.5
    --attention-dropout 0.0 --hidden-dropout 0.0
)
if [ "$PRECISION" == "bf16" ]; then
    TRAINING_ARGS=(--bf16)
else
    TRAINING_ARGS=(--fp16)
fi
TRAINING_ARGS+=(
    --micro-batch-size 1
    --global-batch-size 128
    "--train-iters 1000"
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-fraction .01
    --clip-grad 1.0 --weight-decay 0.1
    --adam-beta1 0.9 --adam-beta2=0.95
    --recompute-granularity full --recompute-method block --recompute-num-layers 3
    --use-flash-attn
)
PARALLEL="--tensor-model-parallel-size $TP \\
    --pipeline-model-parallel-size $PP --sequence-parallel \\
    --num-layers-per-virtual-pipeline-stage 4 \\
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"

if [ -n "${WANDB_API_KEY}" ]; then
    TRAINING_ARGS+=(--wandb-project mine)
fi

torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \\
    "${MODEL_ARGS[@]}" ${TRAINING_ARGS[@]} $PARALLEL \\
    --save $CHECKPOINTS --log-interval 10 --split '99,1,0'
"""

MEGATRON_CASE = """ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
  NVTE_ALLOW_NONDETERMINISTIC_ALGO: 0
MODEL_ARGS:
  --num-layers: 12
  --hidden-size: 512
  --num-attention-heads: 8
  --micro-batch-size: 4
  --global-batch-size: 32
  --seq-length: 1024
  --max-position-embeddings: 1024
  --train-iters: 50
  --vocab-file: ${DATA}/vocab.json
  --lr: 0.00015
  --min-lr: 1.0e-5
  --lr-decay-style: cosine
  --lr-warmup-fraction: .01
  --transformer-impl: local
  --tensor-model-parallel-size: 2
  --pipeline-model-parallel-size: 2
  --use-distributed-optimizer: true
  --deterministic-mode: true
  --no-gradient-accumulation-fusion: true
  --bf16: true
  --num-experts: 8
  --moe-router-topk: 2
  --save: ${OUT}
TEST_TYPE: regular
"""

MEGATRON_BRIDGE = """model:
  num_layers: 80
  hidden_size: 8192
  ffn_hidden_size: 28672
  num_attention_heads: 64
  num_query_groups: 8
  group_query_attention: true
  seq_length: 8192
  vocab_size: 128256
  gated_linear_unit: true
  normalization: RMSNorm
  add_bias_linear: false
  share_embeddings_and_output_weights: false
  position_embedding_type: rope
  tensor_model_parallel_size: 4
  pipeline_model_parallel_size: 4
  virtual_pipeline_model_parallel_size: 5
  context_parallel_size: 2
  sequence_parallel: true
train:
  micro_batch_size: 1
  global_batch_size: 128
  train_iters: 1000
optimizer:
  lr: 3.0e-4
  min_lr: 3.0e-5
  adam_beta2: 0.95
  use_distributed_optimizer: true
ddp:
  grad_reduce_in_fp32: true
  overlap_grad_reduce: true
  overlap_param_gather: true
mixed_precision: bf16_mixed
trainer:
  num_nodes: 8
  devices: 8
"""

TORCHTITAN = """# a preset for some GPUs
[job]
dump_folder = "./outputs"
description = "a run"

[metrics]
log_freq = 10

[model]
name = "llama3"
flavor = "8B"

[optimizer]
name = "AdamW"
lr = 3e-4
eps = 1e-8

[lr_scheduler]
warmup_steps = 200
decay_type = "cosine"
min_lr_factor = 0.1

[training]
local_batch_size = 1
seq_len = 8192
max_norm = 1.0
steps = 1000
dataset = "c4"

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
pipeline_parallel_degree = 1
context_parallel_degree = 1

[checkpoint]
enable = false
interval = 500

[compile]
enable = true
components = ["model", "loss"]

[activation_checkpoint]
mode = "full"

[quantize.linear.float8]
enable_fsdp_float8_all_gather = false
filter_fqns = ["output"]
"""

ACCELERATE_FSDP1 = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: false
  fsdp_sharding_strategy: HYBRID_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_use_orig_params: true
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 2
num_processes: 16
rdzv_backend: static
same_network: true
tpu_env: []
use_cpu: false
"""

ACCELERATE_FSDP2 = """distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: false
  fsdp_state_dict_type: SHARDED_STATE_DICT
mixed_precision: bf16
num_machines: 1
num_processes: 8
parallelism_config:
  parallelism_config_cp_size: 1
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 2
  parallelism_config_tp_size: 2
"""

ACCELERATE_DEEPSPEED = """distributed_type: DEEPSPEED
deepspeed_config:
  gradient_accumulation_steps: 4
  gradient_clipping: 1.0
  offload_optimizer_device: cpu
  offload_param_device: none
  zero3_init_flag: true
  zero_stage: 2
mixed_precision: bf16
num_processes: 4
"""

ALL = {
    "deepspeed": (DEEPSPEED_ZERO2, DEEPSPEED_AUTO),
    "megatron": (MEGATRON_SCRIPT, MEGATRON_CASE, MEGATRON_BRIDGE),
    "torchtitan": (TORCHTITAN,),
    "accelerate": (ACCELERATE_FSDP1, ACCELERATE_FSDP2, ACCELERATE_DEEPSPEED),
}
