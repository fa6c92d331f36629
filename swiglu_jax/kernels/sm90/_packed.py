"""Two 16-bit floats in one 32-bit register.

Left to itself the compiler keeps each 16-bit value of an array in a register of its own: twice the
registers for the 128 values a thread keeps of a tile, and hundreds of spills.
"""

import cutlass
from cutlass import Float32, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


@dsl_user_op
def pack(low: Float32, high: Float32, dtype: type[cutlass.Numeric], *, loc=None, ip=None) -> Uint32:
    """Round two float32 to ``dtype`` (to nearest even), ``low`` into the low half."""
    name = "bf16x2" if dtype is cutlass.BFloat16 else "f16x2"
    return Uint32(
        llvm.inline_asm(
            T.i32(),
            [Float32(high).ir_value(loc=loc, ip=ip), Float32(low).ir_value(loc=loc, ip=ip)],
            f"cvt.rn.{name}.f32 $0, $1, $2;",
            "=r,f,f",
            has_side_effects=False,
            loc=loc,
            ip=ip,
        )
    )


@dsl_user_op
def unpack(word: Uint32, half: int, dtype: type[cutlass.Numeric], *, loc=None, ip=None) -> Float32:
    """The low (0) or high (1) half as float32, exactly."""
    if dtype is cutlass.BFloat16:
        code = ("shl.b32 $0, $1, 16;", "and.b32 $0, $1, 0xffff0000;")[half]
    else:
        halves = ("{v, _}", "{_, v}")[half]
        code = f"{{.reg .b16 v; mov.b32 {halves}, $1; cvt.f32.f16 $0, v;}}"
    return Float32(
        llvm.inline_asm(
            T.f32(),
            [Uint32(word).ir_value(loc=loc, ip=ip)],
            code,
            "=f,r",
            has_side_effects=False,
            loc=loc,
            ip=ip,
        )
    )
