"""Builds cuDNN graphs for a described GPU: run by test_cudnn_graphs.py under a stub driver.

Reads a JSON list of {"graph", "outputs", "weight_layout", "dtype", "m", "h", "i", "plan"} from
standard input and writes, in the same order, the native library's answers or {"error"}.
Arguments: a device description's path and its sm version.
"""

import json
import sys
from pathlib import Path
from typing import Any

from swiglu_jax import _native


def main() -> None:
    description = Path(sys.argv[1]).read_bytes()
    sm_version = int(sys.argv[2])
    answers: list[dict[str, Any]] = []
    for wanted in json.load(sys.stdin):
        plan = wanted.pop("plan", "")
        spec = _native.Graph(**{k: v.encode() if isinstance(v, str) else v
                                for k, v in wanted.items()})  # fmt: skip
        try:
            answer = _native.call_json(
                "swiglu_jax_cudnn_build", spec, description, sm_version, plan.encode()
            )
        except RuntimeError as error:
            answer = {"error": str(error)}
        answers.append(answer)
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
