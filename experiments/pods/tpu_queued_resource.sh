#!/usr/bin/env bash
# Requests a TPU pod slice as a queued resource (v5e, 16 chips on 4 hosts) and starts the
# run on all hosts.
#
#   PROJECT=my-project ZONE=us-west4-a BUCKET=my-bucket bash experiments/pods/tpu_queued_resource.sh
#
# Needs: gcloud, logged in; quota for v5litepod-16 in ZONE; a bucket with weights/ and
# data/, which every host mounts (gcsfuse), and this repository's wheel in it.
# The script ends with the run and prints the command that deletes the slice.
set -euo pipefail

: "${PROJECT:?}" "${ZONE:?}" "${BUCKET:?}"
NAME="${NAME:-osd-jax}"
TYPE="${TYPE:-v5litepod-16}"
VERSION="${VERSION:-v2-alpha-tpuv5-lite}"

gcloud compute tpus queued-resources create "$NAME" --project="$PROJECT" \
  --zone="$ZONE" --node-id="$NAME" --accelerator-type="$TYPE" --runtime-version="$VERSION"

while true; do
  STATE="$(gcloud compute tpus queued-resources describe "$NAME" --project="$PROJECT" \
    --zone="$ZONE" --format='value(state.state)')"
  case "$STATE" in
    ACTIVE) break ;;
    FAILED | SUSPENDED) echo "$TYPE in $ZONE: $STATE; nothing was run" >&2; exit 1 ;;
  esac
  echo "waiting for $TYPE in $ZONE: $STATE"
  sleep 30
done

on_every_host() {
  gcloud compute tpus tpu-vm ssh "$NAME" --project="$PROJECT" --zone="$ZONE" \
    --worker=all --command="$1"
}

on_every_host "mkdir -p ~/mnt && gcsfuse --implicit-dirs $BUCKET ~/mnt && \
  python3 -m venv ~/osd && ~/osd/bin/pip install -q ~/mnt/osd_jax-*.whl 'jax[tpu]'"
gcloud compute tpus tpu-vm scp experiments/pods/run.sh "$NAME": --project="$PROJECT" \
  --zone="$ZONE" --worker=all
on_every_host "PATH=~/osd/bin:\$PATH CHECKPOINTS=~/mnt/weights DATA_DIR=~/mnt/data \
  RUNS=~/mnt/runs ROWS=32 DATA=4 MODEL=4 bash run.sh --multihost"

echo "gcloud compute tpus queued-resources delete $NAME --project=$PROJECT --zone=$ZONE --force"
