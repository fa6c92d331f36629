"""The launcher: what it refuses, what it does when the driver fails, when it loads what.

Every call goes through the shipped handlers over the recording driver. A process that has refused a
call must serve the next one: nothing may abort it.
"""

import itertools
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from exported_recorder import Buffer, Recorder, buffers_of

from swiglu_jax.kernels import _manifest
from swiglu_jax.kernels._variant import STAGE_OUTPUTS, KernelVariant

SHIPPED = {kernel.variant.name: kernel.variant for kernel in _manifest.installed().kernels}
BACKWARD = SHIPPED["sm100_down_dswiglu_dgate_dup_h_128x256_2cta_oi_bf16"]
FORWARD = SHIPPED["sm100_gate_up_h_gate_up_128x256_1cta_io_bf16"]
ONE_OUTPUT = SHIPPED["sm100_down_dswiglu_dup_128x256_2cta_io_bf16"]
SHAPE = ((3, 100), 136, 208)
COMMAND_BUFFER_COMPATIBLE = 1


@pytest.fixture
def recorder(recorder_of: Callable) -> Recorder:
    return recorder_of("sm_100a")


def still_works(recorder: Recorder) -> None:
    assert recorder.run(BACKWARD, *SHAPE).launch.device == 0


@pytest.mark.parametrize("variant", [BACKWARD, FORWARD, ONE_OUTPUT], ids=lambda v: v.name)
def test_no_rows_is_a_success_that_launches_nothing(
    recorder: Recorder, variant: KernelVariant
) -> None:
    for lead in ((0,), (4, 0), (0, 3, 2)):
        for stage in ("initialize", "execute"):
            empty = recorder.run(variant, lead, 136, 208, stage=stage)
            assert (empty.error, empty.launches, empty.maps) == ("", [], [])


def test_wrong_shapes_and_dtypes_are_refused(recorder: Recorder) -> None:
    operands, results = buffers_of(BACKWARD, *SHAPE)
    for k, buffer in enumerate([*operands, *results]):
        *lead, last = buffer.dims
        for change in (
            {"dims": (*lead, last + 16)},
            {"dims": (*lead[:-1], lead[-1] + 1, last)},
            {"dtype": "float32"},
            {"dtype": "float16"},
        ):
            changed = [*operands, *results]
            changed[k] = replace(buffer, **change)
            refused = recorder.call(BACKWARD, changed[:4], changed[4:])
            assert not refused.launches, (buffer, change)
            assert "expected" in refused.error, refused.error
    still_works(recorder)


@pytest.mark.parametrize("stage", STAGE_OUTPUTS)
def test_outputs_have_the_canonical_order(recorder_of: Callable, stage: str) -> None:
    """Every set of outputs: the library calls each result what kernels/_variant.py calls it."""
    names = STAGE_OUTPUTS[stage]
    sm90 = recorder_of("sm_90a")
    some = next(v for v in SHIPPED.values() if (v.stage, v.arch) == (stage, "sm_90a"))
    for count in range(1, len(names) + 1):
        for outputs in itertools.combinations(names, count):
            operands, results = buffers_of(replace(some, outputs=outputs), *SHAPE)
            mask = sum(2 ** names.index(output) for output in outputs)
            for k, output in enumerate(outputs):
                wrong = list(results)
                wrong[k] = replace(results[k], dims=(*results[k].dims[:-1], 8))
                refused = sm90.call(some, operands, wrong, outputs=mask)
                assert f"result {output}: expected" in refused.error, (outputs, refused.error)


def test_missing_and_extra_buffers_are_refused(recorder: Recorder) -> None:
    operands, results = buffers_of(BACKWARD, *SHAPE)
    for wrong in ((operands[:3], results), (operands, results[:2]), ([], [])):
        refused = recorder.call(BACKWARD, *wrong)
        assert not refused.launches and "expected" in refused.error
    still_works(recorder)


