"""Documents that strangers may send: small valid PDF, DOCX and HTML files, mutations of them, and bombs."""

import io
import random
import struct
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

SECRET = "the-words-of-a-file-outside"
"""Text of a file outside the folder, which no index may have."""
_TYPES = (
    '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types"><Default Extension="rels" '
    'ContentType="application/vnd.openxmlformats-package.relationships+xml"/><Override PartName="/word/document.xml" '
    'ContentType="application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"/></Types>'
)
_RELATIONS = (
    '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships"><Relationship Id="rId1" '
    'Type="http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument" '
    'Target="word/document.xml"/></Relationships>'
)
_WORD = (
    '<w:document xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main" '
    'xmlns:r="http://schemas.openxmlformats.org/officeDocument/2006/relationships" '
    'xmlns:a="http://schemas.openxmlformats.org/drawingml/2006/main"><w:body>'
)
_END = "</w:body></w:document>"


def pdf(*pages: bytes, objects: dict[int, bytes] | None = None, trailer: bytes = b"") -> bytes:
    """Return a PDF file with a content stream for each page; `objects` replace its own: 1 catalogue, 2 pages, 3
    font."""
    numbers = [4 + 2 * page for page in range(len(pages))]
    kids = b" ".join(b"%d 0 R" % number for number in numbers)
    made = {
        1: b"<</Type/Catalog/Pages 2 0 R>>",
        2: b"<</Type/Pages/Kids[%s]/Count %d>>" % (kids, len(pages)),
        3: b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    }
    for number, content in zip(numbers, pages, strict=True):
        made[number] = (
            b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 300 300]/Resources<</Font<</F 3 0 R>>/XObject<</X 99 0 R>>>>"
        )
        made[number] += b"/Contents %d 0 R>>" % (number + 1)
        made[number + 1] = stream(content)
    data, places = b"%PDF-1.4\n", {}
    for number, body in (made | (objects or {})).items():
        places[number] = len(data)
        data += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%d 1\n%010d 00000 n \n" % (number, place) for number, place in places.items())
    size, start = max(places) + 1, len(data)
    return data + b"xref\n0 1\n0000000000 65535 f \n%strailer<</Size %d/Root 1 0 R%s>>\nstartxref\n%d\n%%%%EOF\n" % (
        table,
        size,
        trailer,
        start,
    )


def stream(content: bytes, more: bytes = b"") -> bytes:
    return b"<<%s/Length %d>>\nstream\n%s\nendstream" % (more, len(content), content)


def shown(text: str) -> bytes:
    """Return the content stream of a page with a line of ASCII text."""
    return b"BT /F 12 Tf 20 200 Td (%s) Tj ET" % text.encode()


def docx(body: str, parts: dict[str, bytes] | None = None) -> bytes:
    """Return a DOCX file with paragraphs in WordprocessingML; `parts` are added, or replace its own."""
    file = io.BytesIO()
    made = {"[Content_Types].xml": _TYPES, "_rels/.rels": _RELATIONS, "word/document.xml": _WORD + body + _END}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, part in ({name: part.encode() for name, part in made.items()} | (parts or {})).items():
            archive.writestr(name, part)
    return file.getvalue()


def paragraph(text: str) -> str:
    return f"<w:p><w:r><w:t>{text}</w:t></w:r></w:p>"


def page(body: str) -> bytes:
    return f"<!DOCTYPE html><html><head><title>A page</title></head><body>{body}</body></html>".encode()


