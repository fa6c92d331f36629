"""Runs a preset's blocks and puts what comes out into the results."""

import time
from dataclasses import dataclass
from typing import Any

import jax

import swiglu_jax
from benchmarks import errors as float64_errors
from benchmarks import parts, torch_mlps
from benchmarks.absent import NotMade, reason
from benchmarks.first_call import first_calls
from benchmarks.jax_programs import contender, predicted_seconds
from benchmarks.memory import kept_memory
from benchmarks.mlps import JaxMlp, jax_mlps
from benchmarks.presets import Block, Preset
from benchmarks.problems import Problem
from benchmarks.results import Results
from benchmarks.shapes import Shape
from benchmarks.timing import Contender, Timing, interleave, quartiles
from benchmarks.tokamax_mlps import IMPLEMENTATIONS, tokamax_mlps

REQUIRED = ("quack", "tokamax")
"""Peers without which the comparison counts as not made."""

STAGE_ROUNDS = 15
"""A stage and its GEMMs differ by a few hundredths, about as much as one round from another."""

SELECTIONS = {
    "x": ("x",),
    "weights": ("w_gate", "w_up", "w_down"),
    "w_down": ("w_down",),
    "w_up": ("w_up",),
    "nothing": (),
}
"""Sets of differentiated arguments, by name: a frozen MLP, a frozen input, parts of one."""


