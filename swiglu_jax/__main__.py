"""``python -m swiglu_jax``: what this machine has, and which routes serve it."""

import argparse
import json

from swiglu_jax._environment import environment_report, format_report
from swiglu_jax._target import parse_target


def main() -> None:
    """Print the environment report, as text or as JSON."""
    parser = argparse.ArgumentParser(prog="python -m swiglu_jax", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--target", help="ask about another machine: sm_90a, sm_100a, cpu")
    parser.add_argument("--kernels", action="store_true", help="a line for each exported kernel")
    given = parser.parse_args()
    try:
        target = given.target and parse_target(given.target, "--target")
    except ValueError as error:
        parser.error(str(error))
    report = environment_report(target)
    print(json.dumps(report, indent=2) if given.json else format_report(report, given.kernels))


if __name__ == "__main__":
    main()
