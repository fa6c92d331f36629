"""The measured tables of README.md and docs/ are those of the committed results."""

import re
import shutil
import subprocess

import pytest

from benchmarks import __main__ as command
from benchmarks import docs_blocks
from benchmarks.bounds import Records, check, line
from benchmarks.docs_blocks import BLOCKS, NOT_YET, PAGES, PLOTS, measurements, update_docs, updated
from benchmarks.report import main as report_command
from benchmarks.report import report
from benchmarks.results import ROOT, load

IMAGE = re.compile(r"!\[.*?\]\((\S+\.png)\)")


def committed_results():
    """Not those that a benchmark left in the folder; all of them where there is no git."""
    git = ["git", "-C", str(ROOT), "ls-files", "benchmarks/results/*.json"]
    try:
        listed = subprocess.run(git, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return None
    return sorted(ROOT / name for name in listed) or None


@pytest.mark.parametrize("page", PAGES)
def test_committed_docs_are_those_of_the_committed_results(page):
    text = (ROOT / page).read_text()
    assert "<!-- measured: " in text
    assert updated(page, text, measurements(paths=committed_results())) == text, (
        "run python -m benchmarks.report --update-docs"
    )


def test_files_of_different_commands_may_come_in_any_order():
    """A model's records have no contender's name, a stage's no variant."""
    files = load(committed_results() or sorted((ROOT / "benchmarks" / "results").glob("*.json")))
    kinds = {tuple({record["measure"] for record in file["records"]}) for file in files}
    assert len(kinds) > 1
    for turned in range(len(files)):
        order = files[turned:] + files[:turned]
        for records in (Records(order), Records(order[::-1])):
            assert list(map(line, check(records)))
            assert "# Benchmark results" in report(records)


@pytest.mark.parametrize("page", PAGES)
def test_every_plot_in_a_page_is_there(page):
    for image in IMAGE.findall((ROOT / page).read_text()):
        assert ((ROOT / page).parent / image).is_file(), image


def test_every_block_is_on_a_page_and_closed():
    texts = [(ROOT / page).read_text() for page in PAGES]
    named = [name for text in texts for name in re.findall(r"<!-- measured: (\S+) -->", text)]
    assert sorted(named) == sorted(BLOCKS)
    assert len(named) == sum(text.count("<!-- /measured -->") for text in texts)


def test_without_results_a_block_says_so():
    text = "<!-- measured: speed -->\nold\n<!-- /measured -->\nhand-written\n"
    new = updated("README.md", text, Records([]))
    assert NOT_YET in new and "old" not in new and new.endswith("hand-written\n")
    assert updated("README.md", new, Records([])) == new


def test_an_unknown_block_is_named():
    with pytest.raises(ValueError, match=r"README\.md: no block is named 'sped'"):
        updated("README.md", "<!-- measured: sped -->\n<!-- /measured -->\n", Records([]))


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """The pages, with results of a run at one of the claims' shapes made small."""
    results = tmp_path / "benchmarks" / "results"
    path = command.main(
        ["--shapes", "16,32,64", "--only", "forward", "step", "gemms", "stages", "memory",
         "--rounds", "5", "--sample-ms", "0.2", "--methods", "plain/OI", "swiglu_jax/OI",
         "--out", str(results)]
    )  # fmt: skip
    (shape,) = load([path])[0]["records"][:1]
    small = docs_blocks.HEADLINE[0].__class__(shape["m"], shape["h"], shape["i"])
    monkeypatch.setattr(docs_blocks, "HEADLINE", (small,))
    for page in PAGES:
        (tmp_path / page).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / page, tmp_path / page)
    return tmp_path


def test_update_docs_writes_tables_and_plots(checkout):
    written = update_docs(checkout)
    assert set(PAGES) <= set(written)
    records = measurements(checkout)
    readme = (checkout / "README.md").read_text()
    (ours,) = records.of("step", "swiglu_jax")
    (plain,) = records.of("step", "plain")
    row = next(line for line in readme.splitlines() if line.startswith("| 16, 32, 64 |"))
    assert row.endswith(f"| **{plain['median_ms'] / ours['median_ms']:.3f}** |")
    assert "| 16, 32, 64 | nine GEMMs alone" not in readme
    performance = (checkout / "docs" / "performance.md").read_text()
    for text in ("gate_up", "swiglu_jax (OI)", records.files[0]["path"].split("/")[-1]):
        assert text in performance
    for page in PAGES:
        text = (checkout / page).read_text()
        assert updated(page, text, records) == text  # a second time changes nothing
        for image in IMAGE.findall(text):
            assert ((checkout / page).parent / image).is_file()
    assert (checkout / PLOTS / "gemm_share.png").is_file()


def test_the_command_takes_files_or_updates_the_docs(capsys):
    for arguments in ([], ["--update-docs", "x.json"]):
        with pytest.raises(SystemExit):
            report_command(arguments)
        assert "--update-docs" in capsys.readouterr().err
