"""Whole decoders with and without this op, in eight variants.

    python -m benchmarks.model --model qwen-27b-proxy
    python -m benchmarks.model --model llama-3.2-1b --variants '*+cudnn+*' --trace all
    python -m benchmarks.model --model tiny                 # a CPU is enough

Step time (loss and all gradients, interleaved over the variants), kernel time by module, memory of
the program, and the largest batch that runs: the last two for the two MLPs under the attention and
normalization that are fastest with the plain one, unless all are asked for. In this order, until
``--seconds`` are over; what was not reached is in the file under not_made. Writes
<date>-<device>-model-<model>.json.
"""

import argparse
import functools
import itertools
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

# One region of memory: grown piece by piece, it was too cut up for 54 GiB with 96 of 105 free.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")

import jax

from benchmarks import decoder
from benchmarks.absent import NotMade, reason
from benchmarks.results import Results
from benchmarks.timing import Contender, interleave
from benchmarks.trace import kernel_seconds

RESULTS = Path(__file__).parent / "results"
COMPILATION = 0.6
"""Share of the time after which no other variant is compiled, so that some is left to run them."""
FITTING_TRIES = 6
"""Batches to compile in search of the largest that fits."""


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
    config: decoder.Config,
    variant: decoder.Variant,
    params: Any,
    options: argparse.Namespace,
    peak_bytes: int,
    limit: int,
) -> dict[str, Any]:
    """The most sequences whose step ran; the memory of a program is affine in their number.

    Predicted from the program that was measured and one of twice its batch. From one more than
    that downwards, the first whose program fits is run; on running out of memory, fewer.

    Args:
        config, variant, params: what runs.
        options: the command's, for the batch that was measured.
        peak_bytes: of the step at that batch.
        limit: bytes that JAX may allocate on the device.

    Raises:
        NotMade: where no batch that was tried ran.
    """
    key = jax.random.key(1)
    # Nothing is timed here, and timing GEMMs for another batch would take most of the time.
    untuned = {"xla_gpu_autotune_level": "0"} if jax.default_backend() == "gpu" else None

    def compiled(sequences: int) -> Any:
        shape = jax.eval_shape(lambda: decoder.batch(config, sequences, options.length, key))
        return step_of(config, variant).lower(params, shape).compile(compiler_options=untuned)

    twice = memory_of(compiled(2 * options.sequences))["peak_bytes"]
    per_sequence = (twice - peak_bytes) / options.sequences
    predicted = options.sequences + int((limit - peak_bytes) / per_sequence)
    found: dict[str, Any] = {
        "predicted": predicted, "bytes_per_sequence": per_sequence, "limit_bytes": limit,
    }  # fmt: skip
    for sequences in fewer_and_fewer(predicted + 1):
        program = compiled(sequences)
        if memory_of(program)["peak_bytes"] > limit:
            continue
        try:
            inputs = decoder.batch(config, sequences, options.length, key)
            jax.block_until_ready(program(params, inputs))
        except Exception as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
        else:
            return found | {"sequences": sequences}
    raise NotMade(f"none of {FITTING_TRIES} batches from {predicted + 1} downwards ran")


