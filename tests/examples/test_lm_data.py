"""The demo's text: split by file, the same on every run, and the entropy it is judged by."""

import numpy as np
import pytest

from lm.data import load_corpus, sample_batches, spread_batches, unigram_entropy


@pytest.fixture
def folder(tmp_path, rng):
    for i in range(64):
        path = tmp_path / f"package{i % 5}" / f"module{i}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"<%03d>" % i + rng.bytes(40).hex().encode())
    (tmp_path / "package0" / "test").mkdir()
    (tmp_path / "package0" / "test" / "test_it.py").write_bytes(b"<skipped>")
    (tmp_path / "package0" / "notes.txt").write_bytes(b"<skipped>")
    return tmp_path


def test_split_is_by_file(folder):
    corpus = load_corpus(folder)
    train, held_out = corpus.train.tobytes(), corpus.held_out.tobytes()
    assert corpus.train_files + corpus.held_out_files == 64
    for i in range(64):
        assert (b"<%03d>" % i in train) != (b"<%03d>" % i in held_out)
    assert b"skipped" not in train + held_out


def test_split_stays_when_other_files_come_and_go(folder):
    before = load_corpus(folder).held_out.tobytes()
    (folder / "a_new_module.py").write_bytes(b"")
    assert load_corpus(folder).held_out.tobytes() == before


def test_too_few_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="too few"):
        load_corpus(tmp_path)


def test_standard_library_is_enough():
    corpus = load_corpus()
    assert corpus.train.size > 4_000_000
    assert corpus.held_out.size > 100_000


def test_unigram_entropy(rng):
    assert unigram_entropy(np.full(100, 7, np.uint8)) == 0.0
    assert unigram_entropy(np.arange(256, dtype=np.uint8)) == pytest.approx(np.log(256))
    data = rng.integers(0, 9, 1000).astype(np.uint8)
    # The loss of the best predictor that ignores context, averaged over the data itself.
    frequency = {byte: np.mean(data == byte) for byte in range(9)}
    assert unigram_entropy(data) == pytest.approx(-np.mean([np.log(frequency[b]) for b in data]))


def test_batches_are_windows_of_the_data(rng):
    data = np.arange(251, dtype=np.uint8)
    random = next(sample_batches(data, 4, 16, seed=int(rng.integers(1000))))
    spread = list(spread_batches(data, 4, 16, count=3))
    for batch in (random, *spread):
        assert batch.shape == (4, 17)
        assert (np.diff(batch, axis=1) == 1).all()
    assert spread[0][0, 0] == 0
    assert spread[-1][-1, -1] == 250


def test_batches_follow_the_seed():
    data = np.random.default_rng(0).integers(0, 256, 10_000).astype(np.uint8)
    first, same, other = (next(sample_batches(data, 8, 32, seed)) for seed in (1, 1, 2))
    assert (first == same).all()
    assert (first != other).any()
