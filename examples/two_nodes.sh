#!/usr/bin/env bash
# Run the same command on each node, with NODE_RANK=0 on the first and NODE_RANK=1 on the second:
#   MASTER_ADDR=first-node NODE_RANK=0 bash examples/two_nodes.sh
# Set LAUNCHER=composer to use Composer's launcher instead of torchrun. Node 0 must be able to write to runs_folder.
set -euo pipefail

NODES=${NODES:-2}
GPUS=${GPUS:-8} # per node
NODE_RANK=${NODE_RANK:?set NODE_RANK to 0 on the first node, 1 on the second}
MASTER_ADDR=${MASTER_ADDR:?set MASTER_ADDR to the name of the first node}
MASTER_PORT=${MASTER_PORT:-29500}

ARGUMENTS=(
  -f "${CONFIG:-yamls/bert_imdb.yaml}"
  data.batch_size=$((NODES * GPUS * 40))
  trainer.fsdp.shard=full
  trainer.fsdp.replicas="$NODES" # shard within a node, replicate across nodes
  trainer.dist_timeout=120
  "$@"
)

if [ "${LAUNCHER:-torchrun}" = composer ]; then
  composer -n "$GPUS" --world_size $((NODES * GPUS)) --base_rank $((NODE_RANK * GPUS)) --node_rank "$NODE_RANK" \
    --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" train.py "${ARGUMENTS[@]}"
else
  torchrun --nnodes "$NODES" --nproc-per-node "$GPUS" --node-rank "$NODE_RANK" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" train.py "${ARGUMENTS[@]}"
fi
