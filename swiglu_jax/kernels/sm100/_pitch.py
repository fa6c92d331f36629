"""Rows of gate and up at a pitch that is read from the problem size.

FROST generates the Python source of a kernel and compiles it. In that source the row pitch of an
auxiliary input is a literal (``row * 17408``), so a kernel would serve one I only. gate and up are
contiguous [M, I] tensors and I is the problem's N, an Int64 in the same scope: this module puts N
in the place of the literal, and ties the tensors' declared stride to the same symbol, so that the
entry refuses a tensor whose pitch is not N. The product is 64 bits wide then, where the literal
made it 32: M * I may exceed 2^31.

The graph is built for one shape whose sizes are no other number of the source (`PLACEHOLDER`). They
are as badly aligned as a legal size can be, so nothing that FROST derives from divisibility holds
for that shape only. Every replacement is counted, and no size of the placeholder may be left over.
"""

import re
from dataclasses import dataclass

from swiglu_jax.kernels.sm100._seam import SeamMoved


@dataclass(frozen=True)
class Shape:
    """Sizes of a problem."""

    m: int
    h: int
    i: int


# M, H / 8 and I / 16 are odd primes.
PLACEHOLDER = Shape(m=4099, h=8 * 5003, i=16 * 6007)


def _replace(source: str, old: str, new: str, count: int) -> str:
    found = source.count(old)
    if found != count:
        raise SeamMoved(
            f"FROST's source has {old!r} {found} times where {count} are expected: read how it "
            "addresses auxiliary inputs now, and adapt swiglu_jax/kernels/sm100/_pitch.py"
        )
    return source.replace(old, new)


def read_pitch_from_problem(source: str, auxiliaries: tuple[str, ...], shape: Shape) -> str:
    """FROST's ``source`` for ``shape``, rewritten to serve every I.

    Args:
        source: what FROST generated.
        auxiliaries: names of the [1, M, I] inputs that the epilogue reads.
        shape: the sizes that the graph was built for.

    Raises:
        SeamMoved: where the source is not what it was when this was written.
    """
    if auxiliaries:
        _check_sizes_in_scope(source)
    for name in auxiliaries:
        pointer = f"_aux_{name}_ptr"
        source = _replace(
            source,
            f"({pointer} + row * {shape.i} + col_j).load(count=vsize, alignment=",
            f"({pointer} + row * N + col_j).load(count=vsize, alignment=",
            1,
        )
        source = _replace(
            source,
            f"({pointer} + _auxr_{name} * {shape.i} + _auxc_{name}).load()",
            f"({pointer} + _auxr_{name} * N + _auxc_{name}).load()",
            1,
        )
        source = _replace(
            source,
            f"(1, sym_m, sym_n), stride=({shape.m * shape.i}, {shape.i}, 1), assumed_align=32)\n",
            "(1, sym_m, sym_n), stride=(cute.sym_int64(), sym_n, 1), assumed_align=32)\n",
            len(auxiliaries) if name == auxiliaries[0] else 0,
        )
    check_no_size_left(source, shape)
    return source


def read_pitch_from_problem_sm120(source: str, auxiliaries: tuple[str, ...], shape: Shape) -> str:
    """The same for FROST's SM120 family, which reads gate and up anew at each use.

    Its product of row and pitch has 64 bits as generated. Each use occurs twice, for whole and for
    partial tiles.

    Raises:
        SeamMoved: where the source is not what it was when this was written.
    """
    if auxiliaries:
        _check_sizes_in_scope(source)
    for name in auxiliaries:
        old = f"(_aux_{name}_ptr + cutlass.Int64(row) * {shape.i} + col_j).load(count=vsize, "
        new = f"(_aux_{name}_ptr + cutlass.Int64(row) * N + col_j).load(count=vsize, "
        count = source.count(old)
        if count not in (2, 4):
            raise SeamMoved(f"FROST's source reads {name} {count} times where 2 or 4 are expected")
        source = _replace(source, old, new, count)
    strides = f"(1, sym_m, sym_n), stride=({shape.m * shape.i}, {shape.i}, 1), assumed_align="
    free = "(1, sym_m, sym_n), stride=(cute.sym_int64(), sym_n, 1), assumed_align="
    source = _replace(source, strides, free, len(auxiliaries))
    check_no_size_left(source, shape)
    return source


def _check_sizes_in_scope(source: str) -> None:
    """N must be the problem's own 64-bit size, and sym_n the symbol that it is checked with."""
    for line in ("    n: cutlass.Int64,\n", "    N = n\n"):
        _replace(source, line, line, 1)
    if len(re.findall(r"^    sym_n = cute\.sym_int64\(divisibility=", source, re.M)) != 1:
        raise SeamMoved("FROST's source no longer declares sym_n as a 64-bit symbol")


def check_no_size_left(source: str, shape: Shape) -> None:
    """Refuse a source that still depends on the placeholder's sizes.

    Raises:
        SeamMoved: naming the number and its line.
    """
    m, h, i = shape.m, shape.h, shape.i
    sizes = {m, h, i, h // 8, i // 16, m * h, m * i, h * i, 2 * h, 2 * i, 2 * m}
    for number, line in enumerate(source.splitlines(), 1):
        for literal in re.findall(r"(?<![\w.])\d+(?![\w.])", line):
            if int(literal) in sizes:
                raise SeamMoved(
                    f"line {number} of FROST's source depends on the problem's size: {line.strip()}"
                )
