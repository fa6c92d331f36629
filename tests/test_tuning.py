"""Measured choices: who wins, the cache on disk, the shipped table, and the trials themselves."""

import dataclasses
import functools
import json
import math
import multiprocessing
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import pytest

from swiglu_jax import _agreement, _config, _routes, _table, _timing, _tuning, _tuning_cache
from swiglu_jax._candidate import Candidate, Decline, Declined, StageCall
from swiglu_jax._measurement import Measurement
from swiglu_jax._stages import GRADIENT_STAGES, STAGES, stage_named

CALL = StageCall("gate_up", ("h",), "OI", "bfloat16", m=256, h=64, i=128)
TARGET = "sm_90a"


def _candidate(kernel: str, route: str = "exported") -> Candidate:
    return Candidate(route, kernel, f"swiglu_jax_{kernel}", (("kernel", kernel),), ("h",))


A, B, C = _candidate("a"), _candidate("b"), _candidate("c", "cudnn")


class FakeGpu:
    """Stands in for the trials: counts them and answers with the times it was told."""

    def __init__(self, times: dict[str, float], xla_us: float = 100.0):
        self.times, self.xla_us, self.trials = times, xla_us, 0

    def measure(self, call, candidates, device):
        self.trials += 1
        tried = [(c, self.times[c.kernel]) for c in candidates if c.kernel in self.times]
        failed = {c.kernel: "CUDNN_STATUS" for c in candidates if c.kernel not in self.times}
        return Measurement(self.xla_us, tuple(tried), failed)


@pytest.fixture
def on_gpu(monkeypatch, tmp_path):
    """Make this machine look like the target, with a cache of its own; returns a set-up."""
    config = dataclasses.replace(_config.config, cache_dir=tmp_path, tune=True, target=None)

    def start(gpu: FakeGpu, **changes) -> FakeGpu:
        monkeypatch.setattr(_tuning, "config", dataclasses.replace(config, **changes))
        monkeypatch.setattr(_tuning, "_measured", {})
        monkeypatch.setattr(_tuning, "local_gpu_target", lambda: TARGET)
        monkeypatch.setattr(_tuning, "_machine", lambda device: {"device": "fake"})
        monkeypatch.setattr(_tuning, "_refined", lambda candidate, call: candidate)
        monkeypatch.setattr(_timing, "measure", gpu.measure)
        cpu = jax.local_devices(backend="cpu")
        monkeypatch.setattr(jax, "local_devices", lambda backend=None: cpu)
        return gpu

    return start


def decide(candidates=(A, B, C), call=CALL, fused=False):
    """The winner, and the reason of each decline."""
    winner, declined = _tuning.decide(call, candidates, TARGET, fused=fused)
    return winner, {route: decline.reason for route, decline in declined.items()}


class FullGpu(FakeGpu):
    """A GPU with no memory left: for anything, or for kernel "a" alone."""

    def __init__(self, times: dict[str, float], everything: bool):
        super().__init__(times)
        self.everything = everything

    def measure(self, call, candidates, device):
        measured = super().measure(call, candidates, device)
        full = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4294967296 bytes."
        if self.everything:
            raise jax.errors.JaxRuntimeError(full)
        return dataclasses.replace(measured, failed={"a": full})


def test_a_program_compiles_where_no_memory_is_left_for_trials(on_gpu, monkeypatch, tmp_path):
    full = on_gpu(FullGpu({}, everything=True))
    monkeypatch.setattr(_table, "rows", lambda target: ())
    winner, reasons = decide()
    assert winner is None
    assert "never measured" in reasons["exported"]
    decide()
    assert full.trials == 2  # there may be memory now
    assert not list(tmp_path.glob("tuning/*.json"))


def test_a_kernel_that_lacked_memory_has_another_chance_in_the_next_process(on_gpu):
    on_gpu(FullGpu({"b": 60.0, "c": 70.0}, everything=False))
    winner, reasons = decide()
    assert winner == B
    assert "Out of memory" in reasons["a (trial)"]
    on_gpu(FakeGpu({"a": 50.0, "b": 60.0, "c": 70.0}))
    assert decide()[0] == A


def test_measurements_are_kept_apart_by_the_version_of_cudnn(monkeypatch):
    class Gpu:
        device_kind = "GPU"
        client = type("Client", (), {"platform_version": "cuda 13"})

    def machine(version: int):
        monkeypatch.setattr(_tuning._native, "call_json", lambda function: {"version": version})
        return _tuning._machine.__wrapped__(Gpu())

    assert machine(92801) == machine(92801) != machine(91900)


