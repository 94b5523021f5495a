"""The page needs nothing from anywhere, holds every number, and every picture in it can be drawn."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from importlib.util import find_spec

import pytest
import torch
from torch import nn

import accumulus as acc
from accumulus.numerics import page as pages
from accumulus.numerics.page import bands_of, cell_records, make_chart, to_page
from accumulus.numerics.ranges import KINDS
from tests.browser import opened

from .models import squares

pytestmark = pytest.mark.skipif(find_spec("vl_convert") is None, reason="needs the extra plot")


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def report():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    with torch.no_grad():
        model[2].weight.fill_(2e4)
    optimizer = torch.optim.AdamW(model.parameters())
    return acc.diagnose(model, [torch.randn(8, 8)], loss_fn=squares, optimizer=optimizer, rounds=1)


@pytest.fixture(scope="module")
def page(report):
    return report.to_page()


def specs_of(page):
    return json.loads(re.search(r"^const specs = (.*);$", page, re.M)[1])


def values_of(spec):
    """The records of each layer, wherever they are kept."""
    kept = spec.get("datasets", {})
    return [
        kept[layer["data"]["name"]] if "name" in layer["data"] else layer["data"]["values"] for layer in spec["layer"]
    ]


def test_it_fetches_nothing(page):
    for tag, attributes in Tags(page).tags:
        assert tag not in ("link", "iframe", "img"), tag
        assert not {"src", "href"} & attributes.keys(), (tag, attributes)
    assert sum(tag == "script" for tag, _ in Tags(page).tags) == 2
    styles = " ".join(re.findall(r"<style>(.*?)</style>", page, re.S))
    assert "url(" not in styles and "@import" not in styles


def test_it_is_for_phones_dark_mode_and_those_who_do_not_see_pictures(page, report):
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in Tags(page).tags
    assert "prefers-color-scheme: dark" in page
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", page)
    assert len(captions) == len(KINDS)
    assert all(caption.startswith("Powers of two of the ") for caption in captions)
    assert [spec["description"] for spec in specs_of(page).values()] == captions


def test_each_kind_has_a_picture_that_vega_draws(page):
    import vl_convert

    specs = specs_of(page)
    assert set(specs) == {f"chart-{number}" for number in range(len(KINDS))}
    for name, spec in specs.items():
        assert f'id="{name}"' in page and "$schema" not in spec
        drawn = vl_convert.vegalite_to_svg(spec | {"width": 600})
        assert drawn.startswith("<svg") and drawn.count("<path") > 10


def test_hovering_names_the_layer(report):
    spec = make_chart(report, "activation")
    tips = spec["layer"][1]["encoding"]["tooltip"]
    assert {tip["field"] for tip in tips} >= {"layer", "magnitude", "share"}
    assert {record["layer"] for record in values_of(spec)[1]} == {"0", "1", "2"}


def test_cells_hold_every_number_once(report):
    for row in report.rows:
        shares = [float(record["share"].rstrip("%")) for record in cell_records(row)]
        assert sum(shares) == pytest.approx(100, abs=0.01 * len(shares)) or not shares


def test_bands_are_the_formats(report):
    from accumulus.numerics.formats import E4M3, FP16

    normal, subnormal = bands_of(FP16)
    assert normal[1] == subnormal[2] == -14 and subnormal[1] == -25 and 15.99 < normal[2] < 16
    assert bands_of(E4M3)[0][1] == -6
    behind = values_of(make_chart(report, "weight"))[0]
    assert {band["format"] for band in behind} == {"fp16", "e5m2", "e4m3"}


def test_gradients_show_where_fp16_begins_at_the_loss_scale(report):
    lines = values_of(make_chart(report, "weight gradient"))[-1]
    assert [line["text"] for line in lines][-1] == "fp16 ends at loss scale 2^16"
    assert len(make_chart(report, "weight")["layer"]) == 2


def test_findings_and_tables_are_there(page, report):
    assert report.findings
    for finding in report.findings:
        assert finding.kind in page
    for title in ("Ranges and shares", "Casts, the costly ones first", "Every operator"):
        assert title in page
    assert page.count("<tr><td>") >= len(report.rows)


def test_names_cannot_break_the_page(report):
    evil = "</script><script>alert(1)</script>"
    changed = type(report)(**{**vars(report), "notes": (evil,), "precision": evil})
    text = to_page(changed)
    assert evil not in text
    assert sum(tag == "script" for tag, _ in Tags(text).tags) == 2


def test_without_the_packages_it_says_how_to_install_them(monkeypatch, report):
    monkeypatch.setattr(pages, "find_spec", lambda name: None)
    with pytest.raises(acc.UnsupportedError, match=r"needs altair and vl_convert; .*accumulus\[plot\]"):
        report.to_page()


def test_in_a_real_browser(page, tmp_path):
    dom = opened(page.replace("<details>", "<details open>"), tmp_path)  # folded pictures are drawn when opened
    assert dom.count("<svg") >= len(KINDS)
    assert all(f'data-chart{number}="drawn"' in dom for number in range(len(KINDS)))