def valid(number: int) -> dict[str, bytes]:
    """Return a valid file of each kind, by the ending of its name."""
    words = f"Document {number} tells of apples and pears."
    table = "<w:tbl><w:tr><w:tc>{0}</w:tc><w:tc>{0}</w:tc></w:tr></w:tbl>".format(paragraph("cell"))
    return {
        "pdf": pdf(shown(words), shown("Its second page.")),
        "docx": docx(paragraph(words) + table),
        "html": page(f"<nav>Home</nav><h1>Title</h1><p>{words}<table><tr><td>a<td>b</table><ul><li>c</ul>"),
    }


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Return a copy of a file's bytes with some bytes changed, cut, repeated or inserted."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 3, 20))):
        place = chance.randrange(len(changed) or 1)
        length = chance.randrange(1, 60)
        match chance.randrange(5):
            case 0:
                changed[place : place + 1] = bytes([chance.randrange(256)])
            case 1:
                del changed[place : place + length]
            case 2:
                changed[place:place] = changed[place : place + length] * chance.choice((1, 50))
            case 3:
                changed[place:place] = chance.choice(
                    (b"[" * 3000, b"<<" * 3000, b"99999999999", b"-1", b"\0" * 40, b"<td>")
                )
            case 4:
                changed = changed[: place or 1] if chance.random() < 0.2 else changed
    return bytes(changed)


