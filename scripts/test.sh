#!/usr/bin/env bash
# Set up and run the whole test suite; with arguments, pytest with these.
#
#   bash scripts/test.sh                        # everything, as CI does
#   bash scripts/test.sh --fast                 # the inner loop: a test or two of each part, in one process mostly
#   bash scripts/test.sh [-k layouts] [-x] ...  # what pytest makes of its arguments
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
ruff check .
ruff format --check .
if [ $# -gt 0 ]; then exec python -m pytest "$@"; fi

# In two parts side by side: real launchers are waited for more than they work, and much of the rest uses one core. What
# installs Debian packages is in the second.
second=(tests/test_caltech101.py tests/test_nodes.py tests/test_pages.py tests/test_slurm.py tests/test_tfrecords.py)
said=$(mktemp)
trap 'kill $(jobs -p) 2> /dev/null || true; rm -f "$said"' EXIT
code=0
python -m pytest "${second[@]}" > "$said" 2>&1 &
python -m pytest "${second[@]/#/--ignore=}" || code=$?
wait $! || code=$?
cat "$said"
exit $code
