#!/usr/bin/env bash
# Set up and run the whole test suite; with arguments, pytest with these.
#
#   bash scripts/test.sh [-k layouts] [-x] ...
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
ruff check .
ruff format --check .
if [ $# -gt 0 ]; then exec python -m pytest "$@"; fi

# First what takes its own time, then the rest in two parts side by side: real launchers are waited for more than they work.
code=0
python -m pytest -m alone || code=$?
said=$(mktemp)
trap 'rm -f "$said"; kill $(jobs -p) 2> /dev/null || true' EXIT
python -m pytest -m launchers > "$said" 2>&1 &
launchers=$!
python -m pytest -m "not alone and not launchers" || code=$?
wait $launchers || code=$?
cat "$said"
exit $code
