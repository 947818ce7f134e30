#!/usr/bin/env bash
# tests/newcomer.sh [WHEEL]: installs the wheel into an empty environment, then does what
# a newcomer does (newcomer.py) in an empty directory. Without WHEEL it is built first.
set -euo pipefail
tests=$(cd "$(dirname "$0")" && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
wheel=${1:-}
if [ -z "$wheel" ]; then
  cp -r "$tests/../osd_jax" "$tests/../osd_tools" "$tests/../gin_configs" \
    "$tests"/../{pyproject.toml,README.md,LICENSE,MANIFEST.in} "$folder"
  "${PYTHON:-python3}" -m pip wheel -q --no-deps -w "$folder/wheel" "$folder"
  wheel=$(echo "$folder"/wheel/*.whl)
fi
start=$(date +%s)
"${PYTHON:-python3}" -m venv "$folder/environment"
"$folder/environment/bin/pip" install -q "$(realpath "$wheel")[llama,plots]"
mkdir "$folder/empty" && cd "$folder/empty"
PATH="$folder/environment/bin:$PATH" python "$tests/newcomer.py" "$start"
