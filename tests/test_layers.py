"""Who may import whom, read from the source: imports for types alone and imports inside functions count like the
others. An import goes down: to a lower level, or to the same folder. Folders of one level do not know each other, and
no files of a folder import each other in a circle. A file at the top of a package is a folder of its own here."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache

import pytest

from tests.support.paths import ROOT

ENGINE_LEVELS = (
    ("errors", "progress"),
    ("fields", "profiler", "groups"),
    ("files", "disk_cache", "parameters"),
    ("params", "kernels", "trace", "eos"),
    ("config", "sampling_params"),
    ("options", "info"),
    ("core", "attention"),
    ("model", "text", "metrics"),
    ("parallel",),
    ("worker", "gguf"),
    ("hub",),
    ("prompts",),
    ("build", "outputs"),
    ("llm_engine", "beam_search", "process"),
    ("llm", "async_llm"),
)
MINITUI_LEVELS = (
    ("sampling",),
    ("text", "visible", "lifeline", "protocol", "settings", "tutor"),
    ("progress", "goals"),
    ("trace",),
    ("sources", "server"),
    ("chat", "viewmodel", "web", "vllm"),
    ("teaching", "whatif"),
    ("prefix", "exercises"),
    ("tui",),
    ("export",),
    ("bench",),
    ("cli",),
    ("dev",),
)
VIEWMODEL_LEVELS = (("state",), ("history",), ("explain",), ("words", "compare"))  # the files beside them: any level
LEVELS = {"engine": ENGINE_LEVELS, "minitui": MINITUI_LEVELS}
LEVEL_OF = {
    (package, folder): level
    for package, levels in LEVELS.items()
    for level, folders in enumerate(levels)
    for folder in folders
}
KERNELS_NEED = {"torch", "triton", "numpy", "llvmlite", "engine.kernels", "engine.disk_cache"}


PRODUCT = ("minitui", "textual", "rich", "typer", "fastapi", "uvicorn")
ENGINE = ("engine", "engine.process.client", "engine.core.engine", "engine.build", "engine.process.server")
ENGINE_WITH_TORCH = ("engine.llm", "engine.worker.runner")
NO_TEXTUAL = (
    "sources.local", "chat.sessions", "chat.store", "settings", "viewmodel.updater", "viewmodel.view",
    "teaching.scenarios", "cli.ask", "chat.model_choice", "trace.reader",
)
NO_TORCH = (
    "minitui.tui.apps.app", "minitui.cli.main", "minitui.cli.launch", "engine.process.client", "engine.text.tokenizer",
)


@cache  # seconds: in the first test that asks, not while tests are collected
def modules() -> dict[str, ast.Module]:
    """Dotted name -> syntax tree, of every module of both packages."""
    found = {}
    for package in LEVELS:
        for path in (ROOT / package).rglob("*.py"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


@cache
def imports_of() -> dict[str, set[str]]:
    """Dotted name -> what the module imports, of every module of both packages."""
    return {name: set(imported(tree)) - {name} for name, tree in modules().items()}


def imported(tree: ast.Module) -> Iterator[str]:
    """Every module that is imported anywhere in the tree: ours by their own names, others by their top-level ones."""
    known = modules()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: an import is written with its whole name"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            while name not in known and "." in name:
                name = name.rpartition(".")[0]
            yield name


def folder_of(module: str) -> tuple[str, str]:
    """("engine", "core") of engine.core.radix; ("engine", "") of engine itself."""
    package, _, rest = module.partition(".")
    return package, rest.partition(".")[0]


def ours(module: str) -> bool:
    return module.partition(".")[0] in LEVELS


@pytest.mark.parametrize("package", LEVELS)
def test_imports_go_down(package):
    """The package's own __init__ and __main__ stand above all folders."""
    upward = []
    for module, needs in imports_of().items():
        here, folder = folder_of(module)
        if here != package or folder in ("", "__main__"):
            continue
        assert (here, folder) in LEVEL_OF, f"{module} has no level: give its folder one in this file"
        for target in filter(ours, needs):
            there = folder_of(target)
            if there == (here, folder) or (there[0] == "engine" and here == "minitui") or there == (package, ""):
                continue
            if there[0] != here or LEVEL_OF.get(there, 99) >= LEVEL_OF[here, folder]:
                upward.append(f"{module} imports {target}")
    assert not upward


