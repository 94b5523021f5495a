"""The picture: a real PNG, and a page that needs nothing from anywhere."""

import json
import re
import struct
from html.parser import HTMLParser
from importlib.util import find_spec

import pytest

from accumulus.errors import UsageError
from accumulus.run import plan_picture
from accumulus.run.plan_picture import COLORS, axis_end, drawn_rows, make_chart, to_page, write_picture
from accumulus.units import format_bytes
from tests.browser import opened

from .lines import PARTS, Line, make_plan
from .test_plan_table import shortfall

pytestmark = pytest.mark.skipif(find_spec("vl_convert") is None, reason="needs the extra plot")

GIB = 2**30
CURVES = {"fp32": Line(4 * GIB, GIB), "bf16": Line(5 * GIB, GIB // 2)}


class Tags(HTMLParser):
    """Every tag with its attributes, and the text between them."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.append(data)


def test_png_is_a_png_of_the_size_that_its_rows_need(tmp_path):
    heights = []
    for batch_size in (4, 64):
        path = tmp_path / "plan.png"
        write_picture(path, make_plan(16 * GIB, CURVES, batch_size=batch_size))
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n")
        assert content.endswith(b"IEND\xaeB`\x82")
        width, height = struct.unpack(">II", content[16:24])
        assert width >= 2 * 640
        heights.append(height)
    assert 300 < heights[0] < heights[1]


def test_in_a_real_browser(tmp_path):
    dom = opened(to_page(make_plan(16 * GIB, CURVES)), tmp_path)
    assert dom.count("<svg") >= 1
    assert all(part in dom for part in PARTS)


def test_the_page_fetches_nothing():
    parsed = Tags(to_page(make_plan(16 * GIB, CURVES)))
    for tag, attributes in parsed.tags:
        assert tag not in ("link", "iframe", "img"), tag
        assert not {"src", "href"} & attributes.keys(), (tag, attributes)
    scripts = [tag for tag, _ in parsed.tags if tag == "script"]
    assert len(scripts) == 2
    styles = " ".join(re.findall(r"<style>(.*?)</style>", to_page(make_plan(16 * GIB, CURVES)), re.S))
    assert "url(" not in styles and "@import" not in styles


def test_the_page_is_for_phones_dark_mode_and_those_who_do_not_see_the_picture():
    plan = make_plan(16 * GIB, CURVES)
    page = to_page(plan)
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in Tags(page).tags
    assert "prefers-color-scheme: dark" in page
    assert '"width": "container"' in page
    said = re.search(r"<figcaption>(.*?)</figcaption>", page)[1]
    assert "Stacked bars of the peak memory of mine.py:job with batch 16, from 5.00 GiB (fp32, micro-batch 1)" in said
    assert "Recommended: bf16, micro-batch 16, 13.0 GiB." in said
    assert plan_picture.describe(plan) == make_chart(plan).to_dict()["description"]


def test_the_page_holds_every_number():
    plan = make_plan(10 * GIB, CURVES)
    page = to_page(plan)
    cells = re.findall(r"<tr.*?>(.*?)</tr>", page)
    for row in plan.rows:
        numbers = [format_bytes(num_bytes) for num_bytes in (*row.parts.values(), row.peak_bytes)]
        expected = [row.precision, str(row.microbatch), str(row.num_microbatches), *numbers, row.verdict]
        assert "".join(f"<td>{cell}</td>" for cell in expected) in cells
    spec = json.loads(re.search(r"^const spec = (.*);$", page, re.M)[1])
    assert "$schema" not in spec
    found = {}
    for records in (
        spec["datasets"].values() if "datasets" in spec else [layer["data"]["values"] for layer in spec["layer"]]
    ):
        for record in records:
            if "part" in record:
                found[record["label"], record["part"]] = record["end"] - record["start"]
    drawn = drawn_rows(plan)
    assert [(row.precision, row.microbatch) for row in plan.rows if row not in drawn] == [("fp32", 16)]
    for row in drawn:
        for part, num_bytes in row.parts.items():
            if row.peak_bytes <= axis_end(list(plan.rows), plan.limit.limit_bytes):
                assert found[f"{row.precision} × {row.microbatch}", part] == pytest.approx(num_bytes / GIB)  # noqa: RUF001


def test_names_cannot_break_the_page():
    plan = make_plan(16 * GIB, CURVES)
    evil = "</script><script>alert(1)</script>"
    page = to_page(type(plan)(**{**vars(plan), "task": evil, "notes": (evil,)}))
    assert evil not in page
    assert len([tag for tag, _ in Tags(page).tags if tag == "script"]) == 2


def test_what_does_not_fit_is_drawn_for_one_sample_and_explained():
    plan = make_plan(GIB, CURVES, shortfall=shortfall())
    page = to_page(plan)
    assert "Not one sample fits." in page
    assert "less state + other: saves 60 B, then needs 40 B, enough" in page
    assert "fp32 × 1" in json.dumps(make_chart(plan).to_dict(), ensure_ascii=False)  # noqa: RUF001
    assert "fp32 × 16" not in json.dumps(make_chart(plan).to_dict(), ensure_ascii=False)  # noqa: RUF001


def test_colours_differ_and_cover_the_parts():
    assert tuple(COLORS) == PARTS
    assert len(set(COLORS.values())) == len(PARTS)


def test_without_the_packages_it_says_how_to_install_them(monkeypatch, tmp_path):
    monkeypatch.setattr(plan_picture, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"--picture needs altair and vl_convert; .*pip install 'accumulus\[plot\]'"):
        write_picture(tmp_path / "plan.png", make_plan(16 * GIB, CURVES))
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"--picture .*nowhere/plan.png cannot be written"):
        write_picture(tmp_path / "nowhere" / "plan.png", make_plan(16 * GIB, CURVES))
