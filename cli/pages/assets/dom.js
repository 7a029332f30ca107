// Elements and text. Strings become text nodes and nothing else: no markup is ever parsed.

/** The data that the page was written with. */
function pageData() {
  return JSON.parse(document.getElementById("data").textContent);
}

/**
 * A new element. Properties that are functions are listeners (`onclick`), `class` and whatever has a dash or is not a
 * property of the element are attributes; null and false are left out. Children are elements, strings or null.
 */
function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") made.addEventListener(name.slice(2), value);
    else if (name === "dataset") Object.assign(made.dataset, value);
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

// C0 but tab and newline, C1, bidi overrides and isolates, invisible spaces and separators, tag characters, lone surrogates.
const STEERING =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\u{e0000}-\u{e007f}\ud800-\udfff]/gu;

/** Text as nodes: what would steer the terminal, the line's direction or nothing visible is shown by its name. */
function visible(text) {
  const nodes = [];
  let from = 0;
  for (const found of text.matchAll(STEERING)) {
    if (found.index > from) nodes.push(document.createTextNode(text.slice(from, found.index)));
    nodes.push(element("span", { class: "control", title: "a control character" }, controlName(found[0])));
    from = found.index + found[0].length;
  }
  if (from < text.length) nodes.push(document.createTextNode(text.slice(from)));
  return nodes;
}

/** How a control character is shown: its picture (U+2400 and on), or its number. */
function controlName(character) {
  const code = character.codePointAt(0);
  if (code < 0x20) return String.fromCodePoint(0x2400 + code);
  return code === 0x7f ? "\u2421" : `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
}

/** A regular expression (with the flag u) that finds exactly a text. */
function escapedPattern(text) {
  return text.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&");
}

/** A span of somebody's text, kept apart from the direction of what is around it. */
function quoted(text, properties = {}) {
  return element("bdi", { dir: "auto", ...properties }, visible(text));
}

/** Copy a text to the clipboard; true if that worked. */
async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}
