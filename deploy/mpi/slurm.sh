#!/bin/bash
# A tensor-parallel server on two hosts with four GPUs each: sbatch deploy/mpi/slurm.sh MODEL
#SBATCH --job-name=tllm-serve
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --signal=TERM@360
set -euo pipefail

model=${1:?give a model: a folder that every host has}
: "${TLLM_SPEC_API_KEY:?set it to a key that clients must send}"
# Rank 0 serves, on the first host of the list. mpirun (MPICH) passes the signal on to it, and it
# lets requests finish.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd, -)
exec mpirun -hosts "$hosts" -n "$SLURM_NTASKS" -ppn "$SLURM_NTASKS_PER_NODE" \
    tllm-serve "$model" --tp_size "$SLURM_NTASKS" --gpus_per_node "$SLURM_NTASKS_PER_NODE" \
    --host 0.0.0.0 --shutdown_timeout 300
