"""`python -m swiglu_jax` says which kernels are installed and what compiled them."""

from swiglu_jax._environment import environment_report, format_report
from swiglu_jax.kernels import _manifest


def test_the_report_lists_every_kernel() -> None:
    manifest = _manifest.installed()
    report = environment_report()
    assert [k["name"] for k in report["kernels"]] == [k.variant.name for k in manifest.kernels]
    text = format_report(report, kernels=True)
    for kernel in manifest.kernels:
        line = next(row for row in text.splitlines() if kernel.variant.name in row)
        assert kernel.digest in line
        assert "x".join(map(str, kernel.variant.tile)) in line
    for package, version in manifest.versions.items():
        assert f"{package} {version}" in text


def test_the_report_says_what_a_kernel_asks_of_its_call() -> None:
    by_name = {k["name"]: k for k in environment_report()["kernels"]}
    backward = by_name["sm100_down_dswiglu_dgate_dup_h_128x256_2cta_io_bf16"]
    assert backward["multiples"] == {"M": 1, "H": 8, "I": 16}
    assert (backward["alignment"], backward["residual_alignment"]) == (16, 32)
    assert (backward["tile"], backward["cluster"]) == ("128x256x64", "2x1")
