"""Converts an SVG picture of the application to PNG with a headless Chromium.

Other converters draw spaces and corners of Textual's SVG in the wrong places.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from minitui.trace.reader import TraceError

BROWSERS = (
    "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)
PATIENCE_S = 120  # seconds to wait for the browser
NO_BROWSER = (
    "PNG export needs Chromium, Google Chrome or Microsoft Edge, and none is on the PATH: install one, or use "
    "--export svg"
)


def find_browser() -> str | None:
    """Returns the first installed Chromium-based browser, or None."""
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


def write_png(svg: str, path: Path, browser: str | None = None, scale: float = 1.5) -> Path:
    """Draw `svg` with `scale` pixels per SVG unit, write the PNG to `path`, and return `path`.

    Raises TraceError if no browser is found, or if drawing or writing fails.
    """
    browser = browser or find_browser()
    if browser is None:
        raise TraceError(NO_BROWSER)
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    if box is None:
        raise TraceError(f"{path} cannot be written: the SVG has no viewBox")
    if not path.parent.is_dir():
        missing = f"the directory {path.parent} does not exist"
        raise TraceError(f"{path} cannot be written: {missing}; name another file with --out")
    width, height = (int(float(n)) + 1 for n in box.groups())
    style = "body{margin:0;background:transparent}svg{display:block}"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # an open browser may add files
        page, drawn = Path(folder) / "page.html", Path(folder) / "page.png"
        page.write_text(f"<meta charset='utf-8'><style>{style}</style>{svg}", encoding="utf-8")
        command = [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}",
            "--default-background-color=00000000", f"--force-device-scale-factor={scale:g}",
            f"--window-size={width},{height}", f"--screenshot={drawn}", page.as_uri(),
        ]
        try:
            done = subprocess.run(command, capture_output=True, timeout=PATIENCE_S, text=True, errors="replace")
        except (OSError, subprocess.TimeoutExpired) as error:
            raise TraceError(f"{browser} could not draw the picture: {error}; use --export svg instead") from None
        if not drawn.is_file():
            message = (done.stderr.strip() or "no message").splitlines()[-1]
            raise TraceError(
                f"{browser} could not draw the picture (exit code {done.returncode}: {message}); "
                "use --export svg instead"
            )
        try:
            shutil.copyfile(drawn, path)
        except OSError as error:
            raise TraceError(f"{path} cannot be written: {error.strerror}; name another file with --out") from None
    return path