def test_a_part_of_the_view_model_imports_no_part_above_it():
    level = {f"minitui.viewmodel.{part}": n for n, parts in enumerate(VIEWMODEL_LEVELS) for part in parts}
    for module, needs in imports_of().items():
        if (here := module.rpartition(".")[0]) in level:
            above = [need for need in needs if level.get(need.rpartition(".")[0], -1) > level[here]]
            assert not above, f"{module} imports {above}"


def test_no_files_import_each_other_in_a_circle():
    """Depth-first over the imports: a module met again while its own imports are walked closes a circle."""
    needs = imports_of()
    done: set[str] = set()
    path: list[str] = []

    def walk(module: str) -> None:
        if module in path:
            pytest.fail(" imports ".join([*path[path.index(module) :], module]))
        if module in done:
            return
        path.append(module)
        for target in sorted(needs[module] & needs.keys()):
            walk(target)
        done.add(path.pop())

    for module in sorted(needs):
        walk(module)


def test_scheduling_needs_no_torch_and_kernels_nothing_but_torch_and_triton():
    for module, needs in imports_of().items():
        folder = folder_of(module)
        if folder == ("engine", "core"):
            assert not needs & {"torch", "triton"}, module
        if folder == ("engine", "kernels"):
            others = {need for need in needs if need.partition(".")[0] not in sys.stdlib_module_names}
            assert all(need.startswith(tuple(KERNELS_NEED)) for need in others), f"{module}: {others}"


def test_every_folder_says_in_one_line_what_it_is_for():
    for module, tree in modules().items():
        if (ROOT / module.replace(".", "/") / "__init__.py").is_file():
            said = ast.get_docstring(tree) or ""
            assert said, f"{module} does not say what it is for"


def check(*statements: str) -> dict[str, set[str]]:
    """Top-level names of the modules that a fresh interpreter holds after each of the statements, in their order."""
    code = "import sys\nfor s in sys.argv[1:]:\n exec(s)\n print(*sorted({m.partition('.')[0] for m in sys.modules}))"
    run = subprocess.run([sys.executable, "-c", code, *statements], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return dict(zip(statements, map(set, map(str.split, run.stdout.splitlines())), strict=True))


def imports(modules: Iterable[str]) -> list[str]:
    return [f"import {module}" for module in modules]


def test_the_engine_knows_no_product():
    torch = "from engine.process.startup import import_torch; import_torch()"
    rests = "import gc; assert gc.isenabled() and gc.get_freeze_count() > 10_000"  # what torch is made of is passed by
    for statement, held in check(*imports(ENGINE), torch, rests, *imports(ENGINE_WITH_TORCH)).items():
        assert not held.intersection(PRODUCT), statement


def test_the_part_of_torch_that_is_put_off_is_there_for_whoever_uses_it():
    torch = "from engine.process.startup import import_torch; import_torch(); name = 'torch._meta_registrations'"
    put_off = (
        "assert 'torch._prims' not in sys.modules; "
        "assert not any(known.startswith('meta_') for known in vars(sys.modules[name]))"
    )
    used = "from torch._meta_registrations import meta__add_relu; from torch._subclasses import FakeTensorMode"
    operator = (  # of an extension, as flash-attn's: it imports torch._dynamo, which torch._prims must precede
        "import torch; double = torch.library.custom_op('tests::double', lambda x: 2 * x, mutates_args=(), "
        "schema='(Tensor x) -> Tensor'); assert double(torch.ones(2)).sum() == 4; torch.Generator().manual_seed(1)"
    )
    fake = "FakeTensorMode().__enter__(); import torch; assert torch.ones(2, 3).mT.ndim == 2"
    check(torch, put_off, operator, used, fake)


def test_below_the_screens_nothing_knows_textual():
    for statement, held in check(*imports(f"minitui.{module}" for module in NO_TEXTUAL)).items():
        assert not held.intersection({"textual", "torch"}), statement


def test_the_process_that_draws_never_loads_torch():
    for statement, held in check(*imports(NO_TORCH)).items():
        assert "torch" not in held, statement


def test_the_command_line_loads_no_application_before_it_is_asked_for():
    [held] = check("import minitui.cli.main").values()
    assert not held.intersection({"textual", "torch", "tokenizers", "jinja2"})
