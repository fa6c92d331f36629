"""``python -m swiglu_jax``: what this machine has, and which routes serve it."""

import argparse
import io
import json
import os
import sys

from swiglu_jax._environment import environment_report, format_report
from swiglu_jax._target import parse_target


def main() -> int:
    """Print the environment report, as text or as JSON.

    Returns:
        The exit status: 0, or 1 where JAX finds no device, which the report says too, or where
        the reader went away. For arguments that it does not know argparse exits with 2.
    """
    parser = argparse.ArgumentParser(prog="python -m swiglu_jax", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--target", help="ask about another machine: sm_90a, sm_100a, cpu")
    parser.add_argument("--kernels", action="store_true", help="a line for each exported kernel")
    given = parser.parse_args()
    try:
        target = None if given.target is None else parse_target(given.target, "--target")
    except ValueError as error:
        parser.error(str(error))
    report = environment_report(target)
    text = json.dumps(report, indent=2) if given.json else format_report(report, given.kernels)
    return 0 if _printed(text) and report["jax_error"] is None else 1


def _printed(text: str) -> bool:
    """Print; False where the reader of a pipe (``head``) has left."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may be of any bytes
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Or Python itself complains when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
