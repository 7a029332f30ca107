// The whole document on one narrow canvas: a lane per kind, marks where attention lies, and what is seen of the text.

const LANES = { chosen: 0, stood_for: 1, missed: 2 };
const MARKS = { chosen: "chosen", stood_for: "stood-for-mark", missed: "missed" };

/**
 * The map: {column, draw, follow}, in a column with the names of its ends; a click or drag scrolls to the place.
 * `scrollTo`, `scrollToShare` and `seen` are of the document's pane.
 */
function documentMap(trace, { scrollTo, scrollToShare, seen }) {
  const ends = trace.always.map(({ label }) => label);
  const canvas = element("canvas", { role: "img", "aria-label": ["Map of the document: where attention lies", ...ends].join("; ") });
  const view = element("div", { class: "window" });
  const box = element("div", { class: "map" }, canvas, view);
  const [sinks, tail] = ["sinks", "tail"].map((side) => alwaysButton(trace.always.find((end) => end.side === side), scrollTo));
  const column = element("div", { class: "map-column no-print" }, sinks, box, tail);
  const map = { canvas, passages: new Map(), brightest: 0, kinds: {}, matches: [], colours: null };
  const paint = oncePerFrame(() => {
    map.colours ??= mapColours();
    paintMap(trace, map);
  });
  /** Draw with the next frame; `changed` is what is new of the map, `colours: null` where they are others now. */
  const draw = (changed = {}) => {
    Object.assign(map, changed);
    paint();
  };
  /** Show which part of the document is seen; the marks are not drawn anew for that. */
  const follow = oncePerFrame(() => {
    const [top, bottom] = seen();
    view.style.transform = `translateY(${(top * box.clientHeight).toFixed(1)}px)`;
    view.style.height = `${Math.max(6, (bottom - top) * box.clientHeight).toFixed(1)}px`;
  });
  const go = ({ clientY }) => scrollToShare(Math.min(1, Math.max(0, (clientY - box.getBoundingClientRect().top) / box.clientHeight)));
  box.addEventListener("pointerdown", (event) => {
    box.setPointerCapture(event.pointerId);
    go(event);
  });
  box.addEventListener("pointermove", (event) => event.buttons && go(event));
  new ResizeObserver(() => {
    draw();
    follow();
  }).observe(box);
  return { column, draw, follow };
}

/** A function that runs with the next frame, once, however often it is called until then. */
function oncePerFrame(action) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      action();
    });
  };
}

function mapColours() {
  return Object.fromEntries(["chosen", "stood-for-mark", "missed", "ink", "faint", "line"].map((name) => [name, colour(`--${name}`)]));
}

function paintMap(trace, map) {
  const { canvas, colours } = map;
  const [width, height, ratio] = [canvas.clientWidth, canvas.clientHeight, devicePixelRatio || 1];
  if (!width || !height) return;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    [canvas.width, canvas.height] = [Math.round(width * ratio), Math.round(height * ratio)];
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  const yOf = (token) => (token / Math.max(1, trace.n_context)) * height;
  paintAlways(context, trace.always, colours, width, yOf);
  paintMarks(context, trace.prompt, map, colours, width, yOf);
  paintMatches(context, trace.prompt, map.matches, colours, width, yOf);
}

/** Sinks and tail, which are always read, with the rule at their left that they have in the text; none is too small to be seen. */
function paintAlways(context, always, colours, width, yOf) {
  for (const { side, from, to } of always) {
    const tall = Math.max(2, yOf(to) - yOf(from));
    const top = side === "sinks" ? 0 : yOf(to) - tall;
    context.fillStyle = colours.line;
    context.fillRect(0, top, width, tall);
    context.fillStyle = colours.faint;
    context.fillRect(0, top, 3, tall);
  }
}

/** A bar for each kind of each lit passage, as wide as its share; the largest last, so that it is seen. */
function paintMarks(context, prompt, { passages, brightest, kinds }, colours, width, yOf) {
  const lane = (width - 8) / 3;
  const bars = [];
  for (const [passage, shares] of passages) {
    KINDS.forEach((kind, at) => kinds[kind] && shares[at] > 0 && bars.push({ passage, kind, part: Math.sqrt(shares[at] / brightest) }));
  }
  bars.sort((a, b) => a.part - b.part);
  for (const { passage, kind, part } of bars) {
    const y = yOf(prompt.starts[passage]);
    context.globalAlpha = 0.25 + 0.75 * Math.min(1, part);
    context.fillStyle = colours[MARKS[kind]];
    context.fillRect(4 + LANES[kind] * lane, y, Math.max(2, (lane - 2) * Math.min(1, part)), Math.max(2, yOf(prompt.starts[passage + 1]) - y));
  }
  context.globalAlpha = 1;
}

function paintMatches(context, prompt, matches, colours, width, yOf) {
  context.fillStyle = colours.ink;
  for (const { from } of matches) context.fillRect(width - 4, yOf(runOf(prompt.tokenAt, from)), 4, 1.5);
}