def test_the_fastest_candidate_serves_and_the_others_say_by_how_much(on_gpu):
    on_gpu(FakeGpu({"a": 90.0, "b": 80.0, "c": 85.0}))
    winner, reasons = decide()
    assert winner == B
    assert reasons == {"cudnn": "c measured 85.0 us against 80.0 us of b"}


@pytest.mark.parametrize("fastest", [99.6, 100.0, 200.0])
def test_xla_serves_where_nothing_beats_it(on_gpu, fastest):
    on_gpu(FakeGpu({"a": fastest, "b": 300.0, "c": 300.0}))
    winner, reasons = decide()
    assert winner is None
    assert reasons["exported"] == f"a measured {fastest:.1f} us against 100.0 us of XLA's form"
    assert "cudnn" in reasons


def test_fused_takes_the_fastest_fused_candidate_even_if_xla_is_faster(on_gpu):
    on_gpu(FakeGpu({"a": 300.0, "b": 200.0, "c": 400.0}))
    assert decide(fused=True)[0] == B


def test_a_failed_trial_is_a_decline_with_its_reason(on_gpu):
    on_gpu(FakeGpu({"b": 50.0, "c": 60.0}))
    winner, reasons = decide()
    assert winner == B
    assert reasons["a (trial)"] == "CUDNN_STATUS"


@pytest.mark.parametrize("fused", [False, True])
def test_where_every_trial_fails_nothing_is_chosen(on_gpu, fused):
    on_gpu(FakeGpu({}))
    winner, reasons = decide(fused=fused)
    assert winner is None
    assert {"a (trial)", "b (trial)", "c (trial)"} <= set(reasons)


def test_a_call_is_measured_once_in_a_process_and_once_on_a_machine(on_gpu):
    gpu = FakeGpu({"a": 50.0, "b": 60.0, "c": 70.0})
    on_gpu(gpu)
    assert decide()[0] == decide()[0] == A
    assert gpu.trials == 1
    on_gpu(gpu)  # a later process: memory is gone, the disk is not
    assert decide()[0] == A
    assert gpu.trials == 1
    decide(call=dataclasses.replace(CALL, m=512))
    assert gpu.trials == 2


def test_threads_measure_a_call_once_and_a_known_call_does_not_wait(on_gpu):
    started, may_end = threading.Event(), threading.Event()

    class SlowGpu(FakeGpu):
        def measure(self, call, candidates, device):
            if call.m == 512:
                started.set()
                assert may_end.wait(60)
            return super().measure(call, candidates, device)

    gpu = on_gpu(SlowGpu({"a": 50.0, "b": 60.0, "c": 70.0}))
    decide()
    new = dataclasses.replace(CALL, m=512)
    with ThreadPoolExecutor(3) as pool:
        try:
            compilations = [pool.submit(decide, call=new) for _ in range(2)]
            assert started.wait(60)
            assert pool.submit(decide).result(60)[0] == A
            assert not any(c.done() for c in compilations)
        finally:
            may_end.set()
        assert [c.result(60)[0] for c in compilations] == [A, A]
    assert gpu.trials == 2


def test_a_new_candidate_is_measured_and_a_withdrawn_one_is_not_chosen(on_gpu):
    gpu = FakeGpu({"a": 50.0, "b": 60.0, "c": 40.0})
    on_gpu(gpu)
    decide((A, B))
    on_gpu(gpu)
    assert decide((A, B, C))[0] == C
    assert gpu.trials == 2
    on_gpu(gpu)
    assert decide((A,))[0] == A
    assert gpu.trials == 2


def test_a_withdrawn_candidate_that_failed_is_not_spoken_of(on_gpu):
    gpu = FakeGpu({"a": 50.0})
    on_gpu(gpu)
    decide((A, B))
    on_gpu(gpu)
    assert decide((A,)) == (A, {})
    assert gpu.trials == 1


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"[]", b"null", b'{"measurement": 3}', b"\xff\xfe", b'{"measurement": {}}'],
)
def test_a_damaged_file_is_a_miss_and_is_replaced(on_gpu, tmp_path, damage):
    gpu = FakeGpu({"a": 50.0, "b": 60.0, "c": 70.0})
    on_gpu(gpu)
    decide()
    (file,) = (tmp_path / "tuning").glob("*.json")
    file.write_bytes(damage)
    on_gpu(gpu)
    assert decide()[0] == A
    assert gpu.trials == 2
    assert json.loads(file.read_text())["measurement"]["xla_us"] == 100.0


