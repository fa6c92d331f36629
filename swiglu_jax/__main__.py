"""``python -m swiglu_jax``: what this machine has, and which routes serve it."""

import argparse
import json

from swiglu_jax._environment import environment_report, format_report


def main() -> None:
    """Print the environment report, as text or as JSON."""
    parser = argparse.ArgumentParser(prog="python -m swiglu_jax", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    report = environment_report()
    print(json.dumps(report, indent=2) if parser.parse_args().json else format_report(report))


if __name__ == "__main__":
    main()
