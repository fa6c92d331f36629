"""What a stage is: names, form and operands, and how to read a call off abstract values."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend import core

from swiglu_jax._candidate import StageCall
from swiglu_jax._stages._params import StageParams


@dataclass(frozen=True)
class Stage:
    """One of the two fused stages, and the primitive that stands for it in a jaxpr."""

    name: str
    outputs: tuple[str, ...]
    """All outputs, in canonical order; a bitmask of outputs counts from the first."""
    form: Callable[..., list[jax.Array]]
    """The XLA form: (*operands, params=...) to the asked outputs."""
    derivative_form: Callable[..., list[jax.Array]]
    """The form without rounding in between, whose JVP is the stage's."""
    needed: Callable[[tuple[str, ...]], tuple[bool, ...]]
    """Which operands a set of outputs needs."""
    letters: Callable[[str], tuple[str, ...]]
    """For a weight layout, each operand's trailing dimensions in letters of (h, i); "l" stands
    for any number of leading dimensions. Results are all "li"."""
    primitive: core.Primitive = field(compare=False)

    def bind(self, *operands: jax.Array, params: StageParams) -> dict[str, jax.Array]:
        """Run the stage; the operands that the asked outputs do not need are left out.

        Returns:
            Output name to array.
        """
        needed = self.needed(params.outputs)
        used = [a for a, need in zip(operands, needed, strict=True) if need]
        results = self.primitive.bind(*used, params=params)
        return dict(zip(params.outputs, results, strict=True))

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
        sizes: dict[str, Any] = {"l": 1}
        for shape, names in zip(shapes, self.letters(params.weight_layout), strict=False):
            trailing = len(names) - names.count("l")
            for size, name in zip(shape[len(shape) - trailing :], names[-trailing:], strict=True):
                sizes[name] = size
        for size in shapes[0][:-1]:
            sizes["l"] *= size
        return StageCall(
            stage=self.name,
            outputs=params.outputs,
            weight_layout=params.weight_layout,
            dtype=str(avals[0].dtype),
            m=_static(sizes["l"]),
            h=_static(sizes["h"]),
            i=_static(sizes["i"]),
        )


def _static(size: Any) -> int | None:
    return size if isinstance(size, int) else None