def test_a_directory_that_cannot_be_written_costs_only_the_next_measurement(on_gpu, tmp_path):
    gpu = FakeGpu({"a": 50.0, "b": 60.0, "c": 70.0})
    blocked = tmp_path / "file"
    blocked.write_text("a file where the cache directory should be")
    on_gpu(gpu, cache_dir=blocked)
    assert decide()[0] == A
    on_gpu(gpu, cache_dir=blocked)
    assert decide()[0] == A
    assert gpu.trials == 2


def test_files_are_readable_by_others_of_the_same_umask_and_no_temporary_stays(on_gpu, tmp_path):
    on_gpu(FakeGpu({"a": 50.0, "b": 60.0, "c": 70.0}))
    decide()
    (file,) = (tmp_path / "tuning").iterdir()
    assert file.suffix == ".json"
    assert file.stat().st_mode & stat.S_IRUSR


def _write_many(directory: str, seed: int) -> None:
    path = Path(directory) / "one.json"
    for k in range(50):
        _tuning_cache.write(path, {}, CALL, Measurement(float(seed), ((A, float(k)),)))
        assert _tuning_cache.read(path) is not None


def test_processes_share_a_file_without_ever_reading_half_of_it(tmp_path):
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_write_many, args=(str(tmp_path), k)) for k in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
        assert worker.exitcode == 0


def test_measurements_survive_json():
    whole = Measurement(12.5, ((A, 1.0), (C, 2.0)), {"b": "why"})
    assert Measurement.from_json(json.loads(json.dumps(whole.to_json()))) == whole


@pytest.mark.parametrize("reason", ["off", "other gpu", "several processes", "symbolic"])
def test_without_a_measurement_fused_is_not_preferred(on_gpu, monkeypatch, reason):
    gpu = FakeGpu({"a": 1.0, "b": 1.0, "c": 1.0})
    on_gpu(gpu, tune=reason != "off")
    call = CALL
    if reason == "other gpu":
        monkeypatch.setattr(_tuning, "local_gpu_target", lambda: "sm_100a")
    elif reason == "several processes":  # and nothing that connects them
        monkeypatch.setattr(jax, "process_count", lambda: 2)
    elif reason == "symbolic":
        call = dataclasses.replace(CALL, m=None)
    monkeypatch.setattr(_table, "rows", lambda target: ())
    winner, reasons = decide(call=call)
    assert winner is None
    assert "never measured" in reasons["exported"]
    assert decide(call=call, fused=True)[0] == A
    assert gpu.trials == 0


class Service:
    """Stands in for the key-value service of jax.distributed, in one process."""

    def __init__(self):
        self.told: dict[str, str] = {}

    def key_value_try_get(self, key):
        if key not in self.told:
            raise jax.errors.JaxRuntimeError(f"NOT_FOUND: {key}")
        return self.told[key]

    def key_value_set(self, key, value):
        if key in self.told:
            raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: {key}")
        self.told[key] = value


@pytest.mark.parametrize("late", [False, True], ids=["one after the other", "at once"])
def test_every_process_takes_the_first_measurement(on_gpu, monkeypatch, tmp_path, late):
    """Of two processes on unlike GPUs, the second chooses as the first, against its own times."""
    service = Service()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(_agreement, "coordination_client", lambda: service)
    first = on_gpu(FakeGpu({"a": 50.0, "b": 60.0, "c": 70.0}), cache_dir=tmp_path / "first")
    assert decide()[0] == A
    told = dict(service.told)
    second = on_gpu(FakeGpu({"a": 90.0, "b": 60.0, "c": 40.0}), cache_dir=tmp_path / "second")
    if late:  # the first tells while the second measures
        service.told.clear()
        measure = _timing.measure
        monkeypatch.setattr(
            _timing, "measure", lambda *args: service.told.update(told) or measure(*args)
        )
    assert decide()[0] == A
    assert (first.trials, second.trials) == (1, int(late))
    assert service.told == told
    assert decide(call=dataclasses.replace(CALL, m=512))[0] == C, "nobody told of this one"


