"""How many clusters of thread blocks the GPU holds at once, from the driver."""

import ctypes
from typing import Any

PTX = b".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry empty() { ret; }\n\0"
CLUSTER_DIMENSION = 4
"""CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION."""
MAX_DYNAMIC_SHARED = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""
SHARED_BYTES = 200 << 10
"""More than half of a multiprocessor's: one block each."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


def resident_clusters(blocks: int) -> int:
    """Clusters of ``blocks`` blocks, one to a multiprocessor, that the GPU runs at once.

    The device is the first; its primary context, JAX's, is used.

    Raises:
        RuntimeError: with the driver's error code.
    """
    driver = ctypes.CDLL("libcuda.so.1")

    def check(name: str, *arguments: Any) -> None:
        code = getattr(driver, name)(*arguments)
        if code != 0:
            raise RuntimeError(f"{name}: CUDA error {code}")

    context, module, function = (ctypes.c_void_p() for _ in range(3))
    check("cuInit", 0)
    check("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    check("cuCtxPushCurrent_v2", context)
    try:
        check("cuModuleLoadData", ctypes.byref(module), PTX)
        check("cuModuleGetFunction", ctypes.byref(function), module, b"empty")
        check("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED, SHARED_BYTES)
        attribute = _Attribute(id=CLUSTER_DIMENSION)
        attribute.value[:3] = [blocks, 1, 1]
        config = _Config(
            (blocks, 1, 132), (384, 1, 1), SHARED_BYTES, None, ctypes.pointer(attribute), 1
        )
        found = ctypes.c_int()
        check("cuOccupancyMaxActiveClusters", ctypes.byref(found), function, ctypes.byref(config))
        check("cuModuleUnload", module)
    finally:
        check("cuCtxPopCurrent_v2", ctypes.byref(context))
        check("cuDevicePrimaryCtxRelease_v2", 0)
    return found.value
