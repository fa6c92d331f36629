#!/usr/bin/env bash
# Everything that needs a GPU, on any GPU machine (H100, H200, B200): take the built library or
# build it, run the GPU tests with a skipped one counting as failed, and run the benchmark.
#
#   scripts/gpu.sh
#
# Variables:
#   PYTHON          the interpreter; default: python3 where its JAX sees a CUDA GPU and pytest is
#                   there, else .venv, made with the extra cuda13
#   GPU_TEST_ARGS   for pytest; default: -m gpu
#   GPU_BENCH_ARGS  for python -m benchmarks; default: --preset quick; "none" runs no benchmark
#   OUT             folder for what the run leaves; default: benchmarks/results
set -euo pipefail
cd "$(dirname "$0")/.."
test_args=${GPU_TEST_ARGS--m gpu}
bench_args=${GPU_BENCH_ARGS---preset quick}
out=${OUT:-benchmarks/results}
mkdir -p "$out"

# Tests, tuning trials and PyTorch share the GPU: nobody takes all of its memory at the start.
export XLA_PYTHON_CLIENT_PREALLOCATE=${XLA_PYTHON_CLIENT_PREALLOCATE:-false}
export PYTHONUNBUFFERED=1

usable() {
    "$1" - >/dev/null 2>&1 <<'EOF'
import importlib.util, sys
import jax
needed = ("pytest", "pytest_timeout")
sys.exit(not (jax.devices("cuda") and all(map(importlib.util.find_spec, needed))))
EOF
}

python=${PYTHON:-}
if [ -z "$python" ]; then
    if usable python3; then
        python=python3
    else
        make setup
        .venv/bin/python -m pip install --quiet --no-build-isolation -C wheel.cmake=false \
            -C editable.mode=inplace -e '.[cuda13]'
        python=.venv/bin/python
    fi
fi
usable "$python" || {
    echo "gpu.sh: JAX of $python sees no CUDA GPU, or pytest or pytest-timeout is missing:" >&2
    "$python" -c 'import jax; print(jax.devices("cuda"))' >&2 || true
    exit 1
}
"$python" -c 'import jax; d = jax.devices()[0]; print("on", d.device_kind, "with jax", jax.__version__)'

if [ -e swiglu_jax/lib/libswiglu_jax.so ]; then
    echo "taking the library in swiglu_jax/lib as it is (make build renews it)"
else
    make build kernels PYTHON="$python"
fi
"$python" -m swiglu_jax

if [ "$test_args" != none ]; then
    report=$(mktemp)
    # shellcheck disable=SC2086
    # Tuning has tests of its own; the others would spend minutes on timing shapes of no interest,
    # and so would XLA on every GEMM of every test.
    XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_autotune_level=0" SWIGLU_JAX_TUNE=0 \
        SWIGLU_JAX_REQUIRE_GPU=1 "$python" -m pytest $test_args --junitxml="$report"
    "$python" - "$report" <<'EOF'
import sys
import xml.etree.ElementTree as xml

cases = list(xml.parse(sys.argv[1]).iter("testcase"))
skipped = [c for c in cases if c.find("skipped") is not None]
for case in skipped:
    print(f"skipped on a GPU machine: {case.get('classname')}::{case.get('name')}", file=sys.stderr)
if skipped or not cases:
    sys.exit(f"gpu.sh: {len(skipped)} of {len(cases)} tests were skipped; none may be")
EOF
    rm -f "$report"
fi

if [ "$bench_args" != none ]; then
    # shellcheck disable=SC2086
    "$python" -m benchmarks $bench_args --out "$out"
    # A bound that is broken or not measured is shown, and does not fail the run.
    "$python" -m benchmarks.bounds "$out"/*.json || true
fi