def test_no_measurement_is_everybodys_too(on_gpu, monkeypatch):
    """Where the first had no memory for trials, the others use the table as it does."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    service = Service()
    monkeypatch.setattr(_agreement, "coordination_client", lambda: service)
    monkeypatch.setattr(_table, "rows", lambda target: ())
    on_gpu(FullGpu({}, everything=True))
    assert decide()[0] is None
    second = on_gpu(FakeGpu({"a": 50.0, "b": 60.0, "c": 70.0}))
    assert decide()[0] is None
    assert second.trials == 0


def _with_rows(monkeypatch, *rows: _table.Row) -> None:
    monkeypatch.setattr(_table, "rows", lambda target: rows)


@pytest.mark.parametrize("scale", [1.0, 1.9, 0.6])
def test_the_table_speaks_for_shapes_near_a_measured_one(on_gpu, monkeypatch, scale):
    on_gpu(FakeGpu({}), tune=False)
    _with_rows(monkeypatch, _table.Row(CALL, 100.0, {"b": 90.0, "a": 95.0, "c": 97.0}))
    near = dataclasses.replace(CALL, m=int(CALL.m * scale))
    assert decide(call=near)[0] == B
    assert decide(call=near, fused=True)[0] == B
    assert decide((A,), call=near)[0] == A


@pytest.mark.parametrize(
    "change",
    [{"m": 2048}, {"h": 512}, {"i": 8}, {"outputs": ("h", "gate")}, {"weight_layout": "IO"}],
    ids=str,
)
def test_the_table_is_silent_about_other_shapes(on_gpu, monkeypatch, change):
    on_gpu(FakeGpu({}), tune=False)
    _with_rows(monkeypatch, _table.Row(CALL, 100.0, {"b": 10.0}))
    assert decide(call=dataclasses.replace(CALL, **change))[0] is None


def test_a_row_that_knows_no_offered_kernel_is_silent(on_gpu, monkeypatch):
    on_gpu(FakeGpu({}), tune=False)
    near, far = _table.Row(CALL, 100.0, {"another": 10.0}), dataclasses.replace(CALL, m=CALL.m * 2)
    _with_rows(monkeypatch, near, _table.Row(far, 200.0, {"b": 150.0}))
    assert decide()[0] == B
    _with_rows(monkeypatch, near)
    winner, reasons = decide()
    assert winner is None
    assert "no row of the shipped table speaks for it" in reasons["exported"]


def test_the_table_prefers_a_kernel_only_by_a_margin(on_gpu, monkeypatch):
    on_gpu(FakeGpu({}), tune=False)
    _with_rows(monkeypatch, _table.Row(CALL, 100.0, {"b": 99.0}))
    winner, reasons = decide()
    assert winner is None
    assert "the shipped table has XLA's form at 100.0 us" in reasons["exported"]


def test_shipped_tables_are_sound():
    for target in ("sm_90a", "sm_100a"):
        for row in _table.rows(target):
            assert row.call.stage in STAGES | GRADIENT_STAGES
            assert set(row.call.outputs) <= set(stage_named(row.call.stage).outputs)
            assert row.xla_us > 0
            assert all(us > 0 and math.isfinite(us) for us in row.kernels.values())


def test_routes_report_what_the_tuner_decided(on_gpu, monkeypatch):
    on_gpu(FakeGpu({"a": 50.0, "c": 70.0}))

    class Exported:
        @staticmethod
        def candidates(call, target):
            return [A]

    class Cudnn:
        @staticmethod
        def candidates(call, target):
            raise Declined("cuDNN is not installed")

    modules = {"exported": Exported, "cudnn": Cudnn}
    monkeypatch.setattr(_routes, "provider", lambda route: modules[route])
    monkeypatch.setattr(_routes, "SUPERSEDED", {})
    choice = _routes.choose(CALL, None, TARGET)
    assert choice.candidate == A
    assert choice.declined == {"cudnn": Decline("cuDNN is not installed")}
    assert _routes.choose(CALL, "xla", TARGET).candidate is None


@pytest.mark.parametrize("outputs", [("h",), ("h", "gate", "up")], ids="+".join)
def test_trials_time_xla_and_note_a_candidate_that_fails(outputs):
    call = dataclasses.replace(CALL, outputs=outputs, dtype="float32")
    measured = _timing.measure(call, [A], jax.devices("cpu")[0])
    assert measured.xla_us > 0
    assert measured.candidates == ()
    assert A.ffi_target in measured.failed["a"]


@pytest.mark.parametrize("text", ["", "first line\nsecond line"])
def test_a_trial_may_fail_with_any_text(monkeypatch, text):
    def failing(call, candidate):
        def program(*operands):
            raise ValueError(text)

        return program

    monkeypatch.setattr(_timing, "_as_program", failing)
    call = dataclasses.replace(CALL, dtype="float32")
    failed = _timing.measure(call, [A], jax.devices("cpu")[0]).failed
    assert failed == {"a": text.split("\n")[0] or "ValueError"}


def test_a_guard_against_transfers_does_not_stop_trials():
    call = dataclasses.replace(CALL, dtype="float32")
    with jax.transfer_guard("disallow"):
        assert _timing.measure(call, [], jax.devices("cpu")[0]).xla_us > 0


def test_trials_of_the_backward_stage_have_its_operands():
    call = dataclasses.replace(CALL, stage="down_dswiglu", outputs=("dup",), dtype="float32")
    assert len(_timing.operands_of(call, 8)) == 3
    call = dataclasses.replace(call, outputs=("dgate", "dup"))
    shapes = [a.shape for a in _timing.operands_of(call, 8)]
    assert shapes == [(8, 64), (64, 128), (8, 128), (8, 128)]
    assert _timing.measure(call, [], jax.devices("cpu")[0]).xla_us > 0


@pytest.mark.parametrize(
    ("times", "winner"),
    [((80.0, 81.0), A), ((81.0, 80.0), A), ((82.0, 80.0), B), ((80.0, 82.0), A)],
    ids=["first", "tie", "second", "clear"],
)
def test_noise_does_not_choose(times, winner):
    """Of kernels that tie, that which comes first where nothing was timed."""
    measured = Measurement(100.0, ((A, times[0]), (B, times[1])))
    assert measured.preferred() == winner
    assert measured.best() == (winner, times[0 if winner == A else 1])
    assert Measurement(100.0, ()).best() is None


def test_of_kernels_that_tie_one_that_beats_xla_serves():
    measured = Measurement(100.0, ((A, 100.0), (B, 99.0)))
    assert measured.best() == (A, 100.0)
    assert measured.preferred() == B
    assert Measurement(100.0, ((A, 101.0), (B, 100.0))).preferred() is None


def test_nobody_is_told_to_time_a_symbolic_size():
    """A call with a symbolic size is never timed, wherever it is compiled."""
    for call, told in ((CALL, True), (dataclasses.replace(CALL, m=None), False)):
        for fused in (True, False):
            _, declined = _tuning.decide(call, [A, C], "sm_none", fused=fused)
            assert declined
            for decline in declined.values():
                assert (decline.advice == _tuning.TO_MEASURE) == told


def test_a_drift_of_the_clocks_meets_all_alike():
    """While the GPU slows down by a third, a candidate that takes 0.9 of XLA's time still does."""
    slower = [1 + 0.33 * k / 14 for k in range(15)]
    baseline, turns = slower[::2], [0.9 * s for s in slower[1::2]]
    assert _timing.ratio(turns, baseline) == pytest.approx(0.9, rel=1e-12)
    # One turn that something else disturbed does not count.
    turns[3] *= 5
    assert _timing.ratio(turns, baseline) == pytest.approx(0.9, rel=1e-12)


