# Make .venv at the root of the repository and install what the lock says. Sourced by the other scripts; safe to repeat.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

python=
for candidate in python3 python3.13 python3.12 python3.11; do
    if command -v "$candidate" > /dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    echo "setup: Python 3.11 or newer is needed, and none is on PATH" >&2
    exit 2
fi

if [ ! -x .venv/bin/uv ]; then
    "$python" -m venv .venv || { echo "setup: '$python -m venv' failed; on Debian: apt-get install python3-venv" >&2; exit 2; }
    .venv/bin/python -m pip install --quiet --disable-pip-version-check 'uv>=0.8'
fi
echo "setup: installing into $root/.venv"
# Byte-compiled here, once: else every process of every run does it where Python may not write its own cache.
.venv/bin/uv sync --frozen --inexact --quiet --compile-bytecode --python .venv/bin/python
source .venv/bin/activate
