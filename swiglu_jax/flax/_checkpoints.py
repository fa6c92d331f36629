"""Kernels from checkpoints: weights as PyTorch stores them, [out, in], and fused Flax kernels.

What a checkpoint holds beyond the three kernels (biases, the scales of quantized weights, adapters)
is refused by name: an MLP without it would compute something else, and nobody would notice.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from swiglu_jax._arguments import SUPPORTED_DTYPES, is_supported, taken
from swiglu_jax.flax._mlp import PROJECTIONS

FUSED = "gate_up_proj"


def kernels_from_torch(
    tensors: Mapping[str, Any], prefix: str = "", *, dtype: DTypeLike | None = None
) -> dict[str, dict[str, jax.Array]]:
    """Flax kernels of one MLP from tensors named and stored as in Hugging Face checkpoints.

    The result is what Linen calls the module's ``params``, and what ``flax.nnx.update`` takes for
    an NNX module.

    Args:
        tensors: arrays by name, of NumPy, JAX or PyTorch (detached), as
            ``safetensors.numpy.load_file`` returns them, for one model or for one layer:
            ``{prefix}gate_proj.weight`` and ``{prefix}up_proj.weight`` [I, H], or both as one
            ``{prefix}gate_up_proj.weight`` [2 I, H], gate's rows first;
            ``{prefix}down_proj.weight`` [H, I].
        prefix: what stands before the names, such as "model.layers.0.mlp.".
        dtype: of the kernels; None keeps each tensor's own, as far as JAX keeps it (without x64
            float64 becomes float32).

    Returns:
        ``{"gate_proj": {"kernel": [H, I]}, "up_proj": {"kernel": [H, I]}, "down_proj":
        {"kernel": [I, H]}}``.

    Raises:
        KeyError: a tensor is missing.
        TypeError: a tensor is no array, or not of a floating dtype (quantized ones are integers);
            ``tensors`` is no mapping from text, or ``prefix`` no text.
        ValueError: shapes that do not fit, the gate both alone and fused, or a tensor below the
            prefix that the MLP has no place for: a bias, a quantized weight's scale, an adapter.
    """
    _check_dtype_asked(dtype)
    _check_mapping("tensors", tensors)
    _check_text("prefix", prefix)
    found = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    expected = [f"{name}.weight" for name in (*PROJECTIONS, FUSED)]
    _check_names([f"{prefix}{n}" for n in found], [f"{prefix}{n}" for n in expected], ".bias")
    weights = {
        n.removesuffix(".weight"): _as_kernel(f"{prefix}{n}", found[n], dtype)
        for n in expected
        if n in found
    }
    if FUSED in weights:
        for name in PROJECTIONS[:2]:
            if name in weights:
                raise ValueError(f"{prefix}{name}.weight is there alone and within {FUSED}")
        fused = weights.pop(FUSED)
        if fused.ndim != 2 or fused.shape[0] % 2:
            raise ValueError(f"{prefix}{FUSED}.weight: expected [2 I, H], got {fused.shape}")
        rows = fused.shape[0] // 2
        weights |= {"gate_proj": fused[:rows], "up_proj": fused[rows:]}
    for name in PROJECTIONS:
        if name not in weights:
            raise KeyError(f"{prefix}{name}.weight is not among the tensors")
    _check_shapes(weights, prefix + "{}.weight", "[I, H]")
    return {name: {"kernel": weights[name].T} for name in PROJECTIONS}


def kernels_from_fused(
    kernels: Mapping[str, Mapping[str, Any]], *, dtype: DTypeLike | None = None
) -> dict[str, dict[str, jax.Array]]:
    """Flax kernels of one MLP from a Flax MLP that keeps gate and up in one kernel.

    Args:
        kernels: ``{"gate_up_proj": {"kernel": ...}, "down_proj": {"kernel": [..., I, H]}}``; the
            fused kernel is [..., H, 2 I], gate's columns first, or [..., H, 2, I]. Leading
            dimensions are those of layers stacked for a scan.
        dtype: of the kernels; None keeps each one's own.

    Returns:
        As ``kernels_from_torch``, with the leading dimensions in front.

    Raises:
        KeyError: a kernel is missing.
        TypeError: a kernel is no array, or not of a floating dtype; ``kernels`` is no mapping from
            text to such mappings.
        ValueError: shapes that do not fit, or something that the MLP has no place for, as a bias.
    """
    _check_dtype_asked(dtype)
    given = _kernels_alone(kernels, (FUSED, "down_proj"), dtype)
    fused, down = given[FUSED], given["down_proj"]
    if down.ndim < 2:
        raise ValueError(f"down_proj/kernel: expected [..., I, H], got {down.shape}")
    *stacked, hidden, width = down.shape
    if fused.shape == (*stacked, width, 2 * hidden):
        fused = fused.reshape(*stacked, width, 2, hidden)
    if fused.shape != (*stacked, width, 2, hidden):
        raise ValueError(
            f"{FUSED}/kernel: expected [..., H, 2 I] or [..., H, 2, I], with down_proj's "
            f"[..., I, H] = {down.shape}; got {fused.shape}"
        )
    found = {"gate_proj": fused[..., 0, :], "up_proj": fused[..., 1, :], "down_proj": down}
    return {name: {"kernel": found[name]} for name in PROJECTIONS}


def kernels_to_torch(
    kernels: Mapping[str, Mapping[str, Any]], prefix: str = ""
) -> dict[str, jax.Array]:
    """The inverse of ``kernels_from_torch``, with gate and up apart.

    Args:
        kernels: Linen's ``params`` of one module, or ``nnx.to_pure_dict(nnx.state(mlp))``; leading
            dimensions, of layers stacked for a scan, stay in front.
        prefix: what to put before the names.

    Returns:
        ``{prefix}gate_proj.weight`` and ``{prefix}up_proj.weight`` [I, H], and
        ``{prefix}down_proj.weight`` [H, I].

    Raises:
        KeyError, TypeError, ValueError: as ``kernels_from_fused`` does.
    """
    _check_text("prefix", prefix)
    given = _kernels_alone(kernels, PROJECTIONS, None)
    _check_shapes(given, "{}/kernel", "[..., H, I]")
    return {f"{prefix}{n}.weight": jnp.swapaxes(given[n], -1, -2) for n in PROJECTIONS}


def _kernels_alone(
    kernels: Mapping[str, Mapping[str, Any]], owners: Iterable[str], dtype: DTypeLike | None
) -> dict[str, jax.Array]:
    """The kernels of these owners, in a tree that holds nothing else."""
    _check_mapping("kernels", kernels)
    for owner, leaves in kernels.items():
        _check_mapping(owner, leaves)
    owned = {f"{owner}/{leaf}" for owner, leaves in kernels.items() for leaf in leaves}
    _check_names(owned, [f"{owner}/kernel" for owner in owners], "/bias")
    for owner in owners:
        if f"{owner}/kernel" not in owned:
            raise KeyError(f"{owner}/kernel is not among the kernels")
    return {o: _as_kernel(f"{o}/kernel", kernels[o]["kernel"], dtype) for o in owners}


def _check_names(found: Iterable[str], expected: list[str], bias: str) -> None:
    for name in sorted(set(found) - set(expected)):
        if name.endswith(bias):
            raise ValueError(f"{name}: a SwiGLU MLP with biases is not supported")
        raise ValueError(
            f"{name}: expected nothing but {', '.join(expected)}; the MLP has no place for what "
            "else is there (dequantize weights that have scales and merge adapters first, and give "
            "the prefix of one MLP)"
        )


def _check_mapping(name: str, given: Any) -> None:
    if not isinstance(given, Mapping):
        raise TypeError(f"{name}: expected a mapping, got {type(given).__name__}")
    for key in given:
        _check_text(f"a key of {name}", key)


def _check_text(name: str, given: Any) -> None:
    if not isinstance(given, str):
        raise TypeError(f"{name}: expected text, got {given!r}")


def _check_dtype_asked(dtype: DTypeLike | None) -> None:
    if dtype is None:
        return
    try:
        supported = is_supported(jnp.dtype(dtype))
    except TypeError:  # nobody's dtype
        supported = False
    if not supported:
        raise TypeError(f"dtype: expected {SUPPORTED_DTYPES}, got {dtype}")


def _as_kernel(name: str, tensor: Any, dtype: DTypeLike | None) -> jax.Array:
    """A tensor as a JAX array, of ``dtype`` or its own."""
    if not (hasattr(tensor, "shape") and hasattr(tensor, "dtype")):
        raise TypeError(f"{name}: expected an array, got {type(tensor).__name__}")
    array = taken(name, tensor, _array_of)
    if not is_supported(array.dtype):
        raise TypeError(
            f"{name}: expected {SUPPORTED_DTYPES}, got {tensor.dtype}; a quantized weight must be "
            "dequantized first"
        )
    return array if dtype is None else array.astype(dtype)


def _array_of(tensor: Any) -> jax.Array:
    try:
        return jnp.asarray(tensor)
    except TypeError:
        if not hasattr(tensor, "__dlpack__"):
            raise
        # PyTorch hands bfloat16 and float8 over in no other way; a copy, not its memory.
        return jnp.array(jax.dlpack.from_dlpack(tensor), copy=True)


def _check_shapes(arrays: Mapping[str, jax.Array], named: str, letters: str) -> None:
    """All three fit gate's shape, ``letters``; ``named`` formats a projection's name for errors."""
    gate = arrays["gate_proj"].shape
    if len(gate) < 2 or (len(gate) > 2 and "..." not in letters):
        raise ValueError(f"{named.format('gate_proj')}: expected {letters}, got {gate}")
    *stacked, rows, columns = gate
    for name, expected in (("up_proj", gate), ("down_proj", (*stacked, columns, rows))):
        if arrays[name].shape != expected:
            raise ValueError(
                f"{named.format(name)}: expected {expected}, from gate_proj's {letters} = {gate}; "
                f"got {arrays[name].shape}"
            )
