#!/usr/bin/env bash
# Slurm: two nodes with four GPUs each and one task per node. JAX reads Slurm's variables
# to find the other nodes.
#
#   sbatch experiments/pods/slurm_gpu.sh          # in the repository
#
# Needs: a virtual environment .venv with `pip install '.[gpu]'`; CHECKPOINTS, DATA_DIR
# and RUNS on a file system that all nodes share.
#SBATCH --job-name=osd-jax
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=02:00:00
#SBATCH --signal=TERM@120
set -euo pipefail

export CHECKPOINTS="${CHECKPOINTS:-$PWD/checkpoints}" DATA_DIR="${DATA_DIR:-$PWD/data}"
export RUNS="${RUNS:-$PWD/runs}" ROWS="${ROWS:-16}" DATA="${DATA:-2}" MODEL="${MODEL:-4}"
export PATH="$PWD/.venv/bin:$PATH"

srun --kill-on-bad-exit=1 bash experiments/pods/run.sh --multihost