@dataclass
class Run:
    """One run over a preset."""

    results: Results
    seed: int = 0
    modes: str | None = None
    """"direct" or "loop" for every JAX contender; None picks by predicted time."""

    def __post_init__(self) -> None:
        self.start = time.monotonic()
        self.group = 0
        self.missing: set[str] = set()

    def elapsed(self) -> float:
        return time.monotonic() - self.start

    def run(self, preset: Preset) -> None:
        for block in preset.blocks:
            block_start = self.elapsed()
            for shape in block.shapes:
                late = self.elapsed() > preset.seconds or (
                    block.seconds is not None and self.elapsed() - block_start > block.seconds
                )
                if late:
                    where = shape.to_json()
                    self.results.not_made(", ".join(block.measures), "out of time", **where)
                    continue
                self.shape(block, shape)
                self.results.write()
        self._required(preset)
        self.results.data["seconds"] = round(self.elapsed(), 1)
        self.results.write()

    def shape(self, block: Block, shape: Shape) -> None:
        """Every measure of a block at one shape."""
        started = self.elapsed()
        timed = [m for m in block.measures if m in ("forward", "step", "gemms", "stages")]
        if timed:
            self._guard(f"timing at {shape}", self._timed, block, shape, timed)
        for measure in ("select", "errors", "memory", "first_call"):
            if measure in block.measures:
                self._guard(f"{measure} at {shape}", getattr(self, f"_{measure}"), block, shape)
        print(f"  {shape}: {self.elapsed() - started:.1f} s", flush=True)

    def _guard(self, what: str, function: Any, *arguments: Any) -> None:
        """One measure that fails must not cost the others; it is noted as not made."""
        try:
            function(*arguments)
        except Exception as error:
            self.results.not_made(what, reason(error))

    # Times.

    def _timed(self, block: Block, shape: Shape, measures: list[str]) -> None:
        problem = Problem(shape, self.seed)
        contenders: list[Contender] = []
        ours: list[JaxMlp] = []
        for mlp in self._jax_mlps(block):
            for measure in measures:
                if measure in ("forward", "step"):
                    made = self._contender(mlp, problem, measure)
                    contenders += [made] if made else []
            if mlp.name.startswith("swiglu_jax"):
                ours.append(mlp)
        contenders += self._torch(block, problem, measures)
        layouts = [x for x in ("OI", "IO") if any(m.layout == x for m in self._jax_mlps(block))]
        counts: dict[str, int] = {}
        if "gemms" in measures:
            every = [p for layout in layouts for p in parts.gemms(problem, layout)]
            contenders += self._parts(every, shape)
            counts = {_name(part): part.times for part in every}
        timings = self._interleaved(shape, contenders, block.rounds, block.sample_seconds)
        for layout in layouts:
            self._gemm_sum(shape, layout, timings, counts)
        for mlp in ours:
            self._explain(mlp, shape)
        if "stages" in measures:
            for layout in layouts:
                self._stages(block, problem, layout)

    def _stages(self, block: Block, problem: Problem, layout: str) -> None:
        """The fused stages against their plain GEMMs: few contenders, so many rounds are cheap."""
        dh = [p for p in parts.gemms(problem, layout) if p.name == "dh"]
        every = [
            *dh,
            parts.gate_and_up_gemms(problem, layout),
            *parts.stages(problem, layout, None),
        ]
        contenders = self._parts(every, problem.shape)
        rounds = max(block.rounds, STAGE_ROUNDS)
        self._interleaved(problem.shape, contenders, rounds, block.sample_seconds)

    def _interleaved(
        self, shape: Shape, contenders: list[Contender], rounds: int, sample_seconds: float
    ) -> dict[str, Timing]:
        """Time contenders in one group, whose times may be compared."""
        timings = interleave(contenders, rounds, sample_seconds)
        self.group += 1
        for name, timing in timings.items():
            self._record(name, shape, timing)
        self._print(shape, timings)
        return timings

    def _parts(self, every: list[parts.Part], shape: Shape) -> list[Contender]:
        contenders = []
        for part in every:
            flops = 2 * part.gemms * shape.m * shape.h * shape.i
            predicted = predicted_seconds(flops, 2 * part.gemms * shape.h * shape.i)
            name = _name(part)
            try:
                made = contender(name, part.function, part.sets, predicted, self.modes)
            except Exception as error:
                self.results.not_made(name, reason(error), **shape.to_json())
            else:
                contenders.append(made)
        return contenders

    def _contender(self, mlp: JaxMlp, problem: Problem, measure: str) -> Contender | None:
        shape = problem.shape
        name = f"{measure}:{mlp.key}"
        sets = [mlp.arguments(arrays) for arrays in problem.sets(mlp.layout)]
        function = mlp.step if measure == "step" else mlp.forward
        predicted = predicted_seconds(shape.flops(measure), shape.touched_bytes())
        try:
            with mlp.around(measure, function, *sets[0]):
                return contender(name, function, sets, predicted, self.modes)
        except Exception as error:  # a route or a peer declines in ways of its own
            self.results.not_made(name, reason(error), **shape.to_json())
            return None

    def _jax_mlps(self, block: Block) -> list[JaxMlp]:
        mlps = [m for m in jax_mlps() if block.takes(m.key)]
        if any(block.takes(f"tokamax-{name}/IO") for name in IMPLEMENTATIONS):
            try:
                mlps += [m for m in tokamax_mlps() if block.takes(m.key)]
            except NotMade as error:
                self._missing("tokamax", str(error))
        return mlps

    def _torch(self, block: Block, problem: Problem, measures: list[str]) -> list[Contender]:
        shape = problem.shape
        found: list[Contender] = []
        asked = [m for m in measures if m in ("forward", "step")]
        small = {
            m: self.modes != "direct"
            and predicted_seconds(shape.flops(m), shape.touched_bytes()) < 5e-4
            for m in asked
        }
        for name in torch_mlps.BUILDERS:
            if not asked or not block.takes(f"{name}/OI"):
                continue
            try:
                mlp = torch_mlps.torch_mlp(name)
            except NotMade as error:
                self._missing(name, str(error))
                continue
            try:
                made = list(torch_mlps.contenders(mlp, problem.oi, asked, small))
            except Exception as error:
                self.results.not_made(name, reason(error), **shape.to_json())
                continue
            for item in made:
                if isinstance(item, Contender):
                    found.append(item)
                else:
                    self.results.not_made(item[0], str(item[1]), **shape.to_json())
        return found

    def _missing(self, peer: str, why: str) -> None:
        if peer not in self.missing:
            self.missing.add(peer)
            self.results.not_made(peer, why)

    def _required(self, preset: Preset) -> None:
        """Say in the results whether the comparison with the required peers was made."""
        made = {}
        for peer in REQUIRED:
            made[peer] = any(
                r["measure"] == "step" and r["name"].startswith(peer)
                for r in self.results.data["records"]
            )
        asked = any(b.takes(f"{p}/OI") or b.takes(f"{p}-xla/IO") for b in preset.blocks
                    for p in REQUIRED)  # fmt: skip
        self.results.data["peers"] = {
            "asked": asked,
            "required": made,
            "comparison_made": all(made.values()),
        }

    # Records.

    def _record(self, name: str, shape: Shape, timing: Timing, **more: Any) -> None:
        measure, _, rest = name.partition(":")
        contender_name, _, layout = rest.partition("/")
        self.results.add(
            {
                "measure": measure,
                "name": contender_name,
                "layout": layout,
                **shape.to_json(),
                "group": self.group,
                **timing.to_json(),
                **more,
            }
        )

    def _gemm_sum(
        self, shape: Shape, layout: str, timings: dict[str, Timing], counts: dict[str, int]
    ) -> None:
        """The nine GEMMs' times added up round by round."""
        alone = {k: n for k, n in counts.items() if n and k.endswith(f"/{layout}")}
        if sum(alone.values()) != 9:
            return
        columns = [[n * s for s in timings[k].samples_ms] for k, n in alone.items()]
        rounds = [sum(row) for row in zip(*columns, strict=True)]
        q1, median, q3 = quartiles(rounds)
        self.results.add(
            {
                "measure": "gemm_sum",
                "name": "nine GEMMs alone",
                "layout": layout,
                **shape.to_json(),
                "group": self.group,
                "median_ms": median,
                "q1_ms": q1,
                "q3_ms": q3,
                "samples_ms": rounds,
            }
        )

    def _explain(self, mlp: JaxMlp, shape: Shape) -> None:
        """Which routes served the step that was timed."""
        options = getattr(mlp.apply, "keywords", {})
        first, down = (shape.i, shape.h), (shape.h, shape.i)
        if mlp.layout == "IO":
            first, down = down, first
        arrays = [
            jax.ShapeDtypeStruct(s, shape.dtype) for s in ((shape.m, shape.h), first, first, down)
        ]
        try:
            explained = swiglu_jax.explain(*arrays, **options).to_dict()
        except NotImplementedError:
            return  # noted already, when it could not be compiled
        self.results.add(
            {
                "measure": "route",
                "name": mlp.name,
                "layout": mlp.layout,
                **shape.to_json(),
                "group": self.group,
                "forward": explained["forward"],
                "backward": explained["backward"],
            }
        )

    def _print(self, shape: Shape, timings: dict[str, Timing]) -> None:
        width = max(map(len, timings), default=0)
        for name, t in timings.items():
            q1, median, q3 = quartiles(t.samples_ms)
            print(f"{shape!s:>18}  {name:<{width}} {median:9.4f} ms  [{q1:.4f}, {q3:.4f}]",
                  flush=True)  # fmt: skip

    # Everything that is not the time of a whole forward pass or step.

    def _select(self, block: Block, shape: Shape) -> None:
        """Steps in which only some arguments are differentiated, and what they keep."""
        problem = Problem(shape, self.seed)
        mlps = [m for m in self._jax_mlps(block) if m.name in ("plain", "swiglu_jax")]
        contenders: list[Contender] = []
        for mlp in mlps:
            for selection, names in SELECTIONS.items():
                function = _selected(mlp, names)
                predicted = predicted_seconds(shape.flops("forward"), shape.touched_bytes())
                contenders.append(
                    contender(f"select-{selection}:{mlp.key}", function,
                              problem.sets(mlp.layout), predicted, self.modes)
                )  # fmt: skip
        self._interleaved(shape, contenders, block.rounds, block.sample_seconds)
        for mlp in mlps:
            for selection, names in SELECTIONS.items():
                if names:
                    self._kept(mlp, shape, selection, names)

    def _kept(self, mlp: JaxMlp, shape: Shape, selection: str, names: Any) -> None:
        kept = kept_memory(mlp, shape, names)
        self.results.add(
            {
                "measure": "memory",
                "name": mlp.name,
                "layout": mlp.layout,
                "wrt": selection,
                **shape.to_json(),
                **kept,
            }
        )
        print(f"{shape!s:>18}  kept by {mlp.key} for {selection}: "
              f"{kept['hidden_tensors_and_x']:.2f} [M, I] tensors a layer, the layer's own "
              "input counted in", flush=True)  # fmt: skip

    def _memory(self, block: Block, shape: Shape) -> None:
        for mlp in self._jax_mlps(block):
            self._guard(f"memory of {mlp.key} at {shape}", self._kept, mlp, shape, "all", None)

    def _errors(self, block: Block, shape: Shape) -> None:
        problem = Problem(shape, self.seed, rotate=False)
        reference = float64_errors.sampled_reference(problem.oi[0], self.seed)
        for mlp in self._jax_mlps(block):
            if mlp.name.startswith(("plain", "swiglu_jax")):
                what = f"errors of {mlp.key} at {shape}"
                self._guard(what, self._errors_of, mlp, problem, reference)

    def _errors_of(self, mlp: JaxMlp, problem: Problem, reference: Any) -> None:
        shape = problem.shape
        step = jax.jit(mlp.step)
        results = step(*problem.sets(mlp.layout)[0])
        found = float64_errors.errors(results, mlp.layout, reference)
        again = step(*problem.sets(mlp.layout)[0])
        same = all(bool((a == b).all()) for a, b in zip(results, again, strict=True))
        self.results.add(
            {
                "measure": "errors",
                "name": mlp.name,
                "layout": mlp.layout,
                **shape.to_json(),
                "relative_l2": found,
                "bit_identical_twice": same,
            }
        )
        shown = ", ".join(f"{k} {v:.2e}" for k, v in found.items())
        print(f"{shape!s:>18}  errors of {mlp.key}: {shown}", flush=True)

    def _first_call(self, block: Block, shape: Shape) -> None:
        seconds = first_calls(shape)
        self.results.add({"measure": "first_call", **shape.to_json(), "seconds": seconds})
        for name, values in seconds.items():
            print(f"{shape!s:>18}  first call, {name}: "
                  + ", ".join(f"{v:.2f} s" for v in values), flush=True)  # fmt: skip


def _name(part: parts.Part) -> str:
    return f"{'gemm' if part.times else 'part'}:{part.key}"


def _selected(mlp: JaxMlp, names: tuple[str, ...]) -> Any:
    """The result, and the gradients of the named arguments only."""
    order = ("x", "w_gate", "w_up", "w_down")

    def step(*arrays: Any) -> Any:
        *arguments, dy = arrays
        positions = [order.index(n) for n in names]

        def of_selected(*selected: Any) -> Any:
            full = list(arguments)
            for position, value in zip(positions, selected, strict=True):
                full[position] = value
            return mlp.apply(*full)

        y, pull = jax.vjp(of_selected, *(arguments[p] for p in positions))
        return y, pull(dy)

    return step
