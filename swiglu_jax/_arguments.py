"""Checks of the public arguments: errors name the argument, what came and what was expected."""

from collections.abc import Callable
from numbers import Integral, Number
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from swiglu_jax._config import IMPLEMENTATIONS, config
from swiglu_jax._residuals import ARGUMENTS

WEIGHT_LAYOUTS = ("OI", "IO")
SUPPORTED_DTYPES = "a floating dtype (bfloat16, float16, float32, float64 or a float8 with a sign)"
"""In words, for errors; ``is_supported`` knows which they are."""


def check_options(weight_layout: Any, implementation: Any, forward_mode: Any) -> str | None:
    """Check the options; the implementation, with the environment's default filled in.

    Raises:
        ValueError: naming the option.
    """
    # An array would compare by elements.
    if not isinstance(weight_layout, str) or weight_layout not in WEIGHT_LAYOUTS:
        raise ValueError(
            'weight_layout: expected "OI" (torch.nn.Linear: w_gate and w_up [I, H], w_down '
            '[H, I]) or "IO" (a Flax kernel: w_gate and w_up [H, I], w_down [I, H]), got '
            f"{weight_layout!r}"
        )
    if not isinstance(forward_mode, bool):
        raise ValueError(f"forward_mode: expected True or False, got {forward_mode!r}")
    if implementation is None:
        return config.implementation
    if not isinstance(implementation, str) or implementation not in IMPLEMENTATIONS:
        raise ValueError(f'implementation: expected None, "xla" or "fused", got {implementation!r}')
    return implementation


def check_arrays(x: Any, w_gate: Any, w_up: Any, w_down: Any, weight_layout: str) -> None:
    """Check dtypes and shapes of arrays (or anything with a shape and a dtype).

    Raises:
        TypeError: an argument is no array, of a dtype that is not supported, or of another dtype
            than x.
        ValueError: an argument has a wrong shape.
    """
    arrays: dict[str, Any] = dict(zip(ARGUMENTS, (x, w_gate, w_up, w_down), strict=True))
    for name, a in arrays.items():
        if not (hasattr(a, "shape") and hasattr(a, "dtype")):
            raise TypeError(f"{name}: expected an array, got {type(a).__name__}")
        _check_dtype(name, a)
        _check_sizes(name, a)
        if dtype_of(a) != dtype_of(x):
            raise TypeError(
                f"{name}: expected x's dtype {dtype_of(x)}, got {dtype_of(a)}; cast it with "
                f"{name}.astype({dtype_of(x)})"
            )
    if len(x.shape) < 1:
        raise ValueError("x: expected shape [..., H] of rank 1 or more, got ()")
    io = weight_layout == "IO"
    width = x.shape[-1]
    first, second = ("[H, I]", "[I, H]") if io else ("[I, H]", "[H, I]")

    def expect(name: str, letters: str, shape: tuple[Any, ...], where: str) -> None:
        got = tuple(arrays[name].shape)
        if len(got) != 2 or got != shape:
            raise ValueError(
                f'{name}: expected shape {letters} = {_text(shape)} in layout "{weight_layout}"'
                f", {where}; got {_text(got)}"
            )

    hidden: Any = "I"
    if len(w_gate.shape) == 2:
        hidden = w_gate.shape[1 if io else 0]
    along = f"with H = {width} from x {_text(tuple(x.shape))}"
    expect("w_gate", first, (width, hidden) if io else (hidden, width), along)
    both = f"{along} and I = {hidden} from w_gate {_text(tuple(w_gate.shape))}"
    expect("w_up", first, (width, hidden) if io else (hidden, width), both)
    expect("w_down", second, (hidden, width) if io else (width, hidden), both)


