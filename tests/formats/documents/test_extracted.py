"""Texts of PDF, DOCX and HTML files: complete, readable, and extracted from any bytes within limits."""

import pickle
import random
import re
import subprocess
import sys
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from zipfile import ZipFile

import pytest
from support.odd_documents import SECRET, docx, mutated, paragraph, pdf, shown, valid, write_folder
from support.peak import PEAK

from sparsekv.formats.documents import extracted, extractors, files
from sparsekv.formats.documents.document import open_document, read_document
from sparsekv.formats.documents.extracted import DOCX, HTML, PDF, Extractor, NotExtractedError
from sparsekv.formats.documents.extractors import html_text, tidied
from sparsekv.formats.documents.files import Choice, SourceTexts, read_folder
from sparsekv.formats.errors import UsageError

QUICK = (
    "kids-loop.pdf",
    "xref-loop.pdf",
    "file-outside.pdf",
    "laughs.docx",
    "entity-outside.docx",
    "picture-outside.docx",
)
"""Bombs that take no time. The others are in the slow test."""


LOCKED_PDF = pdf(shown("a"), trailer=b"/Encrypt<</Filter/Standard/V 1/R 2/O(a)/U(b)/P -4>>")


def test_each_kind_is_read_as_a_model_reads_it(tmp_path: Path) -> None:
    for ending, data in valid(7).items():
        (tmp_path / f"a.{ending}").write_bytes(data)
    assert read_document(str(tmp_path / "a.pdf")) == (
        "[Page 1]\nDocument 7 tells of apples and pears.\n\n[Page 2]\nIts second page."
    )
    assert read_document(str(tmp_path / "a.docx")) == "Document 7 tells of apples and pears.\n\ncell | cell"
    assert read_document(str(tmp_path / "a.html")) == (
        "A page\n\n# Title\n\nDocument 7 tells of apples and pears.\n\na | b\n\n- c"
    )
    sources = read_folder(tmp_path, Choice())
    assert [file.text for file in sources.files] == [
        read_document(str(tmp_path / f"a.{end}")) for end in ("docx", "html", "pdf")
    ]


