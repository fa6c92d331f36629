"""Bad input is refused: the error names the argument, what came and what was expected."""

import re
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import sparse
from support import ARGUMENTS, LAYOUTS, error, problem, reference

from swiglu_jax import explain, swiglu_mlp

H, I = 8, 12  # noqa: E741


def _good(layout="OI", dtype=jnp.float32):
    first, second = ((I, H), (H, I)) if layout == "OI" else ((H, I), (I, H))
    shapes = {"x": (2, 3, H), "w_gate": first, "w_up": first, "w_down": second}
    return {name: jnp.zeros(shape, dtype) for name, shape in shapes.items()}


SEVERAL = np.array(["OI", "xla"])
"""No option: an array compares by elements."""
BOTH = pytest.mark.parametrize("call", [swiglu_mlp, explain], ids=["swiglu_mlp", "explain"])


class Foreign:
    """An array of another library, whose dtypes are none of NumPy's."""

    def __init__(self, shape):
        self.shape, self.dtype = shape, object()


def _sparse(shape):
    return sparse.BCOO.fromdense(jnp.ones(shape))


NO_ARRAYS = {
    "list": (lambda shape: np.zeros(shape).tolist(), "got list"),
    "float": (lambda shape: 1.0, "got float"),
    "None": (lambda shape: None, "got NoneType"),
    "text": (lambda shape: "x", "got str"),
    "another library": (Foreign, r"of JAX or NumPy, got .*\.Foreign of <object"),
}


@BOTH
@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize(("make", "got"), NO_ARRAYS.values(), ids=NO_ARRAYS)
def test_a_value_that_is_no_array(call, name, make, got):
    good = _good()
    with pytest.raises(TypeError, match=rf"^{name}: expected an array.*{got}"):
        call(**good | {name: make(good[name].shape)})


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("make", [_sparse, np.ma.zeros], ids=["sparse", "masked"])
def test_an_array_that_jax_does_not_take(name, make):
    """Or takes without its mask."""
    good = _good()
    with pytest.raises(
        TypeError, match=rf"^{name}: expected an array, got .*, which JAX does not take: "
    ):
        swiglu_mlp(**good | {name: make(good[name].shape).astype(np.float32)})


FLOAT8 = [
    "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz",
    "float8_e5m2", "float8_e5m2fnuz",
]  # fmt: skip
SUPPORTED = ["bfloat16", "float16", "float32", "float64", *FLOAT8]
UNSUPPORTED = {
    **{
        name: np.dtype(getattr(ml_dtypes, name))
        for name in dir(ml_dtypes)
        if re.fullmatch(r"b?float.*|u?int\d", name) and name not in SUPPORTED
    },
    **{
        name: np.dtype(name)
        for name in ("bool", "int8", "int32", "uint8", "int64", "complex64", "complex128",
                     "object", "U1", "S1", "V2", "M8[s]", "m8[s]")
    },
    "float0": np.dtype(jax.dtypes.float0),
    "key<fry>": jax.random.key(0).dtype,
}  # fmt: skip
if np.dtype("longdouble").itemsize > 8:
    UNSUPPORTED[str(np.dtype("longdouble"))] = np.dtype("longdouble")


