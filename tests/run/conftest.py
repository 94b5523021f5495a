from pathlib import Path

import pytest

TEXT = "\n\n".join(
    f"Paragraph number {number} says that {number} times two is {2 * number}, as anybody may check."
    for number in range(80)
)


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def tiny_file():
    return Path(__file__).with_name("tiny.py")