def _check_dtype(name: str, a: Any) -> None:
    if not is_jax_s(a.dtype):
        raise TypeError(
            f"{name}: expected an array of JAX or NumPy, got {type(a).__module__}."
            f"{type(a).__name__} of {a.dtype}"
        )
    if not is_supported(a.dtype):
        got = "float0" if a.dtype == jax.dtypes.float0 else a.dtype
        raise TypeError(f"{name}: expected {SUPPORTED_DTYPES}, got {got}")
    if isinstance(a, jax.Array) and a.dtype == np.float64 and not _float64_is_kept():
        raise TypeError(
            f"{name}: got float64 where jax_enable_x64 is off and JAX would round to float32; use "
            f"jax.enable_x64(True), or cast with {name}.astype(jax.numpy.float32)"
        )


def _float64_is_kept() -> bool:
    """Whether JAX computes in float64 where it is asked for by name."""
    if jax.config.read("jax_enable_x64"):
        return True
    explicit = getattr(jax.config, "jax_explicit_x64_dtypes", None)
    return getattr(explicit, "name", None) == "ALLOW"


def _check_sizes(name: str, a: Any) -> None:
    """Nothing but a jax.ShapeDtypeStruct can have sizes that are none."""
    for size in a.shape:
        if isinstance(size, Number) and not (isinstance(size, Integral) and int(size) >= 0):
            raise ValueError(
                f"{name}: expected sizes that are integers of 0 or more, got {_text(a.shape)}"
            )


def is_jax_s(dtype: Any) -> bool:
    """Whether it is a dtype of NumPy's or JAX's, supported or not; torch.float32 is neither."""
    try:
        jnp.issubdtype(dtype, jnp.floating)
    except TypeError:
        return False
    return True


def is_supported(dtype: Any) -> bool:
    """Whether the op computes in it: see ``SUPPORTED_DTYPES``.

    XLA has no products of formats below a byte or beyond float64, and float8_e8m0fnu, a format
    of scales, has neither sign nor zero.
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        return False
    facts = jnp.finfo(dtype)
    return facts.bits in (8, 16, 32, 64) and bool(facts.min < 0)


def as_arrays(*arrays: Any) -> tuple[jax.Array, ...]:
    """NumPy arrays as JAX arrays, copied; JAX's own as they are, but without weak types.

    Raises:
        TypeError: an argument has no values, or none that JAX can take; naming it.
    """
    for name, a in zip(ARGUMENTS, arrays, strict=True):
        if isinstance(a, jax.ShapeDtypeStruct):
            raise TypeError(
                f"{name}: expected an array, got a jax.ShapeDtypeStruct; explain takes those, and "
                "jax.eval_shape gives the shape of swiglu_mlp's result for them"
            )
    return tuple(map(_as_array, ARGUMENTS, arrays))


def dtype_of(a: Any) -> np.dtype:
    """The dtype that JAX gives an argument: NumPy's float64 is float32 where x64 is off."""
    if isinstance(a, jax.Array | jax.ShapeDtypeStruct):
        return np.dtype(a.dtype)
    return np.dtype(jax.dtypes.canonicalize_dtype(np.dtype(a.dtype).newbyteorder("=")))


def taken(name: str, a: Any, convert: Callable[[Any], jax.Array]) -> jax.Array:
    """``convert(a)``; what JAX does not take raises TypeError with the argument's name."""
    try:
        if isinstance(a, np.ma.MaskedArray):
            raise TypeError("JAX has no masks, so fill what is masked")
        return convert(a)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        what = f"{type(a).__module__}.{type(a).__name__} of {a.dtype}"
        raise TypeError(
            f"{name}: expected an array, got {what}, which JAX does not take: {error}"
        ) from error


def _as_array(name: str, a: Any) -> jax.Array:
    if not isinstance(a, jax.Array):
        # A copy: the backward pass reads it, and its owner may write to it before that.
        return taken(name, a, lambda a: jnp.array(a, dtype_of(a)))
    return jnp.asarray(a, a.dtype) if jax.typeof(a).weak_type else a


def _text(shape: tuple[Any, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"
