"""What is measured: published widths, the shapes that the claims name, and the sweep."""

from dataclasses import asdict, dataclass

MODELS = {
    "Qwen3-0.6B": (1024, 3072),
    "Llama-3.2-1B": (2048, 8192),
    "Qwen3-8B": (4096, 12288),
    "Llama-3-8B": (4096, 14336),
    "Qwen-27B": (5120, 17408),
    "Llama-3-70B": (8192, 28672),
}
"""Model to (H, I): model width and hidden width of its MLP."""

SWEEP_ROWS = (1, 16, 64, 128, 512, 2048, 8192, 32768)


@dataclass(frozen=True, order=True)
class Shape:
    """One MLP: M tokens, model width H, hidden width I."""

    m: int
    h: int
    i: int
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        return f"{self.m},{self.h},{self.i}"

    @property
    def model(self) -> str | None:
        """The published model with these widths."""
        return next((name for name, widths in MODELS.items() if widths == (self.h, self.i)), None)

    def to_json(self) -> dict[str, int | str | None]:
        return {**asdict(self), "model": self.model}

    def flops(self, measure: str) -> int:
        """Floating-point operations of the GEMMs: three forward, nine in a step."""
        return (18 if measure == "step" else 6) * self.m * self.h * self.i

    def touched_bytes(self) -> int:
        """Bytes of weights and activations that a forward pass reads or writes."""
        return 2 * (3 * self.h * self.i + self.m * (2 * self.h + 3 * self.i))


def parse_shape(text: str) -> Shape:
    """A shape from "M,H,I"."""
    try:
        m, h, i = map(int, text.split(","))
    except ValueError:
        raise ValueError(f"shape: expected three numbers M,H,I, got {text!r}") from None
    return Shape(m, h, i)


HEADLINE = tuple(
    map(
        parse_shape,
        ("8192,5120,17408", "8192,2048,8192", "32768,1024,3072", "2048,5120,17408",
         "8192,4096,14336"),
    )
)  # fmt: skip
"""The shapes that the claims are made for come first."""


def sweep_shapes(models: list[str] | None = None, rows: list[int] | None = None) -> list[Shape]:
    """Every model at every number of tokens; models vary fastest, so that a run that ends early
    has seen them all."""
    widths = [MODELS[name] for name in (models or MODELS)]
    return [Shape(m, h, i) for m in (rows or SWEEP_ROWS) for h, i in widths]
