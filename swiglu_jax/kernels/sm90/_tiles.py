"""The tiles that are shipped, by stage and name; docs/hopper.md has what each measured."""

from swiglu_jax.kernels.sm90._tile import Tile

TILES = {
    "gate_up": {
        # 128 columns of gate beside 128 of up: wgmma m64n256, the fewest bytes a multiplication.
        "large": Tile(n=256, stages=4),
        # Twice the tiles: fewer idle multiprocessors where a large tile leaves a last, thin wave.
        "medium": Tile(n=128, stages=6),
        # For 65 to 128 rows and for at most 64: one row of tiles, so that no cluster shares B.
        "narrow": Tile(n=256, stages=4, cluster=(1, 1)),
        "small": Tile(m=64, n=256, stages=5, cluster=(1, 1)),
    },
    "down_dswiglu": {
        # 192 columns: the accumulator and the one being worked off, 96 registers each.
        "large": Tile(n=192, stages=5, in_place=True),
        "short": Tile(n=192, stages=4),
        "medium": Tile(n=128, stages=6, in_place=True),
        "narrow": Tile(n=128, stages=5, cluster=(1, 1)),
        "small": Tile(m=64, n=128, stages=7, cluster=(1, 1)),
    },
    "input_gradient": {
        "large": Tile(n=256, stages=4),
    },
    "weight_gradients": {
        "large": Tile(n=256, stages=4),
        # Half the tile: for outputs of few tiles, where a large tile leaves a last, thin wave.
        "medium": Tile(n=128, stages=6),
    },
}
