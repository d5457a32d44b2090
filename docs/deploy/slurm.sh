#!/usr/bin/env bash
#SBATCH --job-name=turnout
#SBATCH --exclusive
# usage: sbatch --nodes=N --gpus-per-node=G slurm.sh MODEL [flags of turnout serve]
# The head runs in the batch step, on the first node; srun starts a rank for each GPU of all nodes.
set -euo pipefail
ranks=$((SLURM_JOB_NUM_NODES * ${SLURM_GPUS_PER_NODE:-1}))
head=$(hostname):29500
secret=$(mktemp "$HOME/.turnout-secret.XXXXXX") # on a file system that all nodes share, readable by this user only
openssl rand -hex 32 > "$secret"
trap 'rm -f "$secret"; kill $(jobs -p) 2> /dev/null; wait' EXIT
trap 'kill -TERM "$server"' TERM

turnout serve "$@" --host 0.0.0.0 --tp "$ranks" --dp "$ranks" --ep "$ranks" --enable-dp-attention \
    --distributed-executor-backend external --nnodes "$SLURM_JOB_NUM_NODES" \
    --dist-init-addr "$head" --secret-file "$secret" &
server=$!
srun --ntasks="$ranks" --ntasks-per-node=$((ranks / SLURM_JOB_NUM_NODES)) --overlap --gpu-bind=none \
    --kill-on-bad-exit=0 turnout rank --head "$head" --secret-file "$secret" &
wait "$server"
