"""Kernels from checkpoints: weights as PyTorch stores them, [out, in], and fused Flax kernels."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from swiglu_jax.flax._mlp import PROJECTIONS

FUSED = "gate_up_proj"


def kernels_from_torch(
    tensors: Mapping[str, Any], prefix: str = "", *, dtype: DTypeLike | None = None
) -> dict[str, dict[str, jax.Array]]:
    """Flax kernels of one MLP from tensors named and stored as in Hugging Face checkpoints.

    The result is what Linen calls the module's ``params``, and what ``flax.nnx.update`` takes for
    an NNX module.

    Args:
        tensors: arrays by name, as ``safetensors.numpy.load_file`` returns them, for one model or
            for one layer: ``{prefix}gate_proj.weight`` and ``{prefix}up_proj.weight`` [I, H], or
            both as one ``{prefix}gate_up_proj.weight`` [2 I, H], gate's rows first;
            ``{prefix}down_proj.weight`` [H, I].
        prefix: what stands before the names, such as "model.layers.0.mlp.".
        dtype: of the kernels; None keeps each tensor's own.

    Returns:
        ``{"gate_proj": {"kernel": [H, I]}, "up_proj": {"kernel": [H, I]}, "down_proj":
        {"kernel": [I, H]}}``.

    Raises:
        KeyError: a tensor is missing.
        ValueError: shapes that do not fit, a bias, or the gate both alone and fused.
    """
    found = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    for name in (*PROJECTIONS, FUSED):
        if f"{name}.bias" in found:
            raise ValueError(f"{prefix}{name}.bias: a SwiGLU MLP with biases is not supported")
    weights = {n: found[f"{n}.weight"] for n in (*PROJECTIONS, FUSED) if f"{n}.weight" in found}
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
    _check_shapes({name: tuple(weights[name].shape) for name in PROJECTIONS}, prefix)
    return {name: {"kernel": jnp.asarray(weights[name], dtype).T} for name in PROJECTIONS}


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
        ValueError: shapes that do not fit, or a bias.
    """
    for name in (FUSED, "down_proj"):
        if name not in kernels or "kernel" not in kernels[name]:
            raise KeyError(f"{name}/kernel is not among the kernels")
        if "bias" in kernels[name]:
            raise ValueError(f"{name}/bias: a SwiGLU MLP with biases is not supported")
    fused, down = kernels[FUSED]["kernel"], kernels["down_proj"]["kernel"]
    *stacked, hidden, width = down.shape
    if tuple(fused.shape) == (*stacked, width, 2 * hidden):
        fused = fused.reshape(*stacked, width, 2, hidden)
    if tuple(fused.shape) != (*stacked, width, 2, hidden):
        raise ValueError(
            f"{FUSED}/kernel: expected [..., H, 2 I] or [..., H, 2, I], with down_proj's "
            f"[..., I, H] = {tuple(down.shape)}; got {tuple(fused.shape)}"
        )
    found = {"gate_proj": fused[..., 0, :], "up_proj": fused[..., 1, :], "down_proj": down}
    return {name: {"kernel": jnp.asarray(found[name], dtype)} for name in PROJECTIONS}


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
    """
    return {
        f"{prefix}{n}.weight": jnp.swapaxes(jnp.asarray(kernels[n]["kernel"]), -1, -2)
        for n in PROJECTIONS
    }


def _check_shapes(shapes: dict[str, tuple[int, ...]], prefix: str) -> None:
    gate = shapes["gate_proj"]
    if len(gate) != 2:
        raise ValueError(f"{prefix}gate_proj.weight: expected [I, H], got {gate}")
    for name, expected in (("up_proj", gate), ("down_proj", gate[::-1])):
        if shapes[name] != expected:
            raise ValueError(
                f"{prefix}{name}.weight: expected {expected}, from gate_proj's [I, H] = {gate}; "
                f"got {shapes[name]}"
            )
