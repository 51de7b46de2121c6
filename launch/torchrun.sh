#!/usr/bin/env bash
# Several nodes without a scheduler: run this once on each, with the same arguments.
#   NODES=2 HEAD=first-host:29500 JOB=my-run launch/torchrun.sh experiment=eight_gpus parallel.dp=-1 parallel.cp=8
# Started again with the same run.dir=... it goes on from the last checkpoint there (on a disk that the nodes share).
# On a single machine nothing of this is needed: python launch/train.py experiment=eight_gpus
set -euo pipefail
cd "$(dirname "$0")/.."
: "${NODES:?how many nodes}" "${HEAD:?host:port of the first node}" "${JOB:?a name that all nodes share}"
exec python -m torch.distributed.run --nnodes "$NODES" --nproc-per-node "${GPUS:-gpu}" \
    --rdzv-id "$JOB" --rdzv-backend c10d --rdzv-endpoint "$HEAD" launch/train.py "$@"