def _of_dtype(shape, dtype):
    """An array of it where there can be one."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), shape)
    return np.empty(shape, dtype)


@pytest.mark.parametrize("given", UNSUPPORTED)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_dtype_that_is_not_supported(given, name):
    good, dtype = _good(), UNSUPPORTED[given]
    made = {name: _of_dtype(good[name].shape, dtype)}
    shape = {name: jax.ShapeDtypeStruct(good[name].shape, dtype)}
    for call, argument in ((swiglu_mlp, made), (explain, made), (explain, shape)):
        with pytest.raises(TypeError) as e:
            call(**good | argument)
        text = str(e.value)
        assert text.startswith(f"{name}: expected a floating dtype (bfloat16, float16, ")
        assert text.endswith(f"got {'float0' if given == 'float0' else dtype}")


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_dtype_that_is_not_supported_in_jax_s_own_arrays(name):
    good = _good()
    for dtype in (jnp.int4, jnp.int32, jnp.bool_, jnp.complex64, jnp.float4_e2m1fn):
        for call in (swiglu_mlp, jax.jit(swiglu_mlp), explain):
            with pytest.raises(TypeError, match=rf"^{name}: expected a floating dtype \(") as e:
                call(**good | {name: jnp.zeros(good[name].shape, dtype)})
            assert str(e.value).endswith(f"got {jnp.dtype(dtype)}")


@pytest.mark.parametrize("dtype", FLOAT8)
def test_the_float8_kinds_that_are_supported(dtype):
    arrays = problem(np.random.default_rng(), (6,), 24, 40, dtype)
    want = reference(arrays, rounded=True)
    assert error(swiglu_mlp(*arrays), want[0]) <= 2 * float(jnp.finfo(dtype).eps)
    assert explain(*arrays).residuals[0].dtype == dtype


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("size", [-1, 2.0, np.int64(-8), np.float32(8)], ids=repr)
def test_sizes_that_are_none(name, size):
    """Which a jax.ShapeDtypeStruct may hold."""
    good = _good()
    wrong = jax.ShapeDtypeStruct((size, *good[name].shape[1:]), jnp.float32)
    with pytest.raises(ValueError, match=rf"^{name}: expected sizes that are integers of 0 or"):
        explain(**good | {name: wrong})


@pytest.mark.parametrize("target", ["cpu", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("rows", [2**31, 2**40, 2**64])
def test_sizes_beyond_any_machine_are_explained(target, rows):
    good = {k: jax.ShapeDtypeStruct(a.shape, jnp.bfloat16) for k, a in _good().items()}
    huge = good | {"x": jax.ShapeDtypeStruct((rows, H), jnp.bfloat16)}
    assert explain(**huge, target=target).residuals[0].bytes == rows * I * 2


@BOTH
@pytest.mark.parametrize("name", ARGUMENTS[1:])
def test_a_weight_of_another_dtype(call, name):
    good = _good()
    expected = rf"^{name}: expected x's dtype float32, got bfloat16; cast it"
    with pytest.raises(TypeError, match=expected):
        call(**good | {name: good[name].astype(jnp.bfloat16)})


@BOTH
def test_x_without_a_dimension(call):
    with pytest.raises(ValueError, match=r"^x: expected shape \[\.\.\., H\] of rank 1 or more"):
        call(**_good() | {"x": jnp.zeros(())})


@BOTH
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ARGUMENTS[1:])
def test_weights_of_wrong_shapes(call, name, layout):
    good = _good(layout)
    a, b = good[name].shape
    wrong = [(b, a), (a + 1, b), (a, b + 1), (a,), (a, b, 1), ()]
    if name == "w_gate":  # I is read off w_gate, so another I is blamed on w_up
        wrong.remove((a + 1, b) if layout == "OI" else (a, b + 1))
    for shape in wrong:
        with pytest.raises(ValueError, match=rf"^{name}: expected shape \[[HI], [HI]\] = ") as e:
            call(**good | {name: jnp.zeros(shape)}, weight_layout=layout)
        assert f"got [{', '.join(map(str, shape))}]" in str(e.value)
        assert f'layout "{layout}"' in str(e.value)


@BOTH
@pytest.mark.parametrize("layout", ["oi", "", None, "OIX", 3, ["OI"], SEVERAL], ids=repr)
def test_an_unknown_layout(call, layout):
    with pytest.raises(ValueError, match=r"^weight_layout: expected \"OI\""):
        call(**_good(), weight_layout=layout)


@BOTH
@pytest.mark.parametrize(
    "implementation", ["cudnn", "", "XLA", 1, False, ["xla"], SEVERAL], ids=repr
)
def test_an_unknown_implementation(call, implementation):
    with pytest.raises(ValueError, match=r"^implementation: expected None, \"xla\" or \"fused\""):
        call(**_good(), implementation=implementation)


@BOTH
@pytest.mark.parametrize("given", ["yes", None, 1, SEVERAL, jnp.zeros((), bool)], ids=repr)
def test_a_forward_mode_that_is_no_choice(call, given):
    with pytest.raises(ValueError, match=r"^forward_mode: expected True or False, got "):
        call(**_good(), forward_mode=given)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_shape_without_values(name):
    shape = jax.ShapeDtypeStruct(_good()[name].shape, jnp.float32)
    with pytest.raises(TypeError, match=rf"^{name}: expected an array, got a jax.ShapeDtypeStruct"):
        swiglu_mlp(**_good() | {name: shape})


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_numpy_arrays_become_what_jax_makes_of_them(dtype):
    arrays = {name: np.zeros(a.shape, dtype) for name, a in _good().items()}
    for x64 in (False, True):
        with jax.enable_x64(x64), warnings.catch_warnings():
            warnings.simplefilter("error")
            assert swiglu_mlp(**arrays).dtype == jnp.asarray(arrays["x"]).dtype


def test_numpy_s_float64_goes_with_jax_s_float32():
    """As in plain JAX without x64, for whichever argument, and in either order of bytes."""
    good = _good()
    want = explain(**good)
    for name in ARGUMENTS:
        for dtype in ("f8", ">f4", ">f8"):
            mixed = good | {name: np.zeros(good[name].shape, dtype)}
            assert swiglu_mlp(**mixed).dtype == jnp.float32
            assert explain(**mixed) == want


def test_float64_arrays_stay_what_they_are():
    """Where x64 is off and float64 allowed where it is asked for: nothing is rounded in silence."""
    rng = np.random.default_rng()
    before = jax.config.jax_explicit_x64_dtypes
    jax.config.update("jax_explicit_x64_dtypes", "allow")
    try:
        arrays = {k: jnp.asarray(rng.normal(size=a.shape), jnp.float64) for k, a in _good().items()}
        got = swiglu_mlp(**arrays)
    finally:
        jax.config.update("jax_explicit_x64_dtypes", before)
    assert {a.dtype for a in arrays.values()} == {jnp.dtype("float64")}
    assert got.dtype == jnp.float64
    x, w_gate, w_up, w_down = (np.asarray(a) for a in arrays.values())
    gate = x @ w_gate.T
    want = (gate / (1 + np.exp(-gate)) * (x @ w_up.T)) @ w_down.T
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-12)


@BOTH
@pytest.mark.parametrize("jitted", [False, True])
def test_float64_arrays_are_not_rounded_where_x64_is_off(call, jitted):
    """As they come out of ``jax.enable_x64(True)``, when they are used outside."""
    with jax.enable_x64(True):
        arrays = {name: jnp.ones(a.shape, jnp.float64) for name, a in _good().items()}
        assert swiglu_mlp(**arrays).dtype == jnp.float64
    function = jax.jit(lambda a: (call(**a), a["x"])[1]) if jitted else lambda a: call(**a)
    with pytest.raises(TypeError, match=r"^x: got float64 where jax_enable_x64 is off"):
        function(arrays)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_what_the_owner_writes_later_does_not_count(name):
    """The backward pass reads arguments again: NumPy's are copied, as jnp.asarray copies."""
    rng = np.random.default_rng()
    arrays = {k: rng.normal(size=(512, 512)).astype(np.float32) for k in ARGUMENTS}
    others = [k for k in ARGUMENTS if k != name]

    def of_others(*values):
        return swiglu_mlp(**dict(zip(others, values, strict=True)), **{name: arrays[name]})

    _, pull = jax.vjp(of_others, *(jnp.asarray(arrays[k]) for k in others))
    before = [np.array(g) for g in pull(jnp.ones((512, 512)))]
    arrays[name][:] = 0
    for a, b in zip(before, pull(jnp.ones((512, 512))), strict=True):
        np.testing.assert_array_equal(a, b)


