#!/usr/bin/env bash
# Set up and run the whole test suite; with arguments, pytest with these.
#
#   bash scripts/test.sh [-k layouts] [-x] ...
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
ruff check .
ruff format --check .
if [ $# -gt 0 ]; then exec python -m pytest "$@"; fi

# First the test that measures its own time, alone. Then the others in two parts side by side: SLURM, torchrun and mpirun
# are waited for more than they work, and much of the rest uses one core.
alone=tests/test_repository.py::test_quickstart
second=(tests/test_caltech101.py tests/test_nodes.py tests/test_slurm.py tests/test_tfrecords.py)
said=$(mktemp)
trap 'kill $(jobs -p) 2> /dev/null || true; rm -f "$said"' EXIT
code=0
python -m pytest "$alone" || code=$?
python -m pytest "${second[@]}" > "$said" 2>&1 &
python -m pytest --deselect "$alone" "${second[@]/#/--ignore=}" || code=$?
wait $! || code=$?
cat "$said"
exit $code
