"""Whole decoders with and without this op, in eight variants.

    python -m benchmarks.model --model qwen-27b-proxy --sequences 2 --length 4096
    python -m benchmarks.model --model llama-3.2-1b --variants '*+cudnn+*' --largest-batch

Step time (loss and all gradients, interleaved over the variants), kernel time by module, memory of
the program, and the largest batch that runs. Writes <date>-<device>-model-<model>.json.
"""

import argparse
import functools
import itertools
import os
import statistics
import time
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax

from benchmarks import decoder
from benchmarks.absent import reason
from benchmarks.results import Results
from benchmarks.timing import Contender, interleave
from benchmarks.trace import kernel_seconds

RESULTS = Path(__file__).parent / "results"


def step_of(config: decoder.Config, variant: decoder.Variant) -> Any:
    """The jitted loss and gradients of a variant."""
    return jax.jit(jax.value_and_grad(functools.partial(decoder.loss, config, variant)))


def _contender(name: str, compiled: Any, params: Any, inputs: Any) -> Contender:
    def run(launches: int) -> None:
        result = None
        for _ in range(launches):
            del result  # a step's gradients are as large as the model: one at a time
            result = compiled(params, inputs)
            jax.block_until_ready(result)

    return Contender(name, run)


def memory_of(compiled: Any) -> dict[str, int]:
    """Bytes of a compiled step: parameters and inputs, gradients, and temporaries."""
    analysis = compiled.memory_analysis()
    sizes = {
        "argument_bytes": int(analysis.argument_size_in_bytes),
        "output_bytes": int(analysis.output_size_in_bytes),
        "temp_bytes": int(analysis.temp_size_in_bytes),
    }
    return sizes | {"peak_bytes": sum(sizes.values()) - int(analysis.alias_size_in_bytes)}


def largest_batch(
    config: decoder.Config, variant: decoder.Variant, params: Any, length: int, limit: int
) -> dict[str, Any]:
    """The most sequences whose step ran; the memory of a program is affine in their number.

    Predicted from the programs of two batches, then run; on running out of memory, fewer.
    """
    key = jax.random.key(1)

    def compiled(sequences: int) -> Any:
        shape = jax.eval_shape(lambda: decoder.batch(config, sequences, length, key))
        return step_of(config, variant).lower(params, shape).compile()

    small, large = (memory_of(compiled(n))["peak_bytes"] for n in (2, 4))
    per_sequence = (large - small) / 2
    predicted = max(1, int((limit - small) / per_sequence) + 2)
    for sequences in range(predicted, max(0, predicted - 8), -1):
        try:
            inputs = decoder.batch(config, sequences, length, key)
            jax.block_until_ready(compiled(sequences)(params, inputs))
        except Exception as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
        else:
            return {"sequences": sequences, "bytes_per_sequence": per_sequence}
    return {"sequences": None, "bytes_per_sequence": per_sequence}


def attribution(times: dict[str, float]) -> dict[str, float]:
    """Mean ratio of step times for each axis, over the pairs that differ in it alone.

    Args:
        times: variant's name to its median step time.

    Returns:
        "mlp", "attention", "norm": first choice's time over the second's.
    """
    effects = {}
    for position, axis in enumerate(("mlp", "attention", "norm")):
        ratios = []
        for a, b in itertools.permutations(times, 2):
            one, other = a.split("+"), b.split("+")
            differ = [k for k in range(3) if one[k] != other[k]]
            first = ("plain", "xla", "kept")[position]
            if differ == [position] and one[position] == first:
                ratios.append(times[a] / times[b])
        if ratios:
            effects[axis] = statistics.geometric_mean(ratios)
    return effects


