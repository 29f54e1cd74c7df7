"""Converts an SVG picture to PNG, and a page to PDF, with a headless Chromium. Other converters draw spaces and corners
of Textual's SVG in the wrong places."""

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
OUTPUTS = {"png": "--screenshot", "pdf": "--print-to-pdf"}  # kind of file -> the browser's option for it
PATIENCE_S = 120  # seconds to wait for the browser
NEEDED = "needs Chromium, Google Chrome or Microsoft Edge, and none is on the PATH: install one, or"
NO_BROWSER = f"PNG export {NEEDED} use --export svg"


def find_browser() -> str | None:
    """Returns the first installed Chromium-based browser, or None."""
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


def write_png(svg: str, path: Path, browser: str | None = None, scale: float = 1.5) -> Path:
    """Draw `svg` with `scale` pixels per SVG unit, write the PNG to `path`, and return `path`. Raises TraceError if no
    browser is found, or if drawing or writing fails."""
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
    options = (
        "--hide-scrollbars", "--default-background-color=00000000", f"--force-device-scale-factor={scale:g}",
        f"--window-size={width},{height}",
    )
    page = f"<meta charset='utf-8'><style>{style}</style>{svg}"
    instead, elsewhere = "use --export svg instead", "name another file with --out"
    return _draw(browser, page, "png", path, options, instead, elsewhere)


def write_pdf(page: str, path: Path) -> Path:
    """Write an HTML page to `path` as PDF, with an outline; returns `path`. Raises TraceError as `write_png` does."""
    browser = find_browser()
    if browser is None:
        raise TraceError(f"PDF {NEEDED} name a file that ends with .html")
    options = ("--no-pdf-header-footer", "--generate-pdf-document-outline")
    way_out = "name a file that ends with .html instead"
    return _draw(browser, page, "pdf", path, options, way_out, "name another file")


def _draw(
    browser: str, page: str, kind: str, path: Path, options: tuple[str, ...], instead: str, elsewhere: str
) -> Path:
    """Let the browser draw a page to `path`, as one of OUTPUTS. `instead`, `elsewhere`: the ways out if the page cannot
    be drawn, and if the file cannot be written."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # an open browser may add files
        source, drawn = Path(folder) / "page.html", Path(folder) / f"drawn.{kind}"
        source.write_text(page, encoding="utf-8")
        command = [
            browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}", *options,
            f"{OUTPUTS[kind]}={drawn}", source.as_uri(),
        ]
        try:
            done = subprocess.run(command, capture_output=True, timeout=PATIENCE_S, text=True, errors="replace")
        except (OSError, subprocess.TimeoutExpired) as error:
            raise TraceError(f"{browser} could not draw the picture: {error}; {instead}") from None
        if not drawn.is_file():
            message = (done.stderr.strip() or "no message").splitlines()[-1]
            why = f"exit code {done.returncode}: {message}"
            raise TraceError(f"{browser} could not draw the picture ({why}); {instead}")
        try:
            shutil.copyfile(drawn, path)
        except OSError as error:
            raise TraceError(f"{path} cannot be written: {error.strerror}; {elsewhere}") from None
    return path
