"""The wheel and the editable install: what they hold, and that both work in a folder outside the repository."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
from support.command import run_here
from support.doc_pages import blocks
from support.tiny_models import save_tiny

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "how-to" / "python.md"
TOP = ("cli", "indexing", "runtime", "kernels", "formats")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, capture_output=True, text=True)


def python(installed: Path, code: str, cwd: Path) -> list[str]:
    """Lines printed by a program that finds `sparsekv` in one folder, and its dependencies where this process does.

    With -S Python skips the .pth files of site-packages, which would install the repository's own import hook.
    """
    needed = [path for path in sys.path if path.endswith("-packages")]
    paths = f"import site, sys\nsite.addsitedir({str(installed)!r})\nsys.path += {needed!r}\n"
    command = [sys.executable, "-S", "-c", paths + code]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, so that nothing an earlier build left behind can get in."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE", "__init__.py", "py.typed"):
        shutil.copy(ROOT / name, source)
    for folder in (*TOP, "tests", "docs"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return source


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(built), str(source))
    return next(built.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    pip("install", "--no-deps", "--target", str(folder), str(wheel))
    return folder


@pytest.fixture(scope="module")
def editable(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("editable")
    pip("install", "--no-deps", "--no-build-isolation", "--target", str(folder), "--editable", str(source))
    return folder


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page's index, of a tiny model."""
    folder = tmp_path_factory.mktemp("indexed")
    save_tiny(folder / "model")
    (folder / "manual.txt").write_text("A word and another. " * 40, encoding="utf-8")
    built = run_here("build-index", folder / "manual.txt", "--model", folder / "model", "-q")
    assert built.code == 0, built.stderr
    return folder


def test_the_wheel_holds_the_packages_and_nothing_beside_them(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = {path.relative_to(ROOT) for package in TOP for path in (ROOT / package).rglob("*.py")}
    assets = {path.relative_to(ROOT) for path in (ROOT / "cli/pages/assets").iterdir()}
    assert names == {f"sparsekv/{path}" for path in files | assets} | {"sparsekv/__init__.py", "sparsekv/py.typed"}
    assert {path.suffix for path in assets} == {".css", ".js"}
    assert {path.parent / "__init__.py" for path in files} <= files


def test_the_wheel_names_its_command_its_plugin_its_licence_and_what_it_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        texts = {name.split(".dist-info/")[1]: name for name in archive.namelist() if ".dist-info/" in name}
        metadata = message_from_string(archive.read(texts["METADATA"]).decode())
        assert archive.read(texts["entry_points.txt"]).decode().split() == [
            "[console_scripts]",
            "sparsekv",
            "=",
            "sparsekv.cli.main:main",
            "[vllm.general_plugins]",
            "sparsekv",
            "=",
            "sparsekv.runtime.vllm.plugin:register",
        ]
        assert archive.read(texts["licenses/LICENSE"]) == (ROOT / "LICENSE").read_bytes()
    assert (metadata["License-Expression"], metadata["Requires-Python"]) == ("Apache-2.0", ">=3.11")
    assert {"torch>=2.11", "transformers>=5.17"} <= set(metadata.get_all("Requires-Dist", []))


def test_the_installed_package_imports_and_its_command_runs(installed: Path, tmp_path: Path) -> None:
    code = (
        "import sparsekv.cli.main\n"
        "from sparsekv.indexing.indexers.interface import indexers\n"
        "from sparsekv.runtime.selection.registry import methods\n"
        "found = (*indexers().values(), *methods().values())\n"
        "modules = [sparsekv.cli.main, *(sys.modules[type_.__module__] for type_ in found)]\n"
        "print(*(module.__file__ for module in modules), sep='\\n')\n"
        "sys.argv = ['sparsekv', '--version']\n"
        "sparsekv.cli.main.run()\n"
    )
    *files, version = python(installed, code, tmp_path)
    assert len(files) > 3
    assert all(Path(file).is_relative_to(installed) for file in files)
    assert version.startswith("sparsekv ")


@pytest.mark.parametrize(
    ("install", "found"), [("installed", "installed"), pytest.param("editable", "source", marks=pytest.mark.slow)]
)
def test_the_pages_example_runs(install: str, found: str, indexed: Path, request: pytest.FixtureRequest) -> None:
    folder, package = request.getfixturevalue(install), request.getfixturevalue(found)
    example = "".join(block.text for block in blocks(PAGE) if block.info == "python")
    # As an install without the extra `cpu`: each would compile the decode step for itself.
    without = "sys.modules['numba'] = None\n"
    code = f"{without}{example}\nprint(sparsekv.__version__, sparsekv.__file__, sep='\\n')\n"
    *answers, version, file = python(folder, code, indexed)
    assert any(line.startswith("read ") for line in answers)
    assert version == PROJECT["version"]
    assert Path(file).is_relative_to(package)


def test_an_editable_install_finds_a_new_file(editable: Path, source: Path, tmp_path: Path) -> None:
    file = source / "runtime" / "selection" / "later.py"
    file.write_text("LATER = 1\n", encoding="utf-8")
    try:
        code = "from sparsekv.runtime.selection import later; print(later.LATER, later.__file__)"
        assert python(editable, code, tmp_path) == [f"1 {file}"]
    finally:
        file.unlink()


def test_nothing_lands_beside_the_package_in_site_packages(installed: Path) -> None:
    found = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert found == {"sparsekv", "bin"}