@pytest.mark.parametrize("m", [64, 1 << 21], ids=["several sets", "one set"])
def test_times_are_of_one_run_of_the_stage(monkeypatch, m):
    """Two candidates of known length, through a clock of our own."""
    call = dataclasses.replace(CALL, dtype="float32", m=m, h=1, i=1)
    calls = {}

    def repeated(program, rounds):
        us = getattr(program, "us", 100.0)
        run = lambda sets: sets[0][0]  # noqa: E731
        calls[run] = (us, rounds)
        return run

    def as_program(call, candidate):
        program = lambda *operands: operands  # noqa: E731
        program.us = {"a": 80.0, "b": 120.0}[candidate.kernel]
        return program

    def seconds(run, sets):
        us, rounds = calls[run]
        return us * rounds * len(sets) * 1e-6

    monkeypatch.setattr(_timing, "WARM_SECONDS", 0.0)
    monkeypatch.setattr(_timing, "COLD_BYTES", 1 << 20)
    monkeypatch.setattr(_timing, "repeated", repeated)
    monkeypatch.setattr(_timing, "_as_program", as_program)
    monkeypatch.setattr(_timing, "_seconds", seconds)
    measured = _timing.measure(call, [A, B], jax.devices("cpu")[0])
    assert measured.xla_us == pytest.approx(100)
    assert dict(measured.candidates) == pytest.approx({A: 80.0, B: 120.0})
    sets = len(_timing.sets_of(call, _timing.MEMORY_CAP))
    assert sets == (_timing.MAX_SETS if m == 64 else 1)
    # To estimate, and then for 15 ms.
    assert {rounds * sets for _, rounds in calls.values()} == {max(4, sets), 150 // sets * sets + (
        sets if 150 % sets else 0)}  # fmt: skip


