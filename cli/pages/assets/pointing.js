// Pictures whose marks say their numbers: under the pointer, and by the arrow keys.

const SVG = "http://www.w3.org/2000/svg";

/** A new SVG element with attributes; children are elements or strings. */
function drawn(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== null && value !== undefined) made.setAttribute(name, value);
  made.append(...children.flat(Infinity));
  return made;
}

/**
 * A figure with an SVG picture of that size. Marks are {node, text, onshow}, in the order of the arrow keys; the text of
 * the mark that is pointed at or stepped to is below the picture, and is told to readers of a screen.
 */
function pointedFigure(title, width, height, content, marks) {
  const told = element("output", { class: "told small number", "aria-live": "polite" }, "\u00a0");
  const picture = drawn("svg", { viewBox: `0 0 ${width} ${height}`, tabindex: "0", role: "img", "aria-label": `${title}. Arrow keys go through its marks.` }, content);
  let current = -1;
  const show = (at) => {
    if (marks[current]) marks[current].node.classList.remove("pointed");
    current = at;
    const mark = marks[at];
    told.replaceChildren(mark ? quoted(mark.text) : "\u00a0");
    if (mark) mark.node.classList.add("pointed");
    picture.classList.toggle("pointing", Boolean(mark));
  };
  marks.forEach((mark, at) => mark.node.addEventListener("pointerenter", () => show(at)));
  picture.addEventListener("pointerleave", () => show(-1));
  picture.addEventListener("blur", () => show(-1));
  picture.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step || !marks.length) return;
    event.preventDefault();
    show(current < 0 ? (step > 0 ? 0 : marks.length - 1) : (current + step + marks.length) % marks.length);
  });
  return element("figure", {}, element("figcaption", {}, title), picture, told);
}
