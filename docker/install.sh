#!/usr/bin/env bash
# Install Turnout from a checkout into a virtual environment of its own: what the Dockerfile does in each target.
#
#   docker/install.sh cpu|cuda PREFIX
#
# TORCH_INDEX_URL: where to find torch; empty: pip's index. PyTorch's index of CPU builds makes the cpu image small.
set -euo pipefail
target=${1:?cpu or cuda} prefix=${2:?a folder that does not exist yet}
case "$target" in cpu | cuda) ;; *) echo "unknown target $target: cpu or cuda" >&2; exit 2 ;; esac
[ ! -e "$prefix" ] || { echo "$prefix exists already: give a folder that does not" >&2; exit 2; }
source=$(cd "$(dirname "$0")/.." && pwd)

python3 -m venv "$prefix"
pip=("$prefix/bin/python" -m pip --disable-pip-version-check --no-cache-dir install -q -c "$source/constraints.txt")
"${pip[@]}" ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} torch
"${pip[@]}" "$source"
if [ "$target" = cpu ]; then
    "$prefix/bin/python" -m turnout.kernels.cpu # compiled once, here, for CPUs like this one
fi
"$prefix/bin/turnout" --version