def test_explain_takes_numpy_s_integers_as_sizes():
    given = {n: jax.ShapeDtypeStruct(a.shape, jnp.bfloat16) for n, a in _good().items()}
    shape = tuple(map(np.int64, given["x"].shape))
    odd = given | {"x": jax.ShapeDtypeStruct(shape, jnp.bfloat16)}
    for target in ("cpu", "sm_90a"):
        assert explain(**odd, target=target) == explain(**given, target=target)


def test_explain_refuses_unknown_names_and_targets():
    with pytest.raises(ValueError, match=r"^wrt: expected names of x, w_gate.*got 'w1'"):
        explain(**_good(), wrt=("w1",))
    for target in ("b200", 90):
        with pytest.raises(ValueError, match=r"^target: expected \"cpu\" or a GPU architecture"):
            explain(**_good(), target=target)


@pytest.mark.parametrize("wrt", [None, 0])
def test_explain_refuses_what_is_no_set_of_names(wrt):
    with pytest.raises(TypeError, match=r"^wrt: expected names of x, w_gate, w_up, w_down, got"):
        explain(**_good(), wrt=wrt)


def test_fused_on_a_cpu_raises_with_every_reason():
    good = _good(dtype=jnp.bfloat16)
    for f in (swiglu_mlp, jax.jit(swiglu_mlp, static_argnames="implementation")):
        with (
            jax.default_device(jax.devices("cpu")[0]),
            pytest.raises(NotImplementedError) as e,
        ):
            f(**good, implementation="fused")
        for part in ("gate_up", "M=6, H=8, I=12", "exported:", "cudnn:", "lowered for cpu"):
            assert part in str(e.value)


def test_errors_come_before_any_tracing_under_jit():
    good = _good()
    with pytest.raises(ValueError, match=r"^w_down: expected shape"):
        jax.jit(swiglu_mlp)(**good | {"w_down": jnp.zeros((I, H))})