def test_pages_begin_where_the_file_begins_them(tmp_path: Path) -> None:
    """Not where its text looks like the line of a page. A page without text is a page."""
    (tmp_path / "a.pdf").write_bytes(pdf(shown("One."), shown("[Page 9]"), b"", shown("[Page 4] (form feed: \f)")))
    (tmp_path / "b.html").write_text("<p>No\fpages.")
    paged, page = read_folder(tmp_path, Choice()).files
    begins = [*paged.pages, len(paged.text)]
    assert [paged.text[start:stop].split() for start, stop in pairwise(begins)] == [
        ["[Page", "1]", "One."],
        ["[Page", "2]", "[Page", "9]"],
        ["[Page", "3]"],
        ["[Page", "4]", "[Page", "4]", "(form", "feed:", ")"],
    ]
    assert (page.text, page.pages) == ("No pages.", ())
    with open_document(str(tmp_path / "a.pdf"), whole=True) as document:
        assert (document.whole(), document.pages) == (paged.text, paged.pages)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("one <b>two</b>\nthree<p>four<br>five", "one two three\n\nfour\nfive"),
        ("<table><tr><th>a<th>b<tr><td><td>2<tr><td><p>x</p><td><p>y</p></table>z", "a | b\n | 2\nx | y\n\nz"),
        ("<table><tr><td><table><tr><td>in<td>side</table><td>out</table>", "in | side | out"),
        ("<ul><li>a<ul><li>b</ul><li><p>c</p></ul><ol start=3><li>d<li>e</ol>", "- a\n  - b\n- c\n\n3. d\n4. e"),
        ("<h2> A <i>b</i></h2>c", "## A b\n\nc"),
        ("<pre>\ndef f():\n    return 1\n</pre>d", "def f():\n    return 1\n\nd"),
        ("&nbsp;&nbsp;indented &lt;b&gt; 10<sup>6</sup>", "  indented <b> 10^6"),
        ("<script>x()</script><style>y</style><!-- z --><svg><text>w</text></svg>a<img alt='a map'>", "aa map"),
        ("<nav><ul><li>Home</ul></nav>all of the text", "all of the text"),
        ("<nav>most of the text</nav>less", "most of the text\nless"),
        ("<nav>Home<p>a nav that never ends", "Home\n\na nav that never ends"),
        ("<nav><nav>x</nav>y</nav>text", "text"),
        ("<ol><li value=5>a<li>b</ol><ol start=-1><li>c<li>d</ol>", "5. a\n6. b\n\n-1. c\n0. d"),
        ("<ol reversed start=10><li>a<li>b</ol><ol reversed><li>c</ol>", "10. a\n9. b\n\n- c"),
        (
            "<ol type=i start=4><li>a<li value=9>b</ol><ol type=A start=26><li>c<li>d</ol>",
            "iv. a\nix. b\n\nZ. c\nAA. d",
        ),
        ("<table><tr><td rowspan=2>A<td>1<tr><td>2<tr><td>B<td>3</table>", "A | 1\n | 2\nB | 3"),
        ("<table><tr><td>1<td rowspan=2>A<tr><td>2<tr><td>3<td>B</table>", "1 | A\n2\n3 | B"),
        ("<table><tr><td>1<td rowspan=2>2<td>3<tr><td colspan=2>4<tr><td>5<td>6</table>", "1 | 2 | 3\n4\n5 | 6"),
        ("<table><thead><tr><th rowspan=2>a<th>b<tbody><tr><td>1<td>2</table>", "a | b\n1 | 2"),
        ("<table><tr><td colspan=2>all<td>5<tr><td>1<td>2<td>3</table>", "all |  | 5\n1 | 2 | 3"),
        ("<table><tr><td rowspan=2 colspan=2>A<td>1<tr><td>2<nav><tr><td>x</nav></table>", "A |  | 1\n |  | 2"),
        ("<ul><li><input type=checkbox checked>a<li><input type=checkbox> b</ul><input>", "- [x] a\n- [ ] b"),
        ("now <s>90</s> <del><p>85</p></del><s></s>80", "now ~~90~~\n\n~~85~~\n\n80"),
        ("price<s> 10</s> <s> </s>8<s>6 </s>4", "price ~~10~~ 8~~6~~ 4"),
        ("<li><s>a</s><li><s><script>x</script>b</s><s><li>c</s>", "- ~~a~~\n- ~~b~~\n- ~~c~~"),
        ("a token such as </s> ends it<script><s></script></del>", "a token such as ends it"),
        (
            "is <math><semantics><mi>m</mi> <msup><mi>c</mi><mn>2</mn></msup><annotation>mc^2</annotation></math> or",
            "is mc^2 or",
        ),
        (
            "<math><mfrac><mrow><mi>a</mi><mo>+</mo><mn>1</mn></mrow><msqrt><mn>2</mn></msqrt></mfrac></math>",
            "(a+1)/(sqrt(2))",
        ),
        ("<math><msubsup><mi>x</mi><mi>i</mi><mn>2</mn></msubsup><p>a <b>b</b> c", "x_i^2\n\na b c"),
        ("one\vtwo&#x85;three", "one\ntwo…three"),
        ("a <![CDATA[x < y]]> b<![endif]>c", "a x < y bc"),
    ],
)
def test_a_page_is_rendered_without_loss(body: str, text: str) -> None:
    assert tidied(html_text(body)) == text


def test_words_of_a_page_stay_in_order() -> None:
    """A page of random elements around numbered words: all words are in the text, once and in their order."""
    chance = random.Random(0)
    for _ in range(50):
        open_tags: list[str] = []
        body, words = "", [f"w{number}" for number in range(60)]
        for word in words:
            if open_tags and chance.random() < 0.4:
                body += f"</{open_tags.pop()}>"
            else:
                open_tags.append(
                    chance.choice(["p", "div", "td", "tr", "table", "li", "ul", "ol", "h3", "pre", "b", "dd"])
                )
                body += f"<{open_tags[-1]}>"
            body += f" {word} "
        assert [word for word in tidied(html_text(body)).split() if word.startswith("w")] == words


WORD = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'