def test_null_and_misaligned_addresses_are_refused(recorder: Recorder) -> None:
    for variant in (BACKWARD, FORWARD, ONE_OUTPUT):
        operands, results = buffers_of(variant, *SHAPE)
        for k, buffer in enumerate([*operands, *results]):
            needs = 32 if buffer.name in ("gate", "up") else 16
            for address in (0, buffer.data + 2, buffer.data + needs // 2):
                changed = [*operands, *results]
                changed[k] = replace(buffer, data=address)
                refused = recorder.call(variant, changed[: len(operands)], changed[len(operands) :])
                assert not refused.launches and not refused.maps
                assert f"multiple of {needs}" in refused.error, refused.error
                assert str(address) in refused.error
    still_works(recorder)


@pytest.mark.parametrize(("h", "i", "said"), [
    (132, 208, "H: expected a multiple of 8"),
    (136, 200, "I: expected a multiple of 16"),
    (0, 208, "H: expected 1"),
])  # fmt: skip
def test_indivisible_sizes_are_refused(recorder: Recorder, h: int, i: int, said: str) -> None:
    for variant in (BACKWARD, FORWARD):
        refused = recorder.run(variant, (300,), h, i)
        assert not refused.launches and said in refused.error, refused.error
    still_works(recorder)


def test_more_rows_than_a_kernel_counts_are_refused(recorder: Recorder) -> None:
    refused = recorder.run(BACKWARD, (1 << 20, 1 << 12), 8, 16)
    assert not refused.launches and refused.error.count("M: expected 1 to"), refused.error
    still_works(recorder)


@pytest.mark.parametrize(("changes", "said"), [
    ({"kernel": "sm100_no_such_kernel"}, "no kernel sm100_no_such_kernel in"),
    ({"kernel": ""}, "no kernel"),
    ({"kernel": FORWARD.name}, "another stage: expected down_dswiglu, got gate_up"),
    ({"kernel": ONE_OUTPUT.name}, "attribute outputs: the kernel writes 2, got 7"),
    ({"kernel": BACKWARD.name.replace("_oi_", "_io_")},
     'attribute weight_layout: the kernel reads "IO", got "OI"'),
    ({"kernel": BACKWARD.name.replace("_bf16", "_f16")}, "the kernel's dtype is f16, got bf16"),
    ({"weight_layout": "OO"}, "attribute weight_layout"),
    ({"outputs": 0}, "attribute outputs"),
    ({"outputs": 8}, "attribute outputs"),
])  # fmt: skip
def test_attributes_that_do_not_fit_are_refused(
    recorder: Recorder, changes: dict, said: str
) -> None:
    refused = recorder.run(BACKWARD, *SHAPE, **changes)
    assert not refused.launches and said in refused.error, refused.error
    still_works(recorder)


@pytest.mark.parametrize(("function", "status", "name"), [
    ("cuTensorMapEncodeTiled", 1, "CUDA_ERROR_INVALID_VALUE"),
    ("cuLaunchKernelEx", 719, "CUDA_ERROR_LAUNCH_FAILED"),
    ("cuCtxPushCurrent_v2", 201, "CUDA_ERROR_INVALID_CONTEXT"),
])  # fmt: skip
def test_a_failing_driver_call_is_an_error_with_its_name(
    recorder: Recorder, function: str, status: int, name: str
) -> None:
    """The DSL's own runtime aborts the process where a tensor map cannot be encoded."""
    still_works(recorder)
    failed = recorder.run(BACKWARD, *SHAPE, fail=function, status=status)
    assert not failed.launches and name in failed.error, failed.error
    assert BACKWARD.name in failed.error
    still_works(recorder)


@pytest.mark.parametrize(("function", "status", "name"), [
    ("cuInit", 100, "status 100"),
    ("cuDevicePrimaryCtxRetain", 2, "CUDA_ERROR_OUT_OF_MEMORY"),
    ("cuLibraryLoadData", 209, "CUDA_ERROR_NO_BINARY_FOR_GPU"),
    ("cuLibraryGetKernel", 1, "CUDA_ERROR_INVALID_VALUE"),
    ("cuKernelSetAttribute", 1, "CUDA_ERROR_INVALID_VALUE"),
    ("cuFuncLoad", 2, "CUDA_ERROR_OUT_OF_MEMORY"),
])  # fmt: skip
def test_a_failure_to_load_is_an_error_and_is_tried_again(
    recording_build: Path, function: str, status: int, name: str
) -> None:
    recorder = Recorder(recording_build, "sm_100a")
    for stage in ("initialize", "execute"):
        failed = recorder.run(BACKWARD, *SHAPE, stage=stage, fail=function, status=status)
        assert not failed.launches and name in failed.error, failed.error
    still_works(recorder)
    recorder.close()


def test_kernels_are_loaded_in_the_initialize_stage(recording_build: Path) -> None:
    """A stream capture, which only executes, must find nothing left to load."""
    recorder = Recorder(recording_build, "sm_100a")
    for variant in (BACKWARD, FORWARD):
        first = recorder.run(variant, *SHAPE, stage="initialize")
        assert (first.error, first.loads, first.functions) == ("", 1, [0])
        assert not first.launches and not first.maps
        again = recorder.run(variant, *SHAPE, stage="initialize")
        assert (again.error, again.loads, again.functions) == ("", 0, [])
        run = recorder.run(variant, *SHAPE)
        assert (run.error, run.loads, run.functions, len(run.launches)) == ("", 0, [], 1)
        assert run.launch.loaded
    recorder.close()


def test_the_initialize_stage_needs_no_addresses(recording_build: Path) -> None:
    recorder = Recorder(recording_build, "sm_100a")
    operands, results = buffers_of(BACKWARD, *SHAPE)
    without = [[replace(b, data=0) for b in buffers] for buffers in (operands, results)]
    first = recorder.call(BACKWARD, *without, stage="initialize")
    assert (first.error, first.loads) == ("", 1)
    recorder.close()


def test_each_device_runs_its_own_calls(recording_build: Path) -> None:
    recorder = Recorder(recording_build, "sm_100a", devices=2)
    for ordinal in (1, 0, 1):
        for stream in (0xABC000, 0xDEF000):
            run = recorder.run(BACKWARD, *SHAPE, ordinal=ordinal, stream=stream)
            assert (run.launch.device, run.launch.stream) == (ordinal, stream)
            assert run.launch.loaded
    missing = recorder.run(BACKWARD, *SHAPE, ordinal=2)
    assert "CUDA_ERROR_INVALID_DEVICE" in missing.error
    recorder.close()


def test_a_device_that_fails_to_load_is_tried_again(recording_build: Path) -> None:
    """Also where another device of the process has loaded the kernel already."""
    recorder = Recorder(recording_build, "sm_100a", devices=2)
    assert recorder.run(BACKWARD, *SHAPE, ordinal=1).launch.device == 1
    for stage in ("initialize", "execute"):
        failed = recorder.run(
            BACKWARD, *SHAPE, ordinal=0, stage=stage, fail="cuKernelSetAttribute", status=1
        )
        assert not failed.launches and "CUDA_ERROR_INVALID_VALUE" in failed.error, failed.error
        assert recorder.run(BACKWARD, *SHAPE, ordinal=1).launch.device == 1
    assert recorder.run(BACKWARD, *SHAPE, ordinal=0).launch.device == 0
    recorder.close()


def test_a_driver_that_lacks_a_function_is_named(recording_build: Path, tmp_path: Path) -> None:
    driver = (recording_build / "libcuda.so.1").read_bytes()
    shutil.copy(recording_build / "frame.so", tmp_path)
    for function in (b"cuTensorMapEncodeTiled", b"cuLaunchKernelEx", b"cuLibraryLoadData"):
        without = driver.replace(function + b"\0", b"xx" + function[2:] + b"\0")
        assert without != driver
        (tmp_path / "libcuda.so.1").write_bytes(without)
        recorder = Recorder(tmp_path, "sm_100a")
        refused = recorder.run(BACKWARD, *SHAPE)
        assert f"the CUDA driver has no {function.decode()}" in refused.error, refused.error
        recorder.close()


def test_threads_call_at_once(recording_build: Path) -> None:
    """Each on a stream and device of its own: loaded once, and no thread sees another's stream."""
    recorder = Recorder(recording_build, "sm_100a", devices=2)
    requests = [
        recorder.request(
            BACKWARD, *buffers_of(BACKWARD, (64 * (k + 1),), 136, 208), stream=0x1000 * (k + 1),
            ordinal=k % 2,
        )
        for k in range(8)
    ]  # fmt: skip
    for round_number in range(20):
        answer = recorder.ask({"at_once": requests})
        assert answer["errors"] == [""] * 8
        launches = [e for e in answer["events"] if e["event"] == "launch"]
        seen = {(e["stream"], e["device"], bytes.fromhex(e["parameters"][0])) for e in launches}
        assert seen == {
            (r["stream"], r["ordinal"], (64 * (k + 1)).to_bytes(8, "little"))
            for k, r in enumerate(requests)
        }
        loads = [e for e in answer["events"] if e["event"] == "load"]
        assert len(loads) == (1 if round_number == 0 else 0)
    recorder.close()


def test_another_architecture_is_refused(recorder_of: Callable) -> None:
    refused = recorder_of("sm_90a").run(BACKWARD, *SHAPE)
    assert not refused.launches
    assert "the kernel is for sm_100; device 0 is sm_90" in refused.error


def test_no_library_and_a_wrong_library_are_refused(recording_build: Path) -> None:
    recorder = Recorder(recording_build, "sm_100a", libraries=False)
    assert "none is registered" in recorder.run(BACKWARD, *SHAPE).error
    recorder.ask({"add_library": str(recording_build / "frame.so")})
    assert "not a library of exported kernels" in recorder.run(BACKWARD, *SHAPE).error
    recorder.close()
    recorder = Recorder(recording_build, "sm_100a", libraries=False)
    recorder.ask({"add_library": str(recording_build / "missing.so")})
    assert "cannot open a kernel library" in recorder.run(BACKWARD, *SHAPE).error
    # It hides no other.
    for path in _manifest.installed().libraries():
        recorder.ask({"add_library": str(path)})
    still_works(recorder)
    refused = recorder.run(BACKWARD, *SHAPE, kernel="sm100_no_such_kernel")
    assert "no kernel sm100_no_such_kernel" in refused.error
    assert "cannot open a kernel library" in refused.error
    recorder.close()


def test_execution_may_be_captured_and_loading_not(recorder: Recorder) -> None:
    for stage in STAGE_OUTPUTS:
        target = f"swiglu_jax_exported_{stage}"
        assert recorder.ask({"traits": target})["traits"] == COMMAND_BUFFER_COMPATIBLE
        assert recorder.ask({"traits": f"{target}_initialize"})["traits"] == 0


def test_scratch_is_not_a_kernel_buffer(recorder: Recorder) -> None:
    """A trailing uint8 result is allowed by the stage's contract; kernels do not see it."""
    operands, results = buffers_of(BACKWARD, *SHAPE)
    scratch = Buffer("scratch", (64,), 1 << 20, "uint8")
    assert recorder.call(BACKWARD, operands, [*results, scratch]).launch
