# ruff: noqa: PLC0415 - cuDNN is imported once the environment says what to compile for
"""A GPU that is not there: the facts FROST asks of the driver, answered for a named model.

FROST has one place where it meets the driver, ``cudnn._device._driver``, and one table that it
measures with a probe kernel, ``cudnn.frost.occupancy._OCCUPANCY_MAPS``. Both are replaced here, for
the whole process: an exporting process never sees a real GPU, so that the same object comes out on
every machine.
"""

import os
from dataclasses import dataclass

from swiglu_jax.kernels.sm100._seam import SeamMoved


@dataclass(frozen=True)
class DeviceFacts:
    """What FROST wants to know of a GPU. Sizes in bytes."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_memory_per_block: int
    """The largest that a block may opt in to."""
    l2_cache: int
    """Only steers the order in which tiles are visited."""
    family: str = "sm100"
    """FROST's family of kernels for it."""

    @property
    def clusters(self) -> list[int]:
        """Entry i: how many clusters of i + 1 blocks run at once, one block per multiprocessor.

        Only the sizes that the shipped kernels use; a larger cluster depends on how a part's
        multiprocessors are grouped, so asking for one is refused (0) instead of guessed.
        """
        return [self.multiprocessors, self.multiprocessors // 2] + [0] * 14


DEVICES = {
    "sm_100a": DeviceFacts("NVIDIA B200", (10, 0), 148, 232448, 132644864),
    "sm_103a": DeviceFacts("NVIDIA B300", (10, 3), 148, 232448, 132644864),
    "sm_120a": DeviceFacts(
        "NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0), 188, 101376, 134217728, "sm120"
    ),
}

DRIVER_VERSION = 13000


class _Attribute:
    """The CUdevice_attribute numbers that FROST reads (cuda.h)."""

    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97
    CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE = 38


class StandInDriver:
    """The few functions of ``cuda.bindings.driver`` that FROST calls while it compiles."""

    CUdevice_attribute = _Attribute

    def __init__(self, facts: DeviceFacts) -> None:
        """Answers for one device with these facts."""
        self._name = facts.name
        self._attributes = {
            75: facts.capability[0],
            76: facts.capability[1],
            16: facts.multiprocessors,
            97: facts.shared_memory_per_block,
            38: facts.l2_cache,
        }

    def cuDriverGetVersion(self) -> tuple[int, int]:
        return 0, DRIVER_VERSION

    def cuDeviceGetCount(self) -> tuple[int, int]:
        return 0, 1

    def cuDeviceGet(self, ordinal: int) -> tuple[int, int]:
        return 0, ordinal

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[int, int]:
        if attribute not in self._attributes:
            raise SeamMoved(
                f"FROST asks for device attribute {attribute}, which has no answer here"
            )
        return 0, self._attributes[attribute]

    def cuDeviceGetName(self, length: int, device: int) -> tuple[int, bytes]:
        return 0, self._name.encode() + b"\0"

    def cuCtxGetCurrent(self) -> tuple[int, int]:
        return 0, 1

    def cuCtxGetDevice(self) -> tuple[int, int]:
        return 0, 0

    def __getattr__(self, name: str) -> object:
        """Anything else means that FROST has changed what it asks."""
        raise SeamMoved(f"FROST calls the driver's {name}, which has no answer here")


_installed: str | None = None


def pretend(arch: str) -> None:
    """Answer FROST's questions for the GPU of ``arch`` from now on, in this process.

    Must come before anything imports ``cudnn.gemm.frost``: it picks its family of kernels, and the
    DSL its target, at import.

    Raises:
        SeamMoved: where the places to replace are not there, or another architecture was
            installed before.
    """
    global _installed
    if _installed == arch:
        return
    if _installed is not None:
        raise SeamMoved(f"this process compiles for {_installed}; {arch} needs one of its own")
    facts = DEVICES[arch]
    os.environ["CUTE_DSL_ARCH"] = arch
    os.environ["CUDNN_FRONTEND_GEMM_ARCH_FAMILY"] = facts.family
    # A cached object has lost what export needs, and its key is not this recipe's.
    os.environ["CUDNN_FRONTEND_DISABLE_COMPILED_CACHE"] = "1"

    import cudnn._device
    import cudnn.frost.device
    import cudnn.frost.occupancy

    driver = StandInDriver(facts)
    for module in (cudnn._device, cudnn.frost.device):
        if not callable(getattr(module, "_driver", None)):
            raise SeamMoved(f"{module.__name__} has no _driver()")
        module._driver = lambda: driver  # type: ignore[attr-defined]
    if getattr(cudnn.frost.occupancy, "_OCCUPANCY_MAPS", None) != {}:
        raise SeamMoved("cudnn.frost.occupancy._OCCUPANCY_MAPS is not an empty dict")
    cudnn.frost.occupancy._OCCUPANCY_MAPS[0] = facts.clusters
    seen = cudnn.frost.device.compute_capability(0)
    if seen != facts.capability:
        raise SeamMoved(f"FROST sees capability {seen} instead of {facts.capability}")
    _installed = arch