def _list(number: int, *levels: tuple[int, str, str, str]) -> str:
    """A list of numbering.xml, from the first number, format, text and further properties of each level."""
    made = "".join(
        f'<w:lvl w:ilvl="{level}"><w:start w:val="{start}"/><w:numFmt w:val="{form}"/>{more}<w:lvlText w:val="{text}"/>'
        "</w:lvl>"
        for level, (start, form, text, more) in enumerate(levels)
    )
    return f'<w:abstractNum w:abstractNumId="{number}">{made}</w:abstractNum>'


CLAUSES = (3, "decimal", "Clause %1:", ""), (1, "lowerLetter", "(%2)", "")
HEADINGS = (
    (1, "upperRoman", "%1.", '<w:pStyle w:val="H1"/>'),
    (1, "decimal", "%1.%2", '<w:isLgl/><w:pStyle w:val="H2"/>'),
)
NUMBERING = (
    f"<w:numbering {WORD}>"
    + _list(0, *CLAUSES, (1, "upperRoman", "%1.%2.%3", '<w:lvlRestart w:val="1"/>'))
    + _list(1, *HEADINGS)
    + _list(2, (1, "bullet", "o", ""), (1, "none", "", ""))
    + "".join(f'<w:num w:numId="{one + 1}"><w:abstractNumId w:val="{one}"/></w:num>' for one in range(3))
    + '<w:num w:numId="9"><w:abstractNumId w:val="0"/><w:lvlOverride w:ilvl="0"><w:startOverride w:val="9"/>'
    + "</w:lvlOverride></w:num></w:numbering>"
)
STYLES = f"""<w:styles {WORD}><w:style w:type="paragraph" w:styleId="H1"><w:name w:val="heading 1"/><w:pPr>
<w:numPr><w:numId w:val="2"/></w:numPr></w:pPr></w:style><w:style w:type="paragraph" w:styleId="H2">
<w:name w:val="heading 2"/><w:basedOn w:val="H1"/><w:pPr><w:numPr><w:ilvl w:val="1"/></w:numPr></w:pPr></w:style>
</w:styles>"""


def _item(text: str, level: int = 0, instance: int = 1, mark: str = "") -> str:
    numbered = f'<w:numPr><w:ilvl w:val="{level}"/><w:numId w:val="{instance}"/></w:numPr><w:rPr>{mark}</w:rPr>'
    return paragraph(text).replace("<w:p>", f"<w:p><w:pPr>{numbered}</w:pPr>")


def _styled(text: str, style: str, more: str = "") -> str:
    return paragraph(text).replace("<w:p>", f'<w:p><w:pPr><w:pStyle w:val="{style}"/>{more}</w:pPr>')


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (_item("a") + _item("b") + paragraph("c") + _item("d"), "Clause 3: a\nClause 4: b\n\nc\n\nClause 5: d"),
        (
            _item("a") + _item("b", 1) + _item("c", 1) + _item("d") + _item("e", 1),
            "Clause 3: a\n  (a) b\n  (b) c\nClause 4: d\n  (a) e",
        ),
        (
            _item("a") + _item("b", 1) + _item("c", 2) + _item("d", 1) + _item("e", 2) + _item("f") + _item("g", 1),
            "Clause 3: a\n  (a) b\n    3.a.I c\n  (b) d\n    3.b.II e\nClause 4: f\n  (a) g",
        ),
        (_item("a", 0, 3) + _item("b", 1, 3) + _item("c"), "- a\n  b\n\nClause 3: c"),
        (_item("a") + _item("b", instance=9) + _item("c", instance=9), "Clause 3: a\nClause 9: b\nClause 10: c"),
        (_item("", mark="<w:del/>") + _item("b"), "Clause 3: b"),
        (_item("a ", mark="<w:del/>") + _item("b") + _item("c"), "Clause 3: a b\nClause 4: c"),
        (_item("a ", mark="<w:del/>") + paragraph("b") + _item("c"), "a b\n\nClause 3: c"),
        (_styled("a", "H1") + _styled("b", "H2") + _styled("c", "H1"), "# I. a\n\n## 1.1 b\n\n# II. c"),
        (_styled("a", "H1", '<w:numPr><w:numId w:val="0"/></w:numPr>'), "# a"),
    ],
)
def test_paragraphs_have_the_numbers_that_a_reader_sees(body: str, text: str) -> None:
    data = docx(body, {"word/numbering.xml": NUMBERING.encode(), "word/styles.xml": STYLES.encode()})
    assert extractors.docx_text(data) == text