def test_candidates_change_places(monkeypatch):
    """No candidate always runs next to the same other."""
    order = []

    def repeated(program, rounds):
        return getattr(program, "kernel", "xla")

    def as_program(call, candidate):
        program = lambda *operands: operands  # noqa: E731
        program.kernel = candidate.kernel
        return program

    monkeypatch.setattr(_timing, "WARM_SECONDS", 0.0)
    monkeypatch.setattr(_timing, "repeated", lambda *args: _Named(repeated(*args)))
    monkeypatch.setattr(_timing, "_as_program", as_program)
    monkeypatch.setattr(_timing, "_seconds", lambda run, sets: order.append(run.name) or 1e-3)
    call = dataclasses.replace(CALL, dtype="float32", m=8)
    _timing.measure(call, [A, B, C], jax.devices("cpu")[0])
    last = order[-(4 * _timing.ROUNDS + 1) :]
    rounds = [last[k : k + 4] for k in range(0, len(last) - 1, 4)]
    assert {r[0] for r in rounds} == {"xla"} and last[-1] == "xla"
    assert all(sorted(r) == ["a", "b", "c", "xla"] for r in rounds)
    assert {r[1] for r in rounds} == {"a", "b", "c"}


@dataclasses.dataclass(frozen=True)
class _Named:
    name: str

    def __call__(self, sets):
        return sets[0][0]


def test_operands_change_from_call_to_call():
    """Small weights would stay in the L2 cache, where no model finds them."""
    sets = _timing.sets_of(CALL, _timing.MEMORY_CAP)
    assert len(sets) == _timing.MAX_SETS
    assert [a.shape for a in sets[0]] == [a.shape for a in sets[-1]]
    assert not (sets[0][0] == sets[1][0]).all()
    large = dataclasses.replace(CALL, m=8192, h=128, i=16384)
    assert _timing.bytes_of(large, large.m) > _timing.COLD_BYTES
    assert len(_timing.sets_of(large, _timing.MEMORY_CAP)) == 1
    each = _timing.bytes_of(CALL, CALL.m)
    assert len(_timing.sets_of(CALL, 3 * each)) == 3


class FullDevice:
    """A GPU with so many bytes free."""

    def __init__(self, free):
        self.free = free

    def memory_stats(self):
        return {"bytes_limit": self.free + 7, "bytes_in_use": 7}


@pytest.mark.parametrize("stage", sorted(STAGES | GRADIENT_STAGES))
@pytest.mark.parametrize("free", [100 << 30, 4 << 30])
def test_timing_memory_is_capped(stage, free):
    outputs = stage_named(stage).outputs
    large = dataclasses.replace(CALL, stage=stage, outputs=outputs, m=1 << 20, h=8192, i=28672)
    cap = _timing.memory_cap(FullDevice(free))
    assert cap == min(_timing.MEMORY_CAP, free // 2)
    rows = _timing.timed_rows(large, cap)
    assert _timing.FEWEST_ROWS // 2 <= rows < large.m
    params = _timing._params(large)
    operands = [jax.ShapeDtypeStruct(s, "bfloat16") for s in _timing.shapes_of(large, rows)]
    results = jax.eval_shape(functools.partial(stage_named(stage).form, params=params), *operands)
    taken = sum(2 * math.prod(a.shape) for a in (*operands, *jax.tree.leaves(results)))
    assert taken == _timing.bytes_of(large, rows)
    assert taken <= cap or rows <= _timing.FEWEST_ROWS
    assert _timing.timed_rows(CALL, cap) == CALL.m


def test_a_device_that_does_not_tell_its_memory_has_enough():
    device = jax.devices("cpu")[0]
    assert device.memory_stats() is None
    assert _timing.memory_cap(device) == _timing.MEMORY_CAP


@pytest.mark.parametrize("m", [1, 100, 8192])
def test_weights_over_the_cap_are_timed_with_rows_that_say_something(m):
    widest = dataclasses.replace(CALL, m=m, h=16384, i=53248)  # Llama 3.1 405B
    assert min(m, _timing.FEWEST_ROWS // 2) <= _timing.timed_rows(widest, 1 << 30) <= m
