"""The epilogues, as values: what to keep of an accumulator, and what to make of it.

The GEMM (``_gemm.py``) knows an epilogue only through this interface:

- ``operands``: how many B operands share a stage side by side along N;
- ``aux``: names of the [M, N] tensors that it reads; ``outputs``: of those that a tile writes;
- ``hold(acc)``: what of a finished accumulator outlives the start of the next tile;
- ``chunk(...)``: a thread's elements of a few columns, for every output.

A chunk is 16 columns; a thread's inputs and results of it are four registers of two elements
each, in the order of the accumulator: (two columns) x (row, row + 8) x (columns, + 8).
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32, const_expr

from swiglu_jax.kernels.sm90._activation import sigmoid
from swiglu_jax.kernels.sm90._packed import pack, unpack


class _Rounded:
    """An epilogue that keeps its accumulator rounded to the output's type, two to a register."""

    @cute.jit
    def hold(self, acc: cute.Tensor, held: cute.Tensor, dtype: cutlass.Constexpr) -> None:
        """Round; words in the accumulator's order."""
        for i in cutlass.range_constexpr(cute.size(acc) // 2):
            held[i] = pack(acc[2 * i], acc[2 * i + 1], dtype)

    def held(self, acc: cute.Tensor) -> cute.Tensor:
        """Registers for ``hold``."""
        return cute.make_rmem_tensor(cute.size(acc) // 2, Uint32)


@dataclass(frozen=True)
class Product(_Rounded):
    """The accumulator itself, rounded once."""

    outputs: tuple[str, ...] = ("product",)
    operands: int = 1
    aux: tuple[str, ...] = ()

    @cute.jit
    def chunk(
        self,
        index: cutlass.Constexpr,
        held: cute.Tensor,
        aux: cutlass.Constexpr,
        results: cutlass.Constexpr,
        dtype: cutlass.Constexpr,
    ) -> None:
        """Write the ``index``-th registers of the output into ``results``."""
        words = cute.size(results[0])
        for w in cutlass.range_constexpr(words):
            results[0][w] = held[index * words + w]


@dataclass(frozen=True)
class GateUp(_Rounded):
    """h = silu(gate) * up, gate and up from one accumulator: gate in its first half of columns.

    A thread holds gate and up of the same element, so nothing is exchanged. Both are rounded to
    the output's type first; that is also what makes them small enough (64 registers a thread) to
    be kept while the next tile multiplies.
    """

    outputs: tuple[str, ...]
    operands: int = 2
    aux: tuple[str, ...] = ()

    @cute.jit
    def chunk(
        self,
        index: cutlass.Constexpr,
        held: cute.Tensor,
        aux: cutlass.Constexpr,
        results: cutlass.Constexpr,
        dtype: cutlass.Constexpr,
    ) -> None:
        """Write the ``index``-th registers of every output into ``results``."""
        words = cute.size(results[0])
        gates = index * words
        ups = cute.size(held) // 2 + gates
        for name, result in zip(self.outputs, results, strict=True):
            for w in cutlass.range_constexpr(words):
                gate = held[gates + w]
                up = held[ups + w]
                if const_expr(name == "h"):
                    g0, g1 = unpack(gate, 0, dtype), unpack(gate, 1, dtype)
                    h0 = g0 * sigmoid(g0) * unpack(up, 0, dtype)
                    h1 = g1 * sigmoid(g1) * unpack(up, 1, dtype)
                    result[w] = pack(h0, h1, dtype)
                else:
                    result[w] = gate if name == "gate" else up


@dataclass(frozen=True)
class DownDswiglu:
    """The cotangents of gate and up from dh, and h again, all from the float32 accumulator.

    With s = sigmoid(gate): dup = dh s gate; dgate = dh up s (1 + gate (1 - s)); h = gate s up. The
    slope is computed as s + s gate (1 - s), which stays finite for every finite gate.
    """

    outputs: tuple[str, ...]
    operands: int = 1

    @property
    def aux(self) -> tuple[str, ...]:
        """``up`` is read only where dgate or h is written."""
        return ("gate",) if self.outputs == ("dup",) else ("gate", "up")

    @cute.jit
    def hold(self, acc: cute.Tensor, held: cute.Tensor, dtype: cutlass.Constexpr) -> None:
        """dh in float32, moved out of the accumulator's registers."""
        for i in cutlass.range_constexpr(cute.size(acc)):
            held[i] = acc[i]

    def held(self, acc: cute.Tensor) -> cute.Tensor:
        """Registers for ``hold``."""
        return cute.make_rmem_tensor(cute.size(acc), Float32)

    @cute.jit
    def chunk(
        self,
        index: cutlass.Constexpr,
        held: cute.Tensor,
        aux: cutlass.Constexpr,
        results: cutlass.Constexpr,
        dtype: cutlass.Constexpr,
    ) -> None:
        """Write the ``index``-th registers of every output into ``results``."""
        words = cute.size(results[0])
        for w in cutlass.range_constexpr(words):
            pairs = [[] for _ in self.outputs]
            for half in (0, 1):
                dh = held[(index * words + w) * 2 + half]
                g = unpack(aux[0][w], half, dtype)
                s = sigmoid(g)
                silu = g * s
                for name, pair in zip(self.outputs, pairs, strict=True):
                    if const_expr(name == "dup"):
                        pair.append(dh * silu)
                    elif const_expr(name == "dgate"):
                        u = unpack(aux[1][w], half, dtype)
                        pair.append(dh * u * (s + silu * (1.0 - s)))
                    else:
                        pair.append(silu * unpack(aux[1][w], half, dtype))
            for pair, result in zip(pairs, results, strict=True):
                result[w] = pack(pair[0], pair[1], dtype)