@pytest.mark.parametrize("tag", ["a", "b", "code", "del", "em", "ins", "q", "s", "span", "strike", "sub", "sup"])
@pytest.mark.parametrize("text", ["a{} b{}", "a{} b {}c", "a{}b {}c", "a{} {}c", " {}a {} b", "<p>a{} b{}c"])
def test_an_element_within_a_line_removes_no_space(text: str, tag: str) -> None:
    shown = extractors.html_text(text.format(f"<{tag}>", f"</{tag}>"))
    assert re.sub("[~^_]", "", shown) == extractors.html_text(text.format("", ""))


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ('<w:fldSimple w:instr="REF &gt;"><w:r><w:t>table 12</w:t></w:r></w:fldSimple>', "table 12"),
        (
            "<w:r><w:ruby><w:rt><w:r><w:t>x</w:t></w:r></w:rt><w:rubyBase><w:r><w:t>a</w:t></w:r></w:rubyBase></w:ruby></w:r>",
            "a",
        ),
        ("<w:r><w:rPr><w:dstrike/></w:rPr><w:t>a</w:t></w:r>", "~~a~~"),
        ("<w:bdo><w:r><w:t>a</w:t></w:r></w:bdo><w:dir><w:r><w:cr/><w:t>b</w:t></w:r></w:dir>", "a\nb"),
    ],
)
def test_text_in_fields_and_in_other_directions_is_text(body: str, text: str) -> None:
    assert extractors.docx_text(docx(f"<w:p>{body}</w:p>")) == text


def test_a_cell_behind_free_columns_is_in_its_own() -> None:
    cells = "".join(f"<w:tc>{paragraph(text)}</w:tc>" for text in "abc")
    rows = "".join(
        f"<w:tr><w:trPr><w:gridBefore w:val='{columns}'/></w:trPr><w:tc>{paragraph(text)}</w:tc></w:tr>"
        for columns, text in ((2, "d"), (0, "e"))
    )
    assert extractors.docx_text(docx(f"<w:tbl><w:tr>{cells}</w:tr>{rows}</w:tbl>")) == "a | b | c\n |  | d\ne"


def test_breaks_of_pages_and_spaces_before_code_are_kept() -> None:
    broken = "<w:r><w:t>end</w:t><w:br w:type='page'/><w:t>new</w:t><w:br w:type='column'/><w:t>last</w:t></w:r>"
    code = "<w:r><w:t xml:space='preserve'>    if x:</w:t><w:br/><w:t xml:space='preserve'>  y</w:t></w:r>"
    assert extractors.docx_text(docx(f"<w:p>{broken}</w:p><w:p>{code}</w:p>")) == "end\nnew\nlast\n\n    if x:\n  y"


COMPATIBILITY = 'xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006"'
DRAWING = (
    'xmlns:wp="http://schemas.openxmlformats.org/drawingml/2006/wordprocessingDrawing" '
    'xmlns:a="http://schemas.openxmlformats.org/drawingml/2006/main" '
    'xmlns:wps="http://schemas.microsoft.com/office/word/2010/wordprocessingShape"'
)


def _drawing(content: str) -> str:
    """A text box as Word writes it since 2010."""
    box = f"<wps:wsp><wps:txbx><w:txbxContent>{content}</w:txbxContent></wps:txbx></wps:wsp>"
    graphic = f"<a:graphic><a:graphicData>{box}</a:graphicData></a:graphic>"
    return f"<w:drawing {DRAWING}><wp:anchor><wp:posOffset>7</wp:posOffset>{graphic}</wp:anchor></w:drawing>"


def _picture(text: str) -> str:
    """A text box in the older format."""
    box = f"<v:textbox><w:txbxContent>{paragraph(text)}</w:txbxContent></v:textbox>"
    return f'<w:pict xmlns:v="urn:schemas-microsoft-com:vml"><v:rect>{box}</v:rect></w:pict>'


