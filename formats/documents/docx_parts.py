"""Prepare the parts of a DOCX file for mammoth, which ignores some elements, text boxes and the numbers of paragraphs.

The file does not store the paragraphs' numbers. They follow from the rules in `numbering.xml`, by counting.
"""

import io
import re
import string
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from html import escape
from xml.etree import ElementTree
from xml.parsers import expat

_ROMAN = (
    *((1000, "m"), (900, "cm"), (500, "d"), (400, "cd"), (100, "c"), (90, "xc"), (50, "l"), (40, "xl")),
    *((10, "x"), (9, "ix"), (5, "v"), (4, "iv"), (1, "i")),
)


def in_letters(number: int) -> str:
    """Return a number of at least 1 in letters: a to z, aa, ab, ... An empty string for a smaller number."""
    letters = ""
    while number > 0:
        number, letter = divmod(number - 1, 26)
        letters = string.ascii_lowercase[letter] + letters
    return letters


def in_repeated_letters(number: int) -> str:
    """Return a number from 1 to 780 in repeated letters: a to z, aa, bb, ... An empty string for another number."""
    times, letter = divmod(number - 1, 26)
    return string.ascii_lowercase[letter] * (times + 1) if 0 < number <= 780 else ""


def in_roman(number: int) -> str:
    """Return a number from 1 to 3999 in Roman numerals of lower case. An empty string for another number."""
    numerals = ""
    if 0 < number < 4000:
        for value, numeral in _ROMAN:
            numerals += numeral * (number // value)
            number %= value
    return numerals


BEGIN, END = "\ufdd0", "\ufdd1"
"""Characters around the number at the beginning of a paragraph. They are noncharacters of Unicode: no text has them."""
_WORD = (
    "http://schemas.openxmlformats.org/wordprocessingml/2006/main",
    "http://purl.oclc.org/ooxml/wordprocessingml/main",
)
_RENAMED = {"cr": b"br", "ptab": b"tab", "dstrike": b"strike"}
_RENAMED |= dict.fromkeys(("fldSimple", "ruby", "rubyBase", "dir", "bdo"), b"smartTag")
"""Maps elements that mammoth ignores to elements of the same meaning that it reads."""
_IGNORED = re.compile(rf"(</?\w+:)({'|'.join(_RENAMED)})(?=[\s/>])".encode())


def prepared(parts: zipfile.ZipFile) -> io.BytesIO:
    """Return a DOCX file with the XML parts of the given one, from which mammoth reads all text and paragraph numbers.

    Raises an error of `ElementTree` or `expat` for parts that are no XML.
    """
    names = [name for name in parts.namelist() if name.endswith((".xml", ".rels"))]
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name in names:
            part = _readable(parts.read(name))
            folder, _, base = name.rpartition("/")
            rules, styles = (f"{folder}/{one}.xml".lstrip("/") for one in ("numbering", "styles"))
            if re.fullmatch(r"document\d*\.xml", base) and rules in names:
                part = _numbered(part, _parsed(parts, rules), _parsed(parts, styles))
            archive.writestr(name, _IGNORED.sub(lambda found: found[1] + _RENAMED[found[2].decode()], part))
    return made


def _readable(part: bytes) -> bytes:
    """Return a part in which mammoth reads the text of all text boxes, and each cell of a table in its column.

    mammoth reads no text of a drawing. If a content has alternatives, it reads only the fallback, which may be missing
    or a picture. It ignores the number of columns that a row leaves free before its first cell.
    """
    plain = part.replace(b"\0", b"")  # of a part in UTF-16
    if not any(name in plain for name in (b"AlternateContent", b"txbxContent", b"gridBefore")):
        return part
    root = ElementTree.fromstring(part)
    waiting = [root]
    while waiting:
        element = waiting.pop()
        element[:] = [*_free_cell(element), *_read_children(element)]
        waiting += element
    rewritten: bytes = ElementTree.tostring(root, encoding="utf-8")
    return rewritten


def _free_cell(element: ElementTree.Element) -> Iterator[ElementTree.Element]:
    """Yield an empty cell that spans the columns before a row's first cell, if the element is such a row."""
    free = _find(element, "trPr/gridBefore")
    if free is not None and _whole(_attribute(free, "val")):
        space = element.tag.rpartition("}")[0]
        cell = ElementTree.Element(f"{space}}}tc")
        ElementTree.SubElement(ElementTree.SubElement(cell, f"{space}}}tcPr"), f"{space}}}gridSpan", free.attrib)
        ElementTree.SubElement(cell, f"{space}}}p")
        yield cell


_COMPATIBILITY = "{http://schemas.openxmlformats.org/markup-compatibility/2006}"
_DRAWING, _BOX, _TEXT = ({f"{{{space}}}{tag}" for space in _WORD} for tag in ("drawing", "txbxContent", "t"))


def _read_children(element: ElementTree.Element) -> Iterator[ElementTree.Element]:
    """Yield an element's children. Of a content with alternatives, yield the children of one alternative.

    A drawing with text boxes is replaced by a picture of the older format, of which mammoth reads the text boxes.
    """
    waiting = [*reversed(element)]
    while waiting:
        child = waiting.pop()
        if child.tag == f"{_COMPATIBILITY}AlternateContent":
            waiting += reversed(_alternative(child))
        elif child.tag in _DRAWING and (boxes := _boxes(child)):
            picture = ElementTree.Element(child.tag.replace("drawing", "pict"))
            picture.extend(boxes)
            yield picture
        else:
            yield child


def _alternative(element: ElementTree.Element) -> list[ElementTree.Element]:
    """Return the children of the first alternative with text; without such an alternative, those of the first.

    The fallback comes before the choices.
    """
    fallbacks, choices = (element.findall(f"{_COMPATIBILITY}{tag}") for tag in ("Fallback", "Choice"))
    branches = [*fallbacks, *choices]
    with_text = [one for one in branches if any(text.tag in _TEXT and text.text for text in one.iter())]
    return [*next(iter(with_text or branches), ())]


def _boxes(element: ElementTree.Element) -> list[ElementTree.Element]:
    """Return the contents of the text boxes in a drawing, without those within another text box."""
    found, waiting = list[ElementTree.Element](), [element]
    while waiting:
        if (one := waiting.pop()).tag in _BOX:
            found.append(one)
        else:
            waiting += reversed([*_read_children(one)])
    return found


def _parsed(parts: zipfile.ZipFile, name: str) -> ElementTree.Element:
    try:
        return ElementTree.fromstring(parts.read(name))
    except KeyError:
        return ElementTree.Element("none")


def _numbered(document: bytes, numbering: ElementTree.Element, styles: ElementTree.Element) -> bytes:
    """Return a document with the number of each numbered paragraph as the paragraph's first text."""
    pieces, before = list[bytes](), 0
    for place, run in _Paragraphs(_Numbers(numbering, styles)).runs(document):
        pieces += [document[before:place], run.encode()]
        before = place
    return b"".join([*pieces, document[before:]])


_GONE = ("del", "moveFrom")
"""Marks of a paragraph that a tracked change removes."""
_PROPERTIES = {"pStyle": ["p", "pPr"], "numId": ["p", "pPr", "numPr"], "ilvl": ["p", "pPr", "numPr"]}
_PROPERTIES |= {tag: ["p", "pPr", "rPr"] for tag in _GONE}
"""Elements of a paragraph that determine its number, each with the path of the elements around it."""


class _Paragraphs:
    """Finds the numbered paragraphs of a document."""

    def __init__(self, numbers: "_Numbers"):
        self._numbers = numbers
        self._open: list[str] = []  # local names of the open elements; empty for elements of other namespaces
        self._runs: list[tuple[int, str]] = []
        self._waiting = ""
        self._properties: dict[str, str] = {}
        self._joined = False  # the open paragraph is joined to the next one
        self._begin: int | None = None  # offset of the text of the first paragraph that is joined to the open one

    def runs(self, document: bytes) -> list[tuple[int, str]]:
        """Return (offset in bytes, run with the number) of each numbered paragraph; empty if the text is not UTF-8."""
        parser = expat.ParserCreate(namespace_separator=" ")
        parser.StartElementHandler, parser.EndElementHandler = self._start, self._end
        encodings = list[str | None]()
        parser.XmlDeclHandler = lambda version, encoding, standalone: encodings.append(encoding)
        self._parser = parser
        parser.Parse(document, True)
        utf_8 = all(encoding is None or encoding.lower() == "utf-8" for encoding in encodings)
        return self._runs if utf_8 and not document.startswith((b"\xff\xfe", b"\xfe\xff")) else []

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self._write()
        space, _, local = name.rpartition(" ")
        tag = local if space in _WORD else ""
        self._open.append(tag)
        if self._open[-2:] == ["p", "pPr"]:
            self._properties = {}
        elif _PROPERTIES.get(tag) == self._open[-len(_PROPERTIES.get(tag, ())) - 1 : -1]:
            self._properties[tag] = attributes.get(f"{space} val", "")

    def _end(self, name: str) -> None:
        self._write()
        space = name.rpartition(" ")[0]
        if self._open[-2:] == ["p", "pPr"]:
            self._joined = "del" in self._properties
            gone = not self._properties.keys().isdisjoint(_GONE)
            label = None if gone else self._numbers.next(self._properties)
            if label is not None:
                self._waiting = f'<r xmlns="{space}"><t xml:space="preserve">{BEGIN}{escape(label)}{END}</t></r>'
        elif self._open[-1] == "p":
            self._begin = self._begin if self._joined else None
            self._joined = False
        self._open.pop()

    def _write(self) -> None:
        """Record the position of the run that waits, which has a paragraph's number.

        The run is put before the element that begins or ends here, or at the start of the first joined paragraph.
        """
        place = self._parser.CurrentByteIndex
        if self._joined and self._begin is None:
            self._begin = place
        if self._waiting:
            last = self._runs[-1][0] if self._runs else 0
            begin = place if self._begin is None or self._begin < last else self._begin
            self._runs.append((begin, self._waiting))
            self._waiting = ""


@dataclass(frozen=True)
class _Level:
    """A level of a list: its first number, the format and text of its numbers, and the level that restarts it."""

    start: int = 1
    format: str = "decimal"
    text: str = ""
    legal: bool = False
    restart: int | None = None

    @classmethod
    def of(cls, element: ElementTree.Element) -> "_Level":
        restart = _value(element, "lvlRestart")
        return cls(
            _whole(_value(element, "start")),
            _value(element, "numFmt") or "decimal",
            _value(element, "lvlText") or "",
            _find(element, "isLgl") is not None,
            None if restart is None else _whole(restart),
        )


@dataclass
class _Counts:
    """The last number of each level of a list, and the pairs (instance of the list, level) that have begun."""

    numbers: dict[int, int] = field(default_factory=dict)
    begun: set[tuple[str, int]] = field(default_factory=set)


class _Numbers:
    """Computes the numbers of numbered paragraphs, by the rules of the document's `numbering.xml` and `styles.xml`."""

    def __init__(self, numbering: ElementTree.Element, styles: ElementTree.Element):
        self._styles = {_attribute(one, "styleId"): one for one in _all(styles, "style")}
        self._lists = {_attribute(one, "abstractNumId"): one for one in _all(numbering, "abstractNum")}
        self._instances = {_attribute(one, "numId"): one for one in _all(numbering, "num")}
        self._levels: dict[str, tuple[str, dict[int, _Level], dict[int, int]]] = {}
        self._counts: dict[str, _Counts] = {}

    def next(self, properties: Mapping[str, str]) -> str | None:
        """Return the number of the next paragraph, such as `2.1`; None if it has none or has a bullet.

        Args:
            properties: values of the paragraph's `pStyle`, `numId` and `ilvl`, if it has them.
        """
        instance, level = self._place(properties)
        if instance not in self._instances:
            return None
        name, levels, overrides = self._instance(instance)
        if level not in levels:
            return None
        counts = self._counts.setdefault(name, _Counts())
        if level in overrides and (instance, level) not in counts.begun:
            counts.numbers[level] = overrides[level] - 1
        counts.begun.add((instance, level))
        counts.numbers[level] = counts.numbers.get(level, levels[level].start - 1) + 1
        for deeper in [one for one in counts.numbers if one > level and _restarts(levels.get(one), level)]:
            del counts.numbers[deeper]
        if levels[level].format == "bullet":
            return None
        return re.sub(
            "%([1-9])", lambda found: self._formatted(int(found[1]) - 1, level, levels, counts), levels[level].text
        )

    def _formatted(self, level: int, of: int, levels: Mapping[int, _Level], counts: _Counts) -> str:
        there = levels.get(level, _Level())
        return formatted(counts.numbers.get(level, there.start), "decimal" if levels[of].legal else there.format)

    def _place(self, properties: Mapping[str, str]) -> tuple[str, int]:
        """Return the id of a paragraph's list instance, and its level. The id is empty without a list."""
        instance, level = properties.get("numId"), properties.get("ilvl")
        style, seen = properties.get("pStyle", ""), set[str]()
        while style in self._styles and style not in seen and (instance is None or level is None):
            seen.add(style)
            found = self._styles[style]
            numbering = _find(found, "pPr/numPr")
            if numbering is not None and instance is None:
                instance = _value(numbering, "numId")
                level = level or _value(numbering, "ilvl") or self._level_of(instance or "", style)
            style = _value(found, "basedOn") or ""
        return instance or "", _whole(level)

    def _level_of(self, instance: str, style: str) -> str | None:
        """Return the level of a list instance whose paragraphs have a style; None if there is none."""
        found = self._instances.get(instance)
        linked = self._lists.get((found is not None and _value(found, "abstractNumId")) or "")
        of = [one for one in ([] if linked is None else _all(linked, "lvl")) if _value(one, "pStyle") == style]
        return _attribute(of[0], "ilvl") if of else None

    def _instance(self, instance: str) -> tuple[str, dict[int, _Level], dict[int, int]]:
        """Return the id of an instance's list, its levels, and its own first numbers by level."""
        if instance not in self._levels:
            element, overrides = self._instances[instance], dict[int, int]()
            name = _value(element, "abstractNumId") or ""
            levels = self._of_list(name, set())
            for one in _all(element, "lvlOverride"):
                level, own = _whole(_attribute(one, "ilvl")), _find(one, "lvl")
                if own is not None:
                    levels[level] = _Level.of(own)
                if (start := _value(one, "startOverride")) is not None:
                    overrides[level] = _whole(start)
            self._levels[instance] = name, levels, overrides
        return self._levels[instance]

    def _of_list(self, name: str, seen: set[str]) -> dict[int, _Level]:
        element = self._lists.get(name)
        if element is None or name in seen:
            return {}
        if link := _value(element, "numStyleLink"):
            style = self._styles.get(link)
            numbering = None if style is None else _find(style, "pPr/numPr")
            instance = self._instances.get((numbering is not None and _value(numbering, "numId")) or "")
            return {} if instance is None else self._of_list(_value(instance, "abstractNumId") or "", {*seen, name})
        return {_whole(_attribute(one, "ilvl")): _Level.of(one) for one in _all(element, "lvl")}


def _restarts(deeper: _Level | None, level: int) -> bool:
    """Whether a paragraph of a level of a list restarts the numbers of a deeper level of this list."""
    if deeper is None or deeper.restart is None:
        return True
    return level < deeper.restart


def formatted(number: int, name: str) -> str:
    """Return a number in a format of WordprocessingML. Formats that are not known here are decimal."""
    if name == "none":
        return ""
    text = _FORMATS.get(name.removeprefix("upper").removeprefix("lower"), str)(number) or str(number)
    return text.upper() if name.startswith("upper") else text


_FORMATS: dict[str, Callable[[int], str]] = {
    "Letter": in_repeated_letters,
    "Roman": in_roman,
    "decimalZero": lambda number: f"{number:02}",
}


def numbers_shown(text: str) -> str:
    """Return a text in which the numbers of paragraphs replace the numbers that mammoth gives to items of a list."""
    of_list = r"(?<![0-9])[0-9]+\. "  # from a first digit on, or the time would grow with the square of many digits
    return re.sub(f"(?:{of_list})?{BEGIN}([^{END}]*){END} ?", lambda found: found[1] and f"{found[1]} ", text)


def _whole(text: str | None) -> int:
    """Return the number in an attribute's value; 0 if there is none."""
    return int(text) if text and re.fullmatch("[0-9]{1,9}", text) else 0


def _all(element: ElementTree.Element, tag: str) -> list[ElementTree.Element]:
    return element.findall(f"{{*}}{tag}")


def _find(element: ElementTree.Element, path: str) -> ElementTree.Element | None:
    return element.find("/".join(f"{{*}}{part}" for part in path.split("/")))


def _attribute(element: ElementTree.Element, name: str) -> str | None:
    return next((value for key, value in element.attrib.items() if key.rpartition("}")[2] == name), None)


def _value(element: ElementTree.Element, tag: str) -> str | None:
    found = _find(element, tag)
    return None if found is None else _attribute(found, "val")
