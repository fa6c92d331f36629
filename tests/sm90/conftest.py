"""The exported kernels' helpers (cubins, custom calls) serve this folder too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "exported"))
