"""A page in a real browser, without a window."""

import os
import shutil
import subprocess

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
# Where the project's checks run, a browser has to be there: a test that is skipped says nothing.
needs_browser = pytest.mark.skipif(
    not BROWSER and not os.environ.get("CI"), reason="no chromium or google-chrome is installed"
)


def opened(page, tmp_path, *flags):
    """Return a page's document after a browser has run its scripts."""
    assert BROWSER, "no chromium or google-chrome is installed, and CI is set; install one"
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
