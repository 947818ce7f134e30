#!/usr/bin/env bash
# Runs one host's process of an online run on several hosts. All launchers call this file.
#
#   CHECKPOINTS=/mnt/weights DATA_DIR=/mnt/data RUNS=/mnt/runs ROWS=32 DATA=4 MODEL=4 \
#     bash experiments/pods/run.sh [--multihost | --coordinator ... ] [--gin....]
#
# CHECKPOINTS, DATA_DIR and RUNS are folders that all hosts can read: weights (flan-t5-xl/
# and t5-small/ as transformers saves them), data sets, and the parent of the run directory.
# DATA x MODEL is the number of chips of all hosts; ROWS requests are served at once.
set -euo pipefail

osd online --gin_file=experiments/flan_t5_xl_gsm8k.gin \
  --gin.CHECKPOINTS="\"${CHECKPOINTS:?}\"" \
  --gin.DATA_DIR="\"${DATA_DIR:?}\"" \
  --gin.OnlineConfig.run_directory="\"${RUNS:?}/flan_t5_xl_gsm8k\"" \
  --gin.PairConfig.dtype='"bfloat16"' \
  --gin.DecodingConfig.rows="${ROWS:?}" \
  --gin.PartitionConfig.data="${DATA:?}" \
  --gin.PartitionConfig.model="${MODEL:?}" \
  "$@"