@pytest.mark.parametrize(
    ("choices", "text"),
    [
        (f"<mc:Choice>{{0}}</mc:Choice><mc:Fallback>{_picture('b')}</mc:Fallback>", "a\n\nb\n\nc"),
        ("<mc:Choice>{0}</mc:Choice>", "a\n\nbox\n\nc"),
        ("<mc:Choice/><mc:Choice>{0}</mc:Choice><mc:Fallback><w:pict/></mc:Fallback>", "a\n\nbox\n\nc"),
        (
            "<mc:Choice><mc:AlternateContent><mc:Choice>{0}</mc:Choice></mc:AlternateContent></mc:Choice>",
            "a\n\nbox\n\nc",
        ),
        ("<mc:Choice><w:t> it is</w:t></mc:Choice>", "a it is\n\nc"),
        ("<mc:Other>{0}</mc:Other>", "a\n\nc"),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_a_choice_is_read_if_the_fallback_has_no_text(choices: str, text: str, encoding: str) -> None:
    """Programs other than Word write no fallback, or a picture."""
    inside = choices.format(_drawing(paragraph("box")))
    both = f"<mc:AlternateContent {COMPATIBILITY}>{inside}</mc:AlternateContent>"
    data = docx(f"<w:p><w:r><w:t>a</w:t>{both}</w:r></w:p>{paragraph('c')}")
    with ZipFile(BytesIO(data)) as parts:
        document = parts.read("word/document.xml").decode()
    assert extractors.docx_text(docx("", {"word/document.xml": document.encode(encoding)})) == text


def test_text_boxes_of_a_drawing_are_text_with_numbers() -> None:
    inner = _item("b") + f"<w:p><w:r>{_drawing(_item('c'))}</w:r></w:p>"
    body = _item("a") + f"<w:p><w:r>{_drawing(inner)}</w:r></w:p>" + _item("d")
    data = docx(body, {"word/numbering.xml": NUMBERING.encode(), "word/styles.xml": STYLES.encode()})
    assert extractors.docx_text(data) == "Clause 3: a\nClause 4: b\nClause 5: c\nClause 6: d"


@pytest.mark.parametrize(
    ("kind", "data", "reason"),
    [
        (PDF, b"%PDF-1.4 nothing", extracted.DAMAGED),
        (PDF, pdf(b""), extracted.NO_TEXT),
        (PDF, LOCKED_PDF, extracted.LOCKED),
        (DOCX, b"PK\0\0", extracted.DAMAGED),
        (DOCX, b"\xd0\xcf\x11\xe0", extracted.LOCKED),
        (DOCX, docx("", {"word/more.xml": b" " * (65 << 20)}), extracted.LARGE),
        (DOCX, docx('<!DOCTYPE a [<!ENTITY b "c">]>' + paragraph("&b;")), extracted.DAMAGED),
        (HTML, b"<p><img></p>", extracted.NO_TEXT),
        (HTML, b"a" * (extractors.MOST_TEXT + 1), extracted.LARGE),
    ],
)
def test_what_cannot_be_extracted_has_a_reason(kind: int, data: bytes, reason: str) -> None:
    with Extractor() as extractor, pytest.raises(NotExtractedError) as refusal:
        extractor.text(kind, data)
    assert str(refusal.value) == reason


def test_a_number_of_many_digits_takes_no_longer_than_other_text() -> None:
    digits = "7" * 400_000
    with Extractor() as extractor:
        assert extractor.text(DOCX, docx(paragraph(digits))).text == digits


def test_a_file_that_takes_too_long_is_left_and_the_next_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extracted, "LEAST_SECONDS", 1)
    monkeypatch.setitem(extracted._SECONDS_A_MEBIBYTE, HTML, 0)
    with Extractor() as extractor:
        with pytest.raises(NotExtractedError, match=extracted.SLOW):
            extractor.text(HTML, b"<!--" * (1 << 18))
        assert extractor.text(HTML, b"next").text == "next"


def test_all_files_have_a_limit_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extracted, "SECONDS_IN_ALL", 0)
    with Extractor() as extractor, pytest.raises(NotExtractedError, match=extracted.LATE):
        extractor.text(HTML, b"text")


TRIES = """
import os, resource, socket, sys
from sparsekv.formats.documents import extractors
extractors.limit(10)
import colorsys  # Python's own modules can be read
for use in (
    lambda: open("/etc/passwd"), lambda: open(sys.argv[1], "w"), lambda: os.listdir("/"), lambda: socket.socket(),
    lambda: os.system("true"), lambda: bytearray(2 << 30), lambda: os.remove(sys.argv[1]),
    lambda: os.open("/etc/passwd", 0),
):
    try:
        use()
        print("done")
    except (PermissionError, MemoryError) as error:
        print(type(error).__name__)
"""


