"""The wheel: what it holds, and that the package installed from it works away from the repository."""

import shutil
import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOP = ("cli", "indexing", "runtime", "kernels", "formats")


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the sources, so that nothing an earlier build left behind can get in."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE", "__init__.py", "py.typed"):
        shutil.copy(ROOT / name, source)
    for package in (*TOP, "tests"):
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(built), str(source))
    return next(built.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    pip("install", "--no-deps", "--target", str(folder), str(wheel))
    return folder


def test_the_wheel_holds_the_packages_and_nothing_beside_them(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = {path.relative_to(ROOT) for package in TOP for path in (ROOT / package).rglob("*.py")}
    assets = {path.relative_to(ROOT) for path in (ROOT / "cli/pages/assets").iterdir()}
    assert names == {f"sparsekv/{path}" for path in files | assets} | {"sparsekv/__init__.py", "sparsekv/py.typed"}
    assert {path.suffix for path in assets} == {".css", ".js"}
    assert {path.parent / "__init__.py" for path in files} <= files


def test_the_wheel_names_its_command_its_licence_and_what_it_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        texts = {name.split(".dist-info/")[1]: name for name in archive.namelist() if ".dist-info/" in name}
        metadata = message_from_string(archive.read(texts["METADATA"]).decode())
        assert archive.read(texts["entry_points.txt"]).decode().split() == [
            "[console_scripts]",
            "sparsekv",
            "=",
            "sparsekv.cli.main:main",
        ]
        assert archive.read(texts["licenses/LICENSE"]) == (ROOT / "LICENSE").read_bytes()
    assert (metadata["License-Expression"], metadata["Requires-Python"]) == ("Apache-2.0", ">=3.11")
    assert {"torch>=2.11", "transformers>=5.17"} <= set(metadata.get_all("Requires-Dist", []))


def test_the_installed_package_imports_and_its_command_runs(installed: Path, tmp_path: Path) -> None:
    check = (
        f"import sys; sys.path.insert(0, {str(installed)!r})\n"
        "import sparsekv.cli.main\n"
        "from sparsekv.indexing.indexers.interface import indexers\n"
        "from sparsekv.runtime.selection.registry import methods\n"
        "found = (*indexers().values(), *methods().values())\n"
        "modules = [sparsekv.cli.main, *(sys.modules[type_.__module__] for type_ in found)]\n"
        "print(*(module.__file__ for module in modules), sep='\\n')\n"
        "sys.argv = ['sparsekv', '--version']\n"
        "sparsekv.cli.main.run()\n"
    )
    done = subprocess.run([sys.executable, "-c", check], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *files, version = done.stdout.splitlines()
    assert len(files) > 3
    assert all(Path(file).is_relative_to(installed) for file in files)
    assert version.startswith("sparsekv ")


def test_nothing_lands_beside_the_package_in_site_packages(installed: Path) -> None:
    found = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert found == {"sparsekv", "bin"}
