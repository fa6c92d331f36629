"""Times every plan of cuDNN's heuristics for the graphs of both stages; prints JSON lines.

    python tests/native/time_plans.py --shapes 8192,5120,17408 2048,1024,3072

Each line: graph, outputs, layout, sizes, and what the native library's tuning answers.
"""

import argparse
import json
import time

import jax

from swiglu_jax import _cudnn
from swiglu_jax._candidate import StageCall

GRAPHS = {
    "gate_up": (("h",), ("h", "gate"), ("h", "gate", "up")),
    "down_dswiglu": (("dup",), ("dgate", "dup"), ("dgate", "dup", "h")),
    "dgrad": (("dgate", "dup"),),
    "dswiglu": (("dgate", "dup"),),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plans", type=int, default=_cudnn.TUNING_PLANS)
    parser.add_argument("--largest-sets", action="store_true")
    parser.add_argument("--graphs", nargs="+", choices=GRAPHS, default=list(GRAPHS))
    parser.add_argument("--layout", default="OI")
    parser.add_argument("--shapes", nargs="+", required=True, metavar="M,H,I")
    arguments = parser.parse_args()
    jax.devices("cuda")
    for shape in arguments.shapes:
        m, h, i = (int(n) for n in shape.split(","))
        for graph in arguments.graphs:
            sets = GRAPHS[graph]
            stage = "gate_up" if graph == "gate_up" else "down_dswiglu"
            for outputs in sets[-1:] if arguments.largest_sets else sets:
                call = StageCall(stage, outputs, arguments.layout, "bfloat16", m, h, i)
                start = time.perf_counter()
                try:
                    answer = _cudnn.tune(graph, call, plans=arguments.plans)
                except RuntimeError as error:
                    answer = {"error": str(error)[:2000]}
                line = {"graph": graph, "outputs": outputs, "layout": arguments.layout,
                        "m": m, "h": h, "i": i, "seconds": time.perf_counter() - start}  # fmt: skip
                print(json.dumps(line | answer), flush=True)


if __name__ == "__main__":
    main()
