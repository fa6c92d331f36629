"""What a stage is: names, form and operands, and how to read a call off abstract values."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import jax
from jax.extend import core

from swiglu_jax._candidate import StageCall
from swiglu_jax._stages._params import StageParams
from swiglu_jax.kernels._variant import STAGE_OUTPUTS


@dataclass(frozen=True)
class Stage:
    """One stage of the op, and the primitive that stands for it in a jaxpr."""

    name: str
    """A key of ``STAGE_OUTPUTS``."""
    form: Callable[..., list[jax.Array]]
    """The XLA form: (*operands, params=...) to the asked outputs."""
    derivative_form: Callable[..., list[jax.Array]]
    """The form without rounding in between, whose JVP is the stage's."""
    needed: Callable[[tuple[str, ...]], tuple[bool, ...]]
    """Which operands a set of outputs needs."""
    letters: Callable[[str], tuple[str, ...]]
    """For a weight layout, each operand's dimensions in letters; "l" stands for any number of
    leading dimensions."""
    result_letters: Callable[[str], tuple[str, ...]]
    """Likewise for each of ``outputs``."""
    primitive: core.Primitive = field(compare=False)
    spent: tuple[int, ...] = ()
    """Positions of the operands, of the outputs' shape, that a step has no use for afterwards. A
    kernel that can writes its first outputs in their memory; XLA copies what is still used."""
    gemm: tuple[int, int] = (0, 1)
    """Which two of the operands that it is bound with make its (first) matrix product."""
    divisible: bool = True
    """Whether the partitioner can divide it; XLA divides the form of one that it cannot."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """All outputs, in canonical order."""
        return STAGE_OUTPUTS[self.name]

    def bind(self, *operands: jax.Array, params: StageParams) -> dict[str, jax.Array]:
        """Run the stage; the operands that the asked outputs do not need are left out.

        Returns:
            Output name to array.
        """
        results = self.primitive.bind(*self.used(operands, params), params=params)
        return dict(zip(params.outputs, results, strict=True))

    def inline(self, *operands: jax.Array, params: StageParams) -> dict[str, jax.Array]:
        """As ``bind``, but with the XLA form in the stage's place, for JAX to see through."""
        results = self.form(*self.used(operands, params), params=params)
        return dict(zip(params.outputs, results, strict=True))

    def used(self, operands: Sequence[Any], params: StageParams) -> list[Any]:
        """Those of all operands that the asked outputs need."""
        needed = self.needed(params.outputs)
        return [a for a, need in zip(operands, needed, strict=True) if need]

    @property
    def keeps_rows(self) -> bool:
        """Whether the leading dimensions are also the results': then more rows are more of all."""
        return all("l" in names for layout in ("OI", "IO") for names in self.result_letters(layout))

    def operand_letters(self, params: StageParams) -> list[str]:
        """``letters`` of the operands that it is bound with."""
        needed = self.needed(params.outputs)
        letters = self.letters(params.weight_layout)
        return [names for names, need in zip(letters, needed, strict=True) if need]

    def has_rows(self, params: StageParams) -> list[bool]:
        """Which of the operands that it is bound with have leading dimensions."""
        return ["l" in names for names in self.operand_letters(params)]

    def result_shapes(
        self, outputs: Sequence[str], shapes: Sequence[tuple[int, ...]], params: StageParams
    ) -> list[tuple[int, ...]]:
        """Shapes of ``outputs`` for operands of ``shapes``, without an axis over calls."""
        sizes = self._sizes(shapes, params)
        letters = dict(zip(self.outputs, self.result_letters(params.weight_layout), strict=True))
        return [
            tuple(size for name in letters[output] for size in sizes[name]) for output in outputs
        ]

    def _sizes(
        self, shapes: Sequence[tuple[Any, ...]], params: StageParams
    ) -> dict[str, tuple[Any, ...]]:
        """Letter to the sizes that it stands for."""
        sizes: dict[str, tuple[Any, ...]] = {}
        for shape, names in zip(shapes, self.operand_letters(params), strict=True):
            lead = names.count("l") and len(shape) - len(names) + 1
            sizes |= {"l": tuple(shape[:lead])} if "l" in names else {}
            trailing = shape[lead:]
            sizes |= {n: (s,) for n, s in zip(names.replace("l", ""), trailing, strict=True)}
        return sizes

    def evaluate(
        self, *operands: jax.Array, params: StageParams, derivative: bool = False
    ) -> list[jax.Array]:
        """The XLA form of these operands, or the form whose JVP is the stage's."""
        form = self.derivative_form if derivative else self.form
        if not params.batched:
            return form(*operands, params=params)
        one = functools.partial(form, params=dataclasses.replace(params, batched=()))
        return jax.vmap(one, in_axes=tuple(0 if b else None for b in params.batched))(*operands)

    def call(self, avals: Sequence[Any], params: StageParams) -> StageCall:
        """The call that these operands (avals or arrays, as bound) make.

        With ``params.batched``, one of the equal calls that they make.
        """
        shapes = [tuple(a.shape) for a in avals]
        if params.batched:
            shapes = [s[1:] if b else s for s, b in zip(shapes, params.batched, strict=True)]
        sizes = self._sizes(shapes, params)
        return StageCall(
            stage=self.name,
            outputs=params.outputs,
            weight_layout=params.weight_layout,
            dtype=str(avals[0].dtype),
            m=_static(math.prod(sizes["l"])),
            h=_static(sizes["h"][0]),
            i=_static(sizes["i"][0]),
        )


def dimensions(letters: str, leading: int) -> list[str]:
    """A name for each dimension of an operand, where "l" stands for ``leading`` of them."""
    lead = [f"l{k}" for k in range(leading)]
    return [name for letter in letters for name in (lead if letter == "l" else [letter])]


def _static(size: Any) -> int | None:
    # NumPy's integers too, which a jax.ShapeDtypeStruct may hold; a symbolic size is neither.
    return int(size) if isinstance(size, Integral) else None
