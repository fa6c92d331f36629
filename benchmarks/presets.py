"""What a run measures: blocks of shapes, contenders and measures, in the order of importance."""

from dataclasses import dataclass, replace
from fnmatch import fnmatch

from benchmarks.shapes import HEADLINE, Shape, parse_shape, sweep_shapes

MEASURES = (
    "forward", "step", "gemms", "stages", "select", "errors", "memory", "first_call",
)  # fmt: skip

THIS = ("plain/OI", "swiglu_jax/OI")
BOTH_LAYOUTS = ("plain/*", "swiglu_jax/*")
EVERYONE = ("*",)
PEERS = ("plain/*", "plain-checkpoint/OI", "swiglu_jax/*", "swiglu_jax-*/OI", "tokamax-*",
         "torch-*", "liger/*", "fla/*", "quack/*")  # fmt: skip
"""All but quack's own tuning, which takes minutes a shape."""


@dataclass(frozen=True)
class Block:
    """Shapes that are measured alike."""

    shapes: tuple[Shape, ...]
    methods: tuple[str, ...]
    """Patterns of contenders' names, as ``plain/OI`` or ``tokamax-*``."""
    measures: tuple[str, ...]
    rounds: int = 7
    sample_seconds: float = 0.02
    seconds: float | None = None
    """Start nothing new in this block after so long."""

    def takes(self, key: str) -> bool:
        """Whether a contender belongs to the block."""
        return any(fnmatch(key, pattern) for pattern in self.methods)


@dataclass(frozen=True)
class Preset:
    """Blocks in order, and seconds after which nothing new is started."""

    blocks: tuple[Block, ...]
    seconds: float


def _shapes(*texts: str) -> tuple[Shape, ...]:
    return tuple(map(parse_shape, texts))


_LARGE, _SMALL_WIDTH = "8192,5120,17408", "32768,1024,3072"

_QUICK = Block(HEADLINE, THIS, ("forward", "step", "gemms", "stages"))
_PEERS = Block(
    _shapes(_LARGE, _SMALL_WIDTH, "2048,5120,17408"), PEERS, ("forward", "step"), rounds=5
)
_CHECKS = Block(_shapes(_LARGE, "8192,2048,8192"), BOTH_LAYOUTS, ("errors", "memory"))
_SELECT = Block(_shapes(_LARGE), THIS, ("select",), rounds=5)
_FIRST = Block(_shapes(_LARGE), THIS, ("first_call",))
_SWEEP = Block(tuple(sweep_shapes()), THIS, ("forward", "step"), rounds=5, sample_seconds=0.01)
_COARSE = replace(_SWEEP, shapes=tuple(sweep_shapes(rows=[1, 128, 2048, 32768])))

PRESETS = {
    "quick": Preset((_QUICK,), 85),
    "peers": Preset((_PEERS,), 460),
    "checks": Preset((_CHECKS, _FIRST, _SELECT), 240),
    "sweep": Preset((_SWEEP,), 560),
    "full": Preset(
        (
            _QUICK,
            replace(_PEERS, shapes=_shapes(_LARGE), seconds=130),
            _FIRST,
            replace(_CHECKS, shapes=_shapes(_LARGE)),
            _SELECT,
            _COARSE,
        ),
        450,
    ),
}


def narrowed(
    preset: Preset,
    shapes: list[Shape] | None,
    methods: list[str] | None,
    measures: list[str] | None,
) -> Preset:
    """The preset with the shapes, contenders and measures that were asked for instead.

    Blocks that no asked measure concerns are dropped; given shapes replace a block's own, and
    blocks that then agree are run once.
    """
    blocks: list[Block] = []
    for block in preset.blocks:
        kept = tuple(m for m in block.measures if measures is None or m in measures)
        if not kept:
            continue
        block = replace(
            block,
            measures=kept,
            shapes=tuple(shapes) if shapes is not None else block.shapes,
            methods=tuple(methods) if methods is not None else block.methods,
        )
        if block not in blocks:
            blocks.append(block)
    asked = set(measures or ()) - {m for b in blocks for m in b.measures}
    if asked:  # the preset has no block for them
        blocks.append(
            Block(
                tuple(shapes) if shapes is not None else preset.blocks[0].shapes,
                tuple(methods) if methods is not None else preset.blocks[0].methods,
                tuple(m for m in MEASURES if m in asked),
            )
        )
    return replace(preset, blocks=tuple(blocks))
