"""Tests of the methods' parameters in a builder, which decide whether an evaluation may reuse its kept answers."""

from support.small_index import small_plan

from sparsekv.indexing.build import Builder
from sparsekv.indexing.methods.codes import CodesIndexer
from sparsekv.indexing.methods.multipole import MultipoleIndexer
from sparsekv.indexing.plan import BuildConfig


def test_what_a_method_is_built_with_tells_its_revision_from_the_second_on() -> None:
    builder = Builder(small_plan().loaded, BuildConfig({"codes": CodesIndexer(), "multipole": MultipoleIndexer()}), {})
    assert builder.parameters["codes"]["revision"] == CodesIndexer.revision > 1
    assert MultipoleIndexer.revision == 1
    assert "revision" not in builder.parameters["multipole"]