def bombs(outside: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Yield names and makers of files that would take all memory or time, or read a file outside the folder."""
    yield from _pdf_bombs(outside)
    yield from _docx_bombs(outside)
    yield from _html_bombs(outside)


def _pdf_bombs(outside: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    text = shown("apples")
    yield "kids-loop.pdf", lambda: pdf(text, objects={2: b"<</Type/Pages/Kids[2 0 R 2 0 R]/Count 2>>"})
    yield "kids-wide.pdf", lambda: pdf(text, objects={2: b"<</Type/Pages/Kids[%s]/Count 1>>" % (b"4 0 R " * 200_000)})
    deep = {n: b"<</Type/Pages/Kids[%d 0 R %d 0 R]/Count 1>>" % (n + 1, n + 1) for n in range(20, 80)}
    yield (
        "kids-tree.pdf",
        lambda: pdf(text, objects=deep | {2: b"<</Type/Pages/Kids[20 0 R]/Count 1>>", 80: b"<</Type/Page>>"}),
    )
    yield "parent-loop.pdf", lambda: pdf(text, objects={4: b"<</Type/Page/Parent 4 0 R/Contents 5 0 R>>"})
    yield "count.pdf", lambda: pdf(text, objects={2: b"<</Type/Pages/Kids[4 0 R]/Count 999999999999>>"})
    whole = pdf(text)
    yield "xref-loop.pdf", lambda: pdf(text, trailer=b"/Prev %d" % whole.rindex(b"xref\n0 1"))
    yield "nested-arrays.pdf", lambda: pdf(text, objects={3: b"[" * 2_000_000})
    yield "nested-dictionaries.pdf", lambda: pdf(text, objects={1: b"<</A" * 500_000})
    yield "nested-content.pdf", lambda: pdf(b"[" * 1_000_000)
    yield "huge-stream.pdf", lambda: pdf(text, objects={5: stream(_huge(), b"/Filter/FlateDecode")})
    twice = b"/Filter[/FlateDecode/FlateDecode]"
    yield "twice-packed.pdf", lambda: pdf(text, objects={5: stream(zlib.compress(_huge(), 9), twice)})
    form = stream(b"/X Do /X Do", b"/Type/XObject/Subtype/Form/Resources<</XObject<</X 99 0 R>>>>")
    yield "form-loop.pdf", lambda: pdf(b"/X Do", objects={99: form})
    yield "contents-many.pdf", lambda: pdf(text, objects={5: b"[%s]" % (b"5 0 R " * 100_000)})
    yield "length-loop.pdf", lambda: pdf(text, objects={5: b"<</Length 5 0 R>>\nstream\n%s\nendstream" % text})
    out = b"/F(%s)/FFilter/None" % str(outside).encode()
    yield "file-outside.pdf", lambda: pdf(text, objects={5: stream(b"", out)})
    lock = b"/Encrypt<</Filter/Standard/V 1/R 2/O(%s)/U(%s)/P -4>>/ID[(a)(a)]" % (b"o" * 32, b"u" * 32)
    yield "encrypted.pdf", lambda: pdf(text, trailer=lock)
    cmap = b"begincmap 1 beginbfrange <00000000> <ffffffff> <0000> endbfrange endcmap"
    font = b"<</Type/Font/Subtype/Type0/BaseFont/A/Encoding/Identity-H/ToUnicode 98 0 R>>"
    yield "character-map.pdf", lambda: pdf(text, objects={3: font, 98: stream(cmap)})


def _huge() -> bytes:
    """Return some 400 MB of text operators, compressed."""
    packer = zlib.compressobj(9)
    return b"".join(packer.compress(b"(a) Tj " * 150_000) for _ in range(400)) + packer.flush()


def _lying() -> bytes:
    """Return a DOCX file with a part of 100 MB that claims to have 100 bytes."""
    data = docx("", {"word/document.xml": b" " * (100 << 20)})
    place = data.index(b"PK\x01\x02", data.index(b"_rels/.rels", data.index(b"PK\x01\x02")))
    return data[: place + 24] + struct.pack("<I", 100) + data[place + 28 :]


def _docx_bombs(outside: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    body = paragraph("apples")
    yield "zip-bomb.docx", lambda: docx(body, {"word/document.xml": _WORD.encode() + b" " * (600 << 20)})
    yield (
        "long.docx",
        lambda: docx(body, {"word/document.xml": (_WORD + paragraph("a" * 1000) * 60_000 + _END).encode()}),
    )
    yield "lying-size.docx", _lying
    lines = "".join(f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">' for n in range(1, 12))
    laughs = f'<!DOCTYPE a [<!ENTITY a0 "ha">{lines}]>{_WORD}{paragraph("&a11;")}{_END}'
    yield "laughs.docx", lambda: docx("", {"word/document.xml": laughs.encode()})
    yield "laughs-16.docx", lambda: docx("", {"word/document.xml": laughs.encode("utf-16")})
    entity = f'<!DOCTYPE a [<!ENTITY b SYSTEM "file://{outside}">]>{_WORD}{paragraph("&b;")}{_END}'
    yield "entity-outside.docx", lambda: docx("", {"word/document.xml": entity.encode()})
    picture = '<w:p><w:r><w:drawing><a:blip r:link="rId9"/></w:drawing></w:r></w:p>'
    relation = (
        '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships"><Relationship Id="rId9" '
        'Type="http://schemas.openxmlformats.org/officeDocument/2006/relationships/image" '
        f'TargetMode="External" Target="file://{outside}"/></Relationships>'
    )
    yield "picture-outside.docx", lambda: docx(body + picture, {"word/_rels/document.xml.rels": relation.encode()})
    yield (
        "part-outside.docx",
        lambda: docx("", {"_rels/.rels": _RELATIONS.replace("word/document.xml", f"../..{outside}").encode()}),
    )
    yield "nested-tables.docx", lambda: docx("<w:tbl><w:tr><w:tc>" * 20_000)
    nested = "<w:tbl><w:tr><w:tc>", "</w:tc></w:tr></w:tbl>"
    yield "nested-tables-closed.docx", lambda: docx(nested[0] * 5000 + body + nested[1] * 5000)
    yield "many-parts.docx", lambda: docx(body, {f"word/part{n}.xml": b"<a/>" for n in range(30_000)})
    yield "empty.docx", lambda: b"PK\x05\x06" + b"\0" * 18
    yield "encrypted.docx", lambda: b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\0" * 5000
    styles = "<w:style w:styleId='a'><w:basedOn w:val='a'/></w:style>"
    yield "style-loop.docx", lambda: docx(body, {"word/styles.xml": _WORD.encode() + styles.encode()})


def _html_bombs(outside: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    size = (8 << 20) - 100
    for name, piece in (
        ("div", "<div>"),
        ("table", "<table><tr><td>"),
        ("list", "<ul><li>"),
        ("bold", "<b>"),
        ("nav", "<nav>"),
    ):
        yield f"nested-{name}.html", lambda piece=piece: (piece * (size // len(piece))).encode() + b"apples"
    for name, piece in (
        ("brackets", "<"),
        ("comments", "<!--"),
        ("declarations", "<!"),
        ("instructions", "<?"),
        ("entities", "&#"),
        ("ends", "</"),
        ("attributes", "<a b="),
        ("quotes", "<a b='"),
        ("scripts", "<script>"),
        ("conditions", "<![if "),
        ("spaces", " "),
        ("letters", "a"),
        ("breaks", "<br>"),
    ):
        yield f"many-{name}.html", lambda piece=piece: (piece * (size // len(piece))).encode()
    yield "attribute.html", lambda: b"<a " + b"b " * (size // 2) + b">apples"
    yield "punycode.html", lambda: b"<meta charset=punycode>" + b"a-b" * (1 << 20)
    yield "utf-7.html", lambda: b"<meta charset=utf-7>+ADw-script+AD4- apples"
    yield "numbers.html", lambda: page("<ol start='" + "9" * 100_000 + "'><li>apples<li>&#99999999999999;&#xD800;</ol>")
    links = f"<iframe src='file://{outside}'></iframe><object data='file://{outside}'></object><img src='{outside}'>"
    entity = f'<!DOCTYPE html [<!ENTITY b SYSTEM "file://{outside}">]><p>apples &b;{links}'
    yield "links-outside.html", lambda: entity.encode()
    yield "entity-outside.xhtml", lambda: f'<?xml version="1.0"?>{entity}'.encode()


GERMAN = """Der Vertrag läuft über zwei Jahre und verlängert sich danach um jeweils zwölf Monate, wenn er nicht
vorher gekündigt wird. Für Schäden, die durch unsachgemäße Benutzung der Geräte entstehen, haftet der Käufer selbst. Die
Rückgabe ist innerhalb von vierzehn Tagen möglich; die Gebühr dafür beträgt fünf Prozent des Preises. Änderungen müssen
schriftlich bestätigt werden. Größere Mängel sind dem Verkäufer unverzüglich zu melden."""
RUSSIAN = """Договор заключается на два года, затем продлевается каждый раз на двенадцать месяцев, если его не
расторгнут раньше. Платит за повреждения, которые возникли из-за неправильного использования, покупатель. Возврат
возможен после
четырнадцати дней, плата составляет пять процентов цены."""  # noqa: RUF001
TEXTS = {
    "windows.txt": GERMAN.encode("cp1252"),
    "russian.csv": RUSSIAN.encode("cp1251"),
    "japanese.txt": "今日は天気がいいので、公園へ散歩に行きます。東京は日本の首都です。".encode("shift_jis"),
    "utf-16.txt": "A text with a mark.".encode("utf-16"),
    "utf-32.json": "\ufeff{}".encode("utf-32-le"),
    "unsure.txt": b"a price of \xa35",
    "random.txt": bytes(random.Random(0).choices([*range(32, 127), *range(160, 256), 10], k=5000)),
}
"""Texts in other encodings than UTF-8, and two of which the encoding is not certain."""


def write_folder(folder: Path, *, mutations: int, seed: int = 0, only: Collection[str] | None = None) -> None:
    """Write a folder of odd documents, with links to a file beside it that has SECRET.

    Args:
        mutations: number of mutated files of each kind.
        only: names of the bombs that are written; None: all of them, and files of a gigabyte without blocks on disk.
    """
    folder.mkdir()
    outside = folder.parent / "outside.txt"
    outside.write_text(SECRET)
    chance = random.Random(seed)
    for number in range(mutations):
        for ending, data in valid(number).items():
            (folder / f"{number:03}-mutated.{ending}").write_bytes(mutated(data, chance))
    for ending, data in valid(0).items():
        (folder / f"00-valid.{ending}").write_bytes(data)
        (folder / f"\x1b[2Jescape\n.{ending}").write_bytes(data)
        (folder / f"link.{ending}").symlink_to(outside)
    for name, data in TEXTS.items():
        (folder / name).write_bytes(data)
    for name, make in bombs(outside):
        if only is None or name in only:
            (folder / name).write_bytes(make())
    for ending in () if only is not None else ("pdf", "docx", "html", "txt"):
        with (folder / f"gigabyte.{ending}").open("wb") as file:
            file.truncate(1 << 30)
