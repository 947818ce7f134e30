#!/usr/bin/env bash
# One host's part of an online run over several; every way of starting hosts ends here.
#
#   CHECKPOINTS=/mnt/weights DATA_DIR=/mnt/data RUNS=/mnt/runs ROWS=32 DATA=4 MODEL=4 \
#     bash experiments/pods/run.sh [--multihost | --coordinator ... ] [--gin....]
#
# CHECKPOINTS, DATA_DIR and RUNS are folders that all hosts see: weights (flan-t5-xl/ and
# t5-small/ as transformers saves them), data sets, and where the run directory goes.
# DATA x MODEL are the chips of all hosts together, ROWS requests are served at once.
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
