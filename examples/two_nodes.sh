#!/usr/bin/env bash
# The same command on every node, with NODE_RANK=0 on one and 1 on the other:
#   MASTER_ADDR=first-node NODE_RANK=0 bash examples/two_nodes.sh
# LAUNCHER=composer takes Composer's launcher in place of torchrun. runs_folder must be one that node 0 can write to.
set -euo pipefail

NODES=${NODES:-2}
GPUS=${GPUS:-8} # a node
NODE_RANK=${NODE_RANK:?set NODE_RANK to 0 on the first node, 1 on the second}
MASTER_ADDR=${MASTER_ADDR:?set MASTER_ADDR to the name of the first node}
MASTER_PORT=${MASTER_PORT:-29500}

ARGUMENTS=(
  -f "${CONFIG:-yamls/bert_imdb.yaml}"
  data.batch_size=$((NODES * GPUS * 40))
  trainer.fsdp.shard=full
  trainer.fsdp.replicas="$NODES" # a copy a node: weights travel within the node, gradients between them
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
