import hashlib
import random
import time

import pytest

from accumulus.errors import UsageError
from accumulus.run.bytes_data import (
    find_files,
    functions_of,
    library_files,
    load_texts,
    read_pieces,
    split_texts,
    stable_hash,
)

SOURCE = '''
import os

@decorated
def outer(a):
    def inner():
        return a
    return inner

class Thing:
    if True:
        async def method(self):
            """Says ä."""
            return 1
'''


def test_functions_are_outermost_dedented_and_whole():
    outer, method = functions_of(SOURCE)
    assert outer.startswith(b"@decorated\ndef outer")
    assert b"inner" in outer
    assert method.decode().startswith('async def method(self):\n    """Says ä."""\n')


def test_library_leaves_tests_and_foreign_packages_out():
    parts = {part for file in library_files() for part in file.parts}
    assert "json" in parts
    assert not parts & {"test", "site-packages", "idlelib", "lib2to3"}


@pytest.mark.slow
def test_library_loads_in_time_and_in_a_fixed_order():
    started = time.perf_counter()
    samples = load_texts([], max_length=64)
    assert time.perf_counter() - started < 15, "measured: 2.5 s; a busy machine may take longer"
    assert len(samples) > 5_000
    assert all(0 < len(sample) <= 64 for sample in samples)
    assert samples == load_texts([], max_length=64)


def test_split_is_stable_disjoint_and_complete():
    texts = [f"text {number}".encode() for number in range(2000)]
    train, heldout = split_texts(texts)
    assert not set(train) & set(heldout)
    assert sorted(train + heldout) == sorted(texts)
    assert 0.03 < len(heldout) / len(texts) < 0.07
    mixed = random.Random(0).sample(texts, len(texts))
    assert set(split_texts(mixed)[1]) == set(heldout)
    assert set(split_texts(texts[:1000])[1]) == set(heldout) & set(texts[:1000])
    assert stable_hash(b"x") == int.from_bytes(hashlib.blake2b(b"x", digest_size=4).digest(), "big")


@pytest.mark.parametrize("count", [2, 3, 10])
def test_both_sides_of_a_small_split_have_something(count):
    train, heldout = split_texts([b"%d" % number for number in range(count)])
    assert train
    assert heldout
    assert len(train) + len(heldout) == count
    train, heldout = split_texts([b"%d" % number for number in range(count)], heldout_ratio=1.0)
    assert train
    assert heldout
    assert len(train) + len(heldout) == count


def test_a_folder_of_text_and_source(tmp_path):
    (tmp_path / "a.md").write_text("A first paragraph of text.\n\nok\n\nAnother one, joined to ok.\n")
    (tmp_path / "b.py").write_text(SOURCE)
    (tmp_path / ".hidden").write_text("left out")
    assert [file.name for file in find_files(tmp_path)] == ["a.md", "b.py"]
    samples = load_texts([tmp_path], max_length=1000)
    assert samples[:2] == [b"A first paragraph of text.", b"ok\n\nAnother one, joined to ok.\n"]
    assert len(samples) == 4


def test_long_paragraphs_become_pieces_and_source_that_does_not_parse_is_text(tmp_path):
    path = tmp_path / "long.py"
    path.write_text("x " * 100)
    assert read_pieces(path, 64) == [b"x " * 32, b"x " * 32, b"x " * 32, b"x " * 4]


@pytest.mark.parametrize(
    ("content", "told"),
    [(b"\0\1\2", "binary"), (b"\xff\xfe", "not UTF-8"), (b"", "no text found"), (b" \n \n", "no text found")],
)
def test_files_that_are_no_text(tmp_path, content, told):
    path = tmp_path / "it.txt"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=told):
        load_texts([path], max_length=10)


def test_paths_that_hold_nothing(tmp_path):
    with pytest.raises(UsageError, match="no such file or folder"):
        load_texts([tmp_path / "missing"], max_length=10)
    with pytest.raises(UsageError, match="holds no files"):
        load_texts([tmp_path], max_length=10)
