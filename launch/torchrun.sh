#!/usr/bin/env bash
# Several nodes without a scheduler: run this once on each, with the same arguments.
#   NODES=2 HEAD=first-host:29500 JOB=my-run launch/torchrun.sh experiment=eight_gpus parallel.dp=-1 parallel.cp=8
# Started again with the same run.dir=... it goes on from the last checkpoint there (on a disk that the nodes share).
# On a single machine nothing of this is needed: python launch/train.py experiment=eight_gpus
#
#   GPUS=8         ranks on each node; default: one per GPU
#   RESTARTS=3     how often torchrun starts all ranks again after one was lost; needs run.dir, or each begins anew
#   IFNAME=eth0    the network interface between the nodes, where several might be meant: NCCL (blocks, gradients) and gloo (what
#                  ranks compare, checkpoints) each pick one by themselves, and not always the same
#   PYTHON=python3 the interpreter
# NCCL's own variables reach it as they are: NCCL_IB_HCA=mlx5 (which InfiniBand cards), NCCL_IB_DISABLE=1 (none: sockets),
# NCCL_DEBUG=INFO (what it found). A stall leaves stacks_rank_* and flight_recorder_* in the run folder by itself.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${NODES:?how many nodes}" "${HEAD:?host:port of the first node}" "${JOB:?a name that all nodes share}"
if [[ -n "${IFNAME:-}" ]]; then
    export NCCL_SOCKET_IFNAME="$IFNAME" GLOO_SOCKET_IFNAME="$IFNAME"
fi
exec "${PYTHON:-python}" -m torch.distributed.run --nnodes "$NODES" --nproc-per-node "${GPUS:-gpu}" \
    --max-restarts "${RESTARTS:-0}" --rdzv-id "$JOB" --rdzv-backend c10d --rdzv-endpoint "$HEAD" launch/train.py "$@"