def fewer_and_fewer(most: int, tries: int = FITTING_TRIES) -> list[int]:
    """Batches to try: the most, one less, then each time a fiftieth less, but at least one."""
    batches = [most, most - 1]
    while len(batches) < tries:
        batches.append(batches[-1] - max(1, batches[-1] // 50))
    return [sequences for sequences in batches if sequences > 0]


def best_pair(times: dict[str, float]) -> list[str]:
    """The variants that have the attention and normalization of the fastest with the plain MLP."""
    plain = {name: ms for name, ms in times.items() if name.startswith("plain+")}
    if not plain:
        return list(times)
    rest = min(plain, key=lambda name: plain[name]).removeprefix("plain")
    return [name for name in times if name.endswith(rest)]


def attribution(times: dict[str, float]) -> dict[str, float]:
    """Mean ratio of step times for each axis, over the pairs that differ in it alone.

    Args:
        times: variant's name to its median step time.

    Returns:
        "mlp", "attention", "norm": first choice's time over the second's.
    """
    effects = {}
    for position, (axis, (first, _)) in enumerate(decoder.CHOICES.items()):
        ratios = []
        for a, b in itertools.permutations(times, 2):
            one, other = a.split("+"), b.split("+")
            differ = [k for k in range(3) if one[k] != other[k]]
            if differ == [position] and one[position] == first:
                ratios.append(times[a] / times[b])
        if ratios:
            effects[axis] = statistics.geometric_mean(ratios)
    return effects


def measure(
    results: Results, config: decoder.Config, options: argparse.Namespace
) -> dict[str, float]:
    """Time, trace and weigh every variant; returns median milliseconds by variant."""
    clock = _Clock(results, options.seconds)
    params = jax.jit(functools.partial(decoder.init, config))(jax.random.key(0))
    inputs = decoder.batch(config, options.sequences, options.length, jax.random.key(1))
    variants = {v.name: v for v in _by_importance() if fnmatch(v.name, options.variants)}
    compiled: dict[str, Any] = {}
    peaks: dict[str, int] = {}
    for name, variant in variants.items():
        if clock.over(COMPILATION):
            results.not_made(name, "out of time")
            continue
        try:
            program = step_of(config, variant).lower(params, inputs).compile()
            loss = jax.block_until_ready(program(params, inputs))[0]
        except Exception as error:  # cuDNN's attention declines off GPUs, for one
            results.not_made(name, reason(error))
            continue
        compiled[name] = program
        memory = memory_of(program)
        peaks[name] = memory["peak_bytes"]
        results.add({"measure": "model_memory", "variant": name, "loss": float(loss), **memory})
    clock.lap("compile")
    contenders = [_contender(n, p, params, inputs) for n, p in compiled.items()]
    timings = interleave(contenders, options.rounds, options.sample_ms / 1e3)
    for name, timing in timings.items():
        results.add({"measure": "model_step", "variant": name, **timing.to_json()})
        print(f"{name:<32} {timing.median_ms:9.2f} ms a step", flush=True)
    clock.lap("time")
    del contenders, compiled
    times = {name: timing.median_ms for name, timing in timings.items()}
    chosen = {"all": list(times), "best": best_pair(times), "none": []}
    for name in chosen[options.trace]:
        clock.attempt(f"trace of {name}", _trace, results, config, variants[name], params, inputs)
    clock.lap("trace")
    for name in chosen[options.largest_batch]:
        rest = (config, variants[name], params, options, peaks[name])
        clock.attempt(f"largest batch of {name}", _fit, results, *rest)
    clock.lap("largest batch")
    return times


def _by_importance() -> list[decoder.Variant]:
    """Both MLPs of a pair together, and cuDNN's attention first: a run may be cut short."""
    return sorted(decoder.VARIANTS, key=lambda v: (v.attention != "cudnn", v.norm, v.mlp))


class _Clock:
    """What a run has left, and where its time went."""

    def __init__(self, results: Results, seconds: float):
        self.results, self.seconds = results, seconds
        self.start = self.last = time.monotonic()

    def over(self, share: float = 1.0) -> bool:
        """Whether that share of the time is gone."""
        return time.monotonic() - self.start > share * self.seconds

    def lap(self, phase: str) -> None:
        now = time.monotonic()
        self.results.add({"measure": "model_seconds", "phase": phase, "seconds": now - self.last})
        self.results.write()
        self.last = now

    def attempt(self, what: str, measure: Callable[..., None], *arguments: Any) -> None:
        """Note what could not be made, and go on; nothing new is started when time is over."""
        try:
            if self.over():
                raise NotMade("out of time")
            measure(*arguments)
        except Exception as error:
            self.results.not_made(what, reason(error))
        self.results.write()


def _fit(
    results: Results,
    config: decoder.Config,
    variant: decoder.Variant,
    params: Any,
    options: argparse.Namespace,
    peak_bytes: int,
) -> None:
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit is None:
        raise NotMade("this platform tells no memory limit")
    found = largest_batch(config, variant, params, options, peak_bytes, limit)
    results.add({"measure": "model_largest_batch", "variant": variant.name, **found})
    print(f"{variant.name:<32} {found['sequences']} sequences fit", flush=True)


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
    command.add_argument("--sequences", type=int, help="default: the model's own")
    command.add_argument("--length", type=int, help="default: the model's own")
    command.add_argument("--variants", default="*", help="pattern, as plain+cudnn+*")
    command.add_argument("--rounds", type=int, default=5)
    command.add_argument("--sample-ms", type=float, default=100)
    command.add_argument("--seconds", type=float, default=120, help="start nothing new after")
    for what in ("trace", "largest-batch"):
        command.add_argument(f"--{what}", choices=("best", "all", "none"), default="best")
    command.add_argument("--out", type=Path, default=RESULTS)
    options = command.parse_args(arguments)
    config = configs[options.model]
    options.sequences = options.sequences or config.sequences
    options.length = options.length or config.length
    told = {k: v for k, v in vars(options).items() if k != "out"}
    results = Results(f"model-{options.model}", options.out, told)
    results.data["model"] = asdict(config)
    times = measure(results, config, options)
    effects = attribution(times)
    results.add({"measure": "model_attribution", "ratios": effects})
    for axis, value in effects.items():
        first, second = decoder.CHOICES[axis]
        print(f"{axis}: time with {first} over time with {second}: {value:.4f}")
    results.write()
    print(f"wrote {results.path}")
    return results.path


if __name__ == "__main__":
    main()