def test_a_parser_opens_no_file_and_no_connection(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("kept")
    tried = subprocess.run([sys.executable, "-c", TRIES, str(kept)], capture_output=True, text=True, check=True)
    assert tried.stdout.split() == ["PermissionError"] * 5 + ["MemoryError"] + ["PermissionError"] * 2
    assert kept.read_text() == "kept"


def test_odd_files_are_left_out_by_reason(tmp_path: Path) -> None:
    folder = tmp_path / "odd"
    write_folder(folder, mutations=3, only=QUICK)
    _check(folder, read_folder(folder, Choice()))


READ = f"""{PEAK}
import pickle, sys
from pathlib import Path
from sparsekv.formats.documents.files import Choice, read_folder
sources = read_folder(Path(sys.argv[1]), Choice())
Path(sys.argv[2]).write_bytes(pickle.dumps(sources))
print(peak())
"""


@pytest.mark.slow
def test_three_hundred_odd_files_take_bounded_memory_and_time(tmp_path: Path) -> None:
    """A limit of a file or of all that does not hold ends in the limit of the process, and fails."""
    folder = tmp_path / "odd"
    write_folder(folder, mutations=75)
    assert len(list(folder.iterdir())) >= 300
    command = [sys.executable, "-c", READ, str(folder), str(tmp_path / "read")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=2000)
    assert done.stderr == ""
    assert int(done.stdout) < 1 << 30
    _check(folder, pickle.loads((tmp_path / "read").read_bytes()))


def _check(folder: Path, sources: SourceTexts) -> None:
    names = {file.path for file in sources.files}
    assert {"00-valid.pdf", "00-valid.docx", "00-valid.html"} <= names
    assert SECRET not in sources.text
    assert sources.left_out[files.LINK] == ["link.docx", "link.html", "link.pdf"]
    assert len(sources.left_out[files.ODD_NAME]) == 3
    assert {"random.txt", "unsure.txt"} <= {*sources.left_out[files.PERHAPS["latin-1"]]}
    assert sources.detected == {"cp1252": ["windows.txt"], "cp1251": ["russian.csv"], "cp932": ["japanese.txt"]}
    left_out = [path for paths in sources.left_out.values() for path in paths]
    assert len(left_out) + len(names) == len(list(folder.iterdir()))
    assert sources.told().isascii()
    assert "\n" not in sources.told_detected()


@pytest.mark.parametrize("ending", ["pdf", "docx", "html"])
def test_the_same_bytes_are_the_same_text(ending: str) -> None:
    chance, kind = random.Random(ending), extracted.kind_of(f"a.{ending}")
    assert kind is not None
    with Extractor() as first, Extractor() as second:
        for number in range(5):
            data = mutated(valid(number)[ending], chance)
            if kind == HTML:
                data = data.decode(errors="replace").encode()
            assert _text(first, kind, data) == _text(second, kind, data)


def _text(extractor: Extractor, kind: int, data: bytes) -> str:
    try:
        return extractor.text(kind, data).text
    except NotExtractedError as reason:
        return str(reason)


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("a.pdf", b"", "a.pdf is empty; give a document with text in it"),
        ("a.pdf", pdf(b""), "is without text; convert it to plain text first, as scanned pages by text recognition"),
        (
            "a b.pdf",
            LOCKED_PDF,
            r"a b\.pdf is encrypted; decrypt it first, such as by qpdf --decrypt '\S*a b\.pdf' decrypted",
        ),
        ("a.docx", b"text", "a.docx is damaged; convert it to plain text first"),
        ("a.html", b"\x81\xff", "a.html is not text in UTF-8"),
    ],
)
def test_a_named_file_is_refused_in_one_line(name: str, data: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UsageError, match=says):
        read_document(str(tmp_path / name))


def test_a_named_file_of_many_bytes_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "a.pdf").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UsageError, match=r"a\.pdf is larger than 64 MiB; convert it"):
        read_document(str(tmp_path / "a.pdf"))
