"""Opens a page in a real headless Chromium and gives back what has become of it, script errors included."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--virtual-time-budget=20000",
)  # fmt: skip


def opened(page: str, folder: Path) -> str:
    """The page's document after its scripts have run; skips, with a reason, where there is no browser."""
    browser = next((found for name in NAMES if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip("no chromium on this machine")
    file = folder / "page.html"
    listen = "<script>addEventListener('error', (e) => { document.title = 'ERROR ' + e.message; });</script>"
    file.write_text(page.replace("<body>", f"<body>{listen}", 1))  # first: script errors are written down
    words = [*QUIET, f"--user-data-dir={folder / 'profile'}", "--dump-dom", file.as_uri()]
    dom = subprocess.run([browser, *words], capture_output=True, text=True, timeout=100, check=True).stdout
    assert "<title>ERROR" not in dom, dom[dom.index("<title>ERROR") :][:300]
    assert ">The picture cannot be drawn" not in dom
    return dom
