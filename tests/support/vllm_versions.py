"""Runs the tests that need vLLM against several versions of it, on a machine without a GPU.

    python -m tests.support.vllm_versions [--keep DIRECTORY] 0.25.1 0.33.0

For each version, a virtual environment of its own gets the Python files of vLLM's wheel and what they import; all other
packages, torch too, are those of this environment. Then pip resolves the requirements of that version, as it would on a
machine with a GPU: `pip install --no-deps minitui` must find there all that the recorder and its watcher import.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = [f"tests/vllm/test_{name}.py" for name in ("scheduler", "kv_events", "groups", "worker")]
FILES = (".py", ".json", ".jinja", ".txt", ".yaml", "METADATA", "RECORD", "WHEEL")  # of the wheel; no compiled code
OPTIONAL = {"orjson"}  # FastAPI imports it if it is there
PROBED = "tests.support.vllm_driver, vllm.model_executor.models.qwen3, vllm.tool_parsers.utils"
MOST_MISSING = 80  # packages that are installed one after another
PLATFORMS = [f"manylinux{version}_x86_64" for version in ("_2_35", "_2_34", "_2_31", "_2_28", "_2_17", "1")]
IMPORTS = """
import json, sys
before = set(sys.modules)
import minitui.vllm.watcher, minitui.trace.recorder
print(json.dumps(sorted({name.split(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names))))
"""
MISSING = re.compile(r"No module named '(\w+)")


def run(*words: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Returns the ended process, with its output as text. `check`: raises if it failed."""
    return subprocess.run([str(word) for word in words], cwd=ROOT, capture_output=True, text=True, check=check)


def resolved(*what: object) -> list[str]:
    """Returns what pip would install, as "name==version"."""
    pip = "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"
    report = run(sys.executable, *pip, *what)
    found = [item["metadata"] for item in json.loads(report.stdout)["install"]]
    return [f"{_plain(each['name'])}=={each['version']}" for each in found]


def install(version: str, place: Path, required: list[str]) -> Path:
    """Makes the environment of a version; returns its Python. `required`: what an installation of vLLM brings."""
    run(sys.executable, "-m", "venv", place)
    python = place / "bin" / "python"
    site = next((place / "lib").glob("python*")) / "site-packages"
    (site / "zz_others.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    run(python, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", place / "wheel",
        *(f"--platform={name}" for name in PLATFORMS), f"vllm=={version}")
    [wheel] = (place / "wheel").glob("vllm-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site, [name for name in archive.namelist() if name.endswith(FILES)])
    wheel.unlink()
    tried = set()
    for _ in range(MOST_MISSING):
        probe = run(python, "-c", f"import {PROBED}", check=False)
        found = MISSING.search(probe.stderr.strip().rpartition("\n")[2])
        if found is None or found[1] in tried:
            break
        tried.add(found[1])
        same = re.compile(r"^(\w+-)?" + found[1].replace("_", "[-_.]") + r"\b", re.I)  # py-cpuinfo, apache-tvm-ffi
        wanted = next((each for each in required if same.match(each)), found[1])
        run(python, "-m", "pip", "install", "--quiet", "--no-deps", wanted)
    return python


def packages_of(modules: list[str]) -> set[str]:
    """Returns the names of the packages of these modules, without minitui."""
    owners = packages_distributions()
    return {_plain(owner) for name in modules for owner in owners.get(name, ())} - {"minitui"}


def not_found(vllm: list[str]) -> list[str]:
    """Returns the packages that the recorder imports and that an installation of vLLM does not bring; also textual or
    torch, if `pip install --no-deps minitui` would bring one of them."""
    needed = packages_of(json.loads(run(sys.executable, "-c", IMPORTS).stdout)) - OPTIONAL
    brought, ours = ({each.partition("==")[0] for each in found} for found in (vllm, resolved("--no-deps", ROOT)))
    return sorted(needed - brought) + sorted(ours - {"minitui"})


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    """Print one line for each version."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="a directory for the environments; the next run uses them again")
    parser.add_argument("versions", nargs="+")
    options = parser.parse_args()
    failed = False
    for version in options.versions:
        with tempfile.TemporaryDirectory() as directory:
            place = (options.keep or Path(directory)) / f"vllm-{version}"
            required = resolved("--only-binary=:all:", f"vllm=={version}")
            python = place / "bin" / "python" if place.exists() else install(version, place, required)
            tests = [name for name in TESTS if (ROOT / name).exists()]
            ended = run(python, "-m", "pytest", "-q", "-n", "0", "-rf", *tests, check=False)
            missing = not_found(required)
        failed |= bool(ended.returncode or missing)
        lines = ended.stdout.strip().splitlines() or ended.stderr.strip().splitlines()
        print(f"vLLM {version}: {lines[-1]}", *(line for line in lines if line.startswith("FAILED")), sep="\n    ")
        print(
            "    an installation lacks: " + ", ".join(missing) if missing else "    an installation adds only minitui"
        )
    sys.exit(failed)


if __name__ == "__main__":
    main()
