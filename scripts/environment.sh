# Sourced by the other scripts: makes .venv and installs the project with the extras in $1, unless that is done.
# shellcheck shell=bash
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
extras="${1:-}"
python=".venv/bin/python"
stamp=".venv/installed${extras//[^a-z]/-}"
wanted="$(cat pyproject.toml constraints.txt | sha256sum) $PWD"
if [ ! -x "$python" ] || [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "setting up .venv …"
    [ -x "$python" ] || "${PYTHON:-python3}" -m venv .venv || exit 1
    "$python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".${extras}" || exit 1
    echo "$wanted" >"$stamp"
fi
