"""Prints the include folders of the PyPI packages that the build takes its headers from.

Run by CMake with the interpreter of the build environment: one line `NAME=PATH` for each package,
or a message that names the package to install and exit status 1.
"""

import importlib.metadata
import sys
from pathlib import Path

# package, a header that it ships (relative to its include folder)
PACKAGES = {
    "JAXLIB": ("jaxlib", "xla/ffi/api/ffi.h"),
    "CUDNN_FRONTEND": ("nvidia-cudnn-frontend", "cudnn_frontend.h"),
    "CUDNN": ("nvidia-cudnn-cu13", "cudnn_graph.h"),
    "CUDA_RUNTIME": ("nvidia-cuda-runtime", "cuda.h"),
    "CUDA_CRT": ("nvidia-cuda-crt", "crt/host_defines.h"),
    "CUDA_CCCL": ("nvidia-cuda-cccl", "nv/target"),
    "CUDA_NVRTC": ("nvidia-cuda-nvrtc", "nvrtc.h"),
    "TVM_FFI": ("apache-tvm-ffi", "tvm/ffi/c_api.h"),
    "DLPACK": ("apache-tvm-ffi", "dlpack/dlpack.h"),
}


def include_folder(package: str, header: str) -> Path:
    """The folder under which `package` ships `header`; FileNotFoundError says what is missing."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        raise FileNotFoundError(f"the build needs the PyPI package {package}") from None
    found = [f for f in files if f"/{f.as_posix()}".endswith(f"/include/{header}")]
    if not found:
        raise FileNotFoundError(f"the PyPI package {package} ships no {header}")
    path = Path(str(found[0].locate())).resolve()
    return path.parents[len(Path(header).parts) - 1]


def main() -> int:
    """Prints every folder, or the first problem."""
    try:
        for name, (package, header) in PACKAGES.items():
            print(f"{name}={include_folder(package, header)}")
    except FileNotFoundError as problem:
        print(problem, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
