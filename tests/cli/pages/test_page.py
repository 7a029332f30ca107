"""A page is one file that may load and run nothing but its own, whatever its data says."""

from pathlib import Path

import pytest
from support.html_page import HOSTILE, WrittenPage, source_of

from sparsekv.cli.common.streams import printable
from sparsekv.cli.pages import page as pages
from sparsekv.cli.pages.page import Page, refuse_unwritable_page, write_page
from sparsekv.formats.errors import SparsekvError, UsageError

ELEMENTS = ["html", "head", "meta", "meta", "meta", "meta", "title", "style", "body", "noscript", "script", "script"]


def written(path: Path, title: str, data: object) -> WrittenPage:
    size = write_page(Page(title, data, (), ()), path, "--html")
    assert size == path.stat().st_size
    return WrittenPage(path)


def test_a_page_is_one_file_without_references(tmp_path: Path) -> None:
    page = written(tmp_path / "page.html", "A page", {"a": [1, 2.5, None]})
    assert [one.tag for one in page.elements] == ELEMENTS
    assert page.references() == []
    assert page.data() == {"a": [1, 2.5, None]}
    assert list(tmp_path.iterdir()) == [tmp_path / "page.html"]


def test_the_policy_allows_exactly_the_script_and_the_style_of_the_page(tmp_path: Path) -> None:
    page = written(tmp_path / "page.html", "A page", None)
    assert page.policy() == {
        "default-src": ["'none'"],
        "script-src": [source_of(page.script())],
        "style-src": [source_of(page.only("style").text)],
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
    }


@pytest.mark.parametrize("text", HOSTILE)
def test_text_of_title_and_data_stays_text(tmp_path: Path, text: str) -> None:
    page = written(tmp_path / "page.html", text, {text: [text, text + "</script", "<!--"]})
    assert [one.tag for one in page.elements] == ELEMENTS
    assert page.comments == [" a page of sparsekv "]
    assert page.data() == {text: [text, text + "</script", "<!--"]}
    assert page.only("title").text == printable(" ".join(text.split()))


def test_text_that_is_no_unicode_is_written(tmp_path: Path) -> None:
    assert written(tmp_path / "page.html", "a\udcff", ["b\udcff"]).data() == ["b\udcff"]


@pytest.mark.parametrize("name", [path.name for path in sorted(pages.ASSETS.iterdir())])
def test_assets_are_short_and_cannot_end_their_element(name: str) -> None:
    text = (pages.ASSETS / name).read_text(encoding="utf-8")
    assert "\r" not in text
    assert not any(end in text.lower() for end in ("</s", "<!--", "<script"))
    assert "innerHTML" not in text
    assert len(text.splitlines()) <= 250


def test_a_page_takes_the_place_of_an_older_one_and_of_nothing_else(tmp_path: Path) -> None:
    path, other = tmp_path / "page.html", tmp_path / "mine.html"
    written(path, "old", 1)
    assert written(path, "new", 2).data() == 2
    other.write_text("<!DOCTYPE html><p>mine")
    with pytest.raises(
        SparsekvError, match=r"mine\.html exists and is not a page of sparsekv; give --html another name"
    ):
        written(other, "new", 2)
    assert other.read_text() == "<!DOCTYPE html><p>mine"
    with pytest.raises(SparsekvError, match="not a page of sparsekv"):
        write_page(Page("", None, (), ()), Path("/dev/null"), "--html")


def test_a_link_to_a_page_stays_a_link(tmp_path: Path) -> None:
    written(tmp_path / "page.html", "old", 1)
    (tmp_path / "link.html").symlink_to("page.html")
    written(tmp_path / "link.html", "new", 2)
    assert (tmp_path / "link.html").is_symlink()
    assert WrittenPage(tmp_path / "page.html").data() == 2


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("none/page.html", "the folder to write it in does not exist"),
        (".", "is a folder"),
        ("x" * 252 + ".html", "the name is too long"),
    ],
)
def test_a_name_that_is_not_possible_is_refused(tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(UsageError, match=f"--html .*{says}"):
        refuse_unwritable_page(tmp_path / name, "--html")


def test_a_page_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(SparsekvError, match=r"cannot write the page /proc/page\.html: .*; give --html another name"):
        write_page(Page("", None, (), ()), Path("/proc/page.html"), "--html")
