#!/usr/bin/env bash
# On the GPU machine: put together and install what fetch_peers.py downloaded.
#   source benchmarks/install_peers.sh [folder with peers-1 and peers-2] [target]
# Sourced, so that PYTHONPATH is set for what follows. Does nothing if it is installed already.
peers_from=${1:-.carry}
peers_site=${2:-/tmp/peers-site}
if [ ! -e "$peers_site/.done" ]; then
    peers_wheels=$(mktemp -d)
    cp "$peers_from"/peers-2/*.whl "$peers_wheels" &&
        for part in "$peers_from"/peers-1/*.part1; do
            name=$(basename "$part" .part1)
            cat "$part" "$peers_from/peers-2/$name.part2" >"$peers_wheels/$name"
        done &&
        python3 -m pip --disable-pip-version-check install -q --no-index --no-deps --no-compile \
            --no-cache-dir --upgrade --target "$peers_site" "$peers_wheels"/*.whl &&
        touch "$peers_site/.done"
    rm -rf "$peers_wheels"
fi
# The DSL's own .pth file does not count outside site-packages.
export PYTHONPATH="$peers_site:$peers_site/nvidia_cutlass_dsl/python_packages${PYTHONPATH:+:$PYTHONPATH}"
