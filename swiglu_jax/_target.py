"""Names of the machines that a call can be lowered for: "sm_90a", "sm_100a", ..., or "cpu"."""

import re

CPU = "cpu"


def parse_target(text: str, argument: str) -> str:
    """Check a target's spelling.

    Args:
        text: "cpu", or a GPU architecture: "sm_" and digits, with the suffix "a" or "f" that
            marks architecture-specific code ("sm_90a", "sm_100a"). "sm_90" and later are read
            as their "a" form, since every kernel for them uses such instructions.
        argument: the name to blame in the error.

    Raises:
        ValueError: naming ``argument``, for any other text.
    """
    if text == CPU:
        return CPU
    match = re.fullmatch(r"sm_(\d{2,3})([af]?)", text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(
            f'{argument}: expected "cpu" or a GPU architecture such as "sm_90a" or "sm_100a", '
            f"got {text!r}"
        )
    number = int(match[1])
    return f"sm_{number}a" if number >= 90 and not match[2] else text


def target_of_capability(capability: str) -> str:
    """The target of a CUDA compute capability: "9.0" gives "sm_90a", "8.0" gives "sm_80"."""
    major, minor = capability.split(".")
    return parse_target(f"sm_{major}{minor}", "compute capability")
