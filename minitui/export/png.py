"""An SVG of the application as PNG, by a headless Chromium: other converters misplace Textual's spaces and corners."""

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
)  # fmt: skip
PATIENCE_S = 120
NO_BROWSER = (
    "a PNG is drawn by a headless Chromium, and no chromium, google-chrome or microsoft-edge is on the PATH: install "
    "one, or use --export svg, which every browser opens"
)


def find_browser() -> str | None:
    """The first Chromium that this machine has."""
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


def write_png(svg: str, path: Path, browser: str | None = None, scale: float = 1.5) -> Path:
    """Draw `svg` into `path`, `scale` device pixels to a unit of the SVG. TraceError without a Chromium."""
    browser = browser or find_browser()
    if browser is None:
        raise TraceError(NO_BROWSER)
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    if box is None:
        raise TraceError(f"{path} cannot be drawn: the SVG has no viewBox")
    if not path.parent.is_dir():
        raise TraceError(f"{path} cannot be written: there is no directory {path.parent}; name another file with --out")
    width, height = (int(float(n)) + 1 for n in box.groups())
    style = "body{margin:0;background:transparent}svg{display:block}"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # the browser may still be tidying up
        page, drawn = Path(folder) / "page.html", Path(folder) / "page.png"
        page.write_text(f"<meta charset='utf-8'><style>{style}</style>{svg}", encoding="utf-8")
        command = [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}",
            "--default-background-color=00000000", f"--force-device-scale-factor={scale:g}",
            f"--window-size={width},{height}", f"--screenshot={drawn}", page.as_uri(),
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, timeout=PATIENCE_S, text=True, errors="replace")
        except (OSError, subprocess.TimeoutExpired) as error:
            raise TraceError(f"{browser} drew no picture: {error}; use --export svg instead") from None
        if not drawn.is_file():
            said = (done.stderr.strip() or "it said nothing").splitlines()[-1]
            raise TraceError(
                f"{browser} drew no picture (exit code {done.returncode}: {said}); use --export svg instead"
            )
        try:
            shutil.copyfile(drawn, path)
        except OSError as error:
            raise TraceError(f"{path} cannot be written: {error.strerror}; name another file with --out") from None
    return path
