"""`import sparsekv`: the public names, which are imported when they are used."""

import subprocess
import sys
from pathlib import Path

import pytest

import sparsekv
from sparsekv.formats import errors
from sparsekv.runtime.api import open_index


def test_every_public_name_is_there() -> None:
    assert all(getattr(sparsekv, name) is not None for name in sparsekv.__all__)
    assert set(sparsekv.__all__) <= set(dir(sparsekv))
    assert sparsekv.open_index is open_index
    own = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert own <= set(sparsekv.__all__)
    assert all(getattr(sparsekv, name) is getattr(errors, name) for name in own)
    assert "codes" in sparsekv.methods()


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'opne_index'"):
        _ = sparsekv.opne_index


def test_the_import_takes_neither_torch_nor_transformers() -> None:
    check = "import sys, sparsekv; sparsekv.UsageError; print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_help_waits_for_no_module_that_only_documents_need() -> None:
    check = "import sys, sparsekv.cli.app; print({'mammoth', 'pypdf', 'urllib.request'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_help_waits_for_torch_only_with_methods_and_never_for_transformers() -> None:
    """Modules of commands are imported for `--help`. Torch takes a second, and transformers two more."""
    check = (
        "import sys, importlib, sparsekv.cli.app as app\n"
        "light = ['completion', 'config', 'models', 'serve', 'start', 'stop']\n"
        "for name in [*light, *sorted(app.COMMANDS.keys() - {*light})]:\n"
        "    importlib.import_module('sparsekv.cli.' + name.replace('-', '_'))\n"
        "    assert not {'transformers', *(['torch'] if name in light else [])} & sys.modules.keys(), name"
    )
    subprocess.run([sys.executable, "-c", check], check=True)


def test_the_repository_is_imported_under_one_name() -> None:
    """Pytest would import the root's `__init__.py` under the checkout's name, if it took the root for a package."""
    root = Path(sparsekv.__file__).parent.resolve()
    folders = ("cli", "indexing", "runtime", "kernels", "formats")
    ours = {root / "__init__.py", *(path for folder in folders for path in (root / folder).rglob("*.py"))}
    loaded = {name for name, module in [*sys.modules.items()] if _file(module) in ours}
    assert "sparsekv" in loaded
    assert {name for name in loaded if name.partition(".")[0] != "sparsekv"} == set()


def _file(module: object) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if isinstance(file, str) else None
