"""A page in a real browser, without a window."""

import shutil
import subprocess

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
needs_browser = pytest.mark.skipif(not BROWSER, reason="no chromium or google-chrome is installed")


def opened(page, tmp_path, *flags):
    """Return a page's document after a browser has run its scripts."""
    file = tmp_path / "page.html"
    file.write_text(page, encoding="utf-8")
    quiet = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run")
    own = (f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=3000", "--dump-dom")
    done = subprocess.run(
        [BROWSER, *quiet, *own, *flags, file.as_uri()],
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert "</html>" in done.stdout, done.stderr[-2000:]
    return done.stdout
