"""`import sparsekv`: the public names, which are imported when they are used."""

import subprocess
import sys

import pytest

import sparsekv
from sparsekv.formats.errors import UsageError
from sparsekv.runtime.api import open_index


def test_every_public_name_is_there() -> None:
    assert all(getattr(sparsekv, name) is not None for name in sparsekv.__all__)
    assert set(sparsekv.__all__) <= set(dir(sparsekv))
    assert sparsekv.open_index is open_index
    assert sparsekv.UsageError is UsageError
    assert "codes" in sparsekv.methods()


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'opne_index'"):
        _ = sparsekv.opne_index


def test_the_import_takes_neither_torch_nor_transformers() -> None:
    check = "import sys, sparsekv; sparsekv.UsageError; print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout == "set()\n"
