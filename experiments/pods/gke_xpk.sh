#!/usr/bin/env bash
# Runs on GKE with xpk: a workload of one v5e slice with 16 chips on 4 hosts.
#
#   CLUSTER=my-cluster PROJECT=my-project ZONE=us-west4-a IMAGE=my/image \
#     bash experiments/pods/gke_xpk.sh
#
# Needs: xpk; a cluster created with `xpk cluster create --tpu-type=v5litepod-16`; an image
# with this package, jax[tpu] and the repository as its working folder; a volume with
# weights, data and runs that the pods mount at /mnt (`xpk storage attach`).
set -euo pipefail

: "${CLUSTER:?}" "${PROJECT:?}" "${ZONE:?}" "${IMAGE:?}"

xpk workload create --cluster "$CLUSTER" --project "$PROJECT" --zone "$ZONE" \
  --workload "${NAME:-osd-jax}" --tpu-type "${TYPE:-v5litepod-16}" \
  --docker-image "$IMAGE" --command "CHECKPOINTS=/mnt/weights DATA_DIR=/mnt/data \
RUNS=/mnt/runs ROWS=32 DATA=4 MODEL=4 bash experiments/pods/run.sh --multihost"
