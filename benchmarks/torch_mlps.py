"""The PyTorch contenders: eager, torch.compile, Liger, FLA's GatedMLP and quack.

Weights come from the JAX arrays through DLPack, so that every contender works on the same bytes.
"""

# A peer is imported where it is asked for, so that one that is missing costs no other.
# ruff: noqa: PLC0415

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.absent import NotMade, reason
from benchmarks.problems import Arrays
from benchmarks.timing import Contender

Forward = Callable[..., Any]


@dataclass(frozen=True)
class TorchMlp:
    """One way to compute the MLP in PyTorch."""

    name: str
    apply: Forward
    """Of x and the packed weights."""
    pack: Callable[..., tuple[Any, ...]] = lambda *weights: weights
    """From w_gate, w_up, w_down as torch.nn.Linear stores them to what ``apply`` takes."""
    layout: str = "OI"

    @property
    def key(self) -> str:
        return f"{self.name}/{self.layout}"


def torch_module() -> Any:
    """torch, or NotMade where it cannot be imported."""
    try:
        import torch
    except Exception as error:
        raise NotMade(f"torch cannot be imported: {reason(error)}") from error
    return torch


def _eager(x: Any, w_gate: Any, w_up: Any, w_down: Any) -> Any:
    functional = torch_module().nn.functional
    gate, up = functional.linear(x, w_gate), functional.linear(x, w_up)
    return functional.linear(functional.silu(gate) * up, w_down)


def _compiled() -> TorchMlp:
    torch = torch_module()
    # One program a shape: what a training run with static shapes gets.
    return TorchMlp("torch-compile", torch.compile(_eager, dynamic=False))


def _liger() -> TorchMlp:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    functional = torch_module().nn.functional

    def apply(x: Any, w_gate: Any, w_up: Any, w_down: Any) -> Any:
        h = LigerSiLUMulFunction.apply(functional.linear(x, w_gate), functional.linear(x, w_up))
        return functional.linear(h, w_down)

    return TorchMlp("liger", apply)


def _fla() -> TorchMlp:
    from fla.modules.mlp import GatedMLP

    torch = torch_module()

    def apply(x: Any, module: Any) -> Any:
        return module(x)

    def pack(w_gate: Any, w_up: Any, w_down: Any) -> tuple[Any, ...]:
        inner, width = w_gate.shape
        with torch.device("meta"):
            module = GatedMLP(hidden_size=width, intermediate_size=inner)
        for name, weight in (("gate_proj", w_gate), ("up_proj", w_up), ("down_proj", w_down)):
            getattr(module, name).weight = torch.nn.Parameter(weight)
        return (module,)

    return TorchMlp("fla", apply, pack)


def _quack(tuned: bool) -> TorchMlp:
    from quack.mlp import mlp_func

    torch = torch_module()

    def apply(x: Any, first: Any, w_down: Any) -> Any:
        return mlp_func(x, first, w_down, activation="swiglu", tuned=tuned)

    def pack(w_gate: Any, w_up: Any, w_down: Any) -> tuple[Any, ...]:
        # Its kernels want rows of gate and up in turn.
        return torch.stack((w_gate, w_up), dim=1).reshape(-1, w_gate.shape[1]), w_down

    return TorchMlp("quack-tuned" if tuned else "quack", apply, pack)


BUILDERS: dict[str, Callable[[], TorchMlp]] = {
    "torch-eager": lambda: TorchMlp("torch-eager", _eager),
    "torch-compile": _compiled,
    "liger": _liger,
    "fla": _fla,
    "quack": lambda: _quack(tuned=False),
    "quack-tuned": lambda: _quack(tuned=True),
}


def torch_mlp(name: str) -> TorchMlp:
    """The contender of that name.

    Raises:
        NotMade: torch or the peer cannot be imported.
    """
    torch_module()
    try:
        return BUILDERS[name]()
    except Exception as error:  # whatever importing a foreign package raises
        raise NotMade(f"{name} cannot be imported: {reason(error)}") from error


def contenders(
    mlp: TorchMlp, sets: Sequence[Arrays], measures: Sequence[str], small: dict[str, bool]
) -> Iterator[Contender | tuple[str, NotMade]]:
    """A contender for each of "forward" and "step", or why it cannot be made.

    Args:
        mlp: what to time.
        sets: JAX arrays (x, w_gate, w_up, w_down, dy), weights in [out, in] layout.
        measures: of "forward" and "step".
        small: by measure, whether calls are so short that a CUDA graph must hold several.
    """
    packed = [_torch_arguments(mlp, arrays) for arrays in sets]
    for measure in measures:
        name = f"{measure}:{mlp.key}"
        try:
            yield _contender(name, mlp, packed, measure, small[measure])
        except Exception as error:  # a peer may refuse a shape in any way
            yield name, NotMade(reason(error))


def _torch_arguments(mlp: TorchMlp, arrays: Arrays) -> tuple[Any, list[Any], tuple[Any, ...], Any]:
    torch = torch_module()
    x, w_gate, w_up, w_down, dy = (torch.from_dlpack(a).detach() for a in arrays)
    x = x.clone().requires_grad_()
    weights = mlp.pack(w_gate, w_up, w_down)
    leaves: list[Any] = []
    for weight in weights:
        parameters = list(weight.parameters()) if isinstance(weight, torch.nn.Module) else [weight]
        leaves += [p.requires_grad_() for p in parameters]
    return x, leaves, weights, dy


def _contender(
    name: str, mlp: TorchMlp, packed: Sequence[Any], measure: str, small: bool
) -> Contender:
    torch = torch_module()
    on_gpu = torch.cuda.is_available()

    def forward(k: int) -> Any:
        x, _, weights, _ = packed[k % len(packed)]
        with torch.no_grad():
            return mlp.apply(x, *weights)

    def step(k: int) -> Any:
        x, leaves, weights, dy = packed[k % len(packed)]
        return torch.autograd.grad(mlp.apply(x, *weights), [x, *leaves], dy)

    call = forward if measure == "forward" else step

    def wait() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    def direct(launches: int) -> None:
        for k in range(launches):
            call(k)
        wait()

    direct(2)  # compiles, and tunes where the peer tunes
    if not (small and on_gpu):
        return Contender(name, direct)
    graph, calls = _captured(torch, call, len(packed))

    def replayed(launches: int) -> None:
        for _ in range(launches):
            graph.replay()
        wait()

    return Contender(name, replayed, calls_per_launch=calls, mode="graph")


def _captured(torch: Any, call: Callable[[int], Any], sets: int) -> tuple[Any, int]:
    """A CUDA graph of several calls, so that launching from Python does not count."""
    calls = sets * max(1, 16 // sets)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for k in range(sets):
            call(k)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for k in range(calls):
            call(k)
    return graph, calls