def measure(
    results: Results, config: decoder.Config, options: argparse.Namespace
) -> dict[str, float]:
    """Time, trace and weigh every variant; returns median milliseconds by variant."""
    start = time.monotonic()
    params = jax.jit(functools.partial(decoder.init, config))(jax.random.key(0))
    inputs = decoder.batch(config, options.sequences, options.length, jax.random.key(1))
    compiled: dict[str, Any] = {}
    variants = [v for v in decoder.VARIANTS if fnmatch(v.name, options.variants)]
    for variant in variants:
        if time.monotonic() - start > options.seconds:
            results.not_made(variant.name, "out of time")
            continue
        try:
            program = step_of(config, variant).lower(params, inputs).compile()
            loss, _ = jax.block_until_ready(program(params, inputs))
        except Exception as error:  # cuDNN's attention declines off GPUs, for one
            results.not_made(variant.name, reason(error))
            continue
        compiled[variant.name] = program
        results.add({"measure": "model_memory", "variant": variant.name, "loss": float(loss),
                     **memory_of(program)})  # fmt: skip
    contenders = [_contender(n, p, params, inputs) for n, p in compiled.items()]
    timings = interleave(contenders, options.rounds, options.sample_ms / 1e3)
    for name, timing in timings.items():
        results.add({"measure": "model_step", "variant": name, **timing.to_json()})
        print(f"{name:<32} {timing.median_ms:9.2f} ms a step", flush=True)
    results.write()
    for variant in variants:
        if variant.name in compiled and options.trace:
            _guarded(results, variant, "trace", options, start,
                     lambda v: _trace(results, config, v, params, inputs))  # fmt: skip
    if options.largest_batch:
        limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
        for variant in variants:
            if variant.name not in compiled:
                continue
            if limit is None:
                results.not_made(f"largest batch of {variant.name}", "no memory limit is known")
                continue
            _guarded(results, variant, "largest batch", options, start,
                     lambda v: results.add({"measure": "model_largest_batch", "variant": v.name,
                     **largest_batch(config, v, params, options.length, limit)}))  # fmt: skip
    return {name: timing.median_ms for name, timing in timings.items()}


def _guarded(
    results: Results, variant: decoder.Variant, what: str, options: Any, start: float, act: Any
) -> None:
    if time.monotonic() - start > options.seconds:
        results.not_made(f"{what} of {variant.name}", "out of time")
        return
    try:
        act(variant)
    except Exception as error:
        results.not_made(f"{what} of {variant.name}", reason(error))
    results.write()


def _trace(
    results: Results, config: decoder.Config, variant: decoder.Variant, params: Any, inputs: Any
) -> None:
    # In a command buffer, kernels lose the names of the instructions that they come from.
    options = {"xla_gpu_enable_command_buffer": ""} if jax.default_backend() == "gpu" else None
    program = step_of(config, variant).lower(params, inputs).compile(compiler_options=options)
    run = _contender(variant.name, program, params, inputs).run
    run(1)
    seconds = kernel_seconds(lambda: run(3), program.as_text(), decoder.MODULES, calls=3)
    total = sum(seconds.values())
    shares = {name: s / total for name, s in seconds.items()} if total else {}
    results.add({"measure": "model_kernels", "variant": variant.name,
                 "seconds": seconds, "shares": shares})  # fmt: skip
    print(f"{variant.name:<32} " + ", ".join(f"{k} {v:.1%}" for k, v in shares.items()),
          flush=True)  # fmt: skip


def main(arguments: list[str] | None = None, configs: Any = decoder.CONFIGS) -> Path:
    """The command; returns the result file."""
    command = argparse.ArgumentParser(
        prog="python -m benchmarks.model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--model", choices=list(configs), default=next(iter(configs)))
    command.add_argument("--sequences", type=int, default=2)
    command.add_argument("--length", type=int, default=4096)
    command.add_argument("--variants", default="*", help="pattern, as plain+cudnn+*")
    command.add_argument("--rounds", type=int, default=5)
    command.add_argument("--sample-ms", type=float, default=100)
    command.add_argument("--seconds", type=float, default=400, help="start nothing new after")
    command.add_argument("--no-trace", dest="trace", action="store_false")
    command.add_argument("--largest-batch", action="store_true")
    command.add_argument("--out", type=Path, default=RESULTS)
    options = command.parse_args(arguments)
    told = {k: v for k, v in vars(options).items() if k != "out"}
    results = Results(f"model-{options.model}", options.out, told)
    times = measure(results, configs[options.model], options)
    effects = attribution(times)
    results.add({"measure": "model_attribution", "ratios": effects})
    for axis, value in effects.items():
        print(f"{axis}: first choice over second {value:.4f}")
    results.write()
    print(f"wrote {results.path}")
    return results.path


if __name__ == "__main__":
    main()
