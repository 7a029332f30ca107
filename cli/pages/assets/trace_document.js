// The prompt as it reads, a span per passage; blocks outside of the window are not laid out until they come near it.

const MOST_IN_BLOCK = 4000; // characters, where a text has no paragraphs
const LEAST_LIGHT = 0.05;

/** The document: {pane, light, choose, mark, scrollTo, scrollToShare, seen}; `onpick` gets the passage that is clicked. */
function documentPane(trace, onpick) {
  const { prompt, always } = trace;
  const own = marksOf(always);
  const spans = Array.from({ length: prompt.passages }, (_, passage) =>
    element("span", { class: "passage", dir: "auto", dataset: { passage } }, passageNodes(prompt, passage, own.get(passage))));
  const blocks = blocksOf(prompt, spans);
  ruleAlwaysRead(always, blocks);
  const pane = element("div", { class: "document", id: "document", lang: "", role: "region", tabindex: "0", "aria-label": "The document" },
    blocks.map((block) => block.element));
  pane.addEventListener("click", (event) => {
    const span = event.target.closest(".passage");
    if (span && getSelection().isCollapsed) onpick(Number(span.dataset.passage));
  });
  for (const passage of trace.without?.passages ?? []) removedPassage(prompt, spans, passage);
  return { pane, ...lighting(spans), ...marking(prompt, spans, own), ...scrolling(prompt, spans, blocks, pane) };
}

/** Paragraphs: [{first, element}], each up to a line's end. */
function blocksOf(prompt, spans) {
  const blocks = [];
  let first = 0;
  for (let passage = 0; passage < spans.length; passage += 1) {
    const size = prompt.from(passage + 1) - prompt.from(first);
    const ends = prompt.text[prompt.from(passage + 1) - 1] === "\n";
    if (!ends && size < MOST_IN_BLOCK && passage + 1 < spans.length) continue;
    const made = element("div", { class: "block", dir: "auto" }, spans.slice(first, passage + 1));
    made.style.containIntrinsicHeight = `auto ${(Math.ceil(size / 80) * 1.7).toFixed(1)}rem`;
    blocks.push({ first, element: made });
    first = passage + 1;
  }
  return blocks;
}

/** Wherever a text that was taken out stands in the prompt, its passages are struck through; white space is any. */
function removedPassage(prompt, spans, text) {
  const words = text.split(/\s+/).filter(Boolean).map(escapedPattern);
  if (!words.length) return;
  for (const found of prompt.text.matchAll(new RegExp(words.join("\\s+"), "gu"))) {
    const last = prompt.passageOfText(found.index + found[0].length - 1);
    for (let passage = prompt.passageOfText(found.index); passage <= last; passage += 1) spans[passage].classList.add("removed");
  }
}

function lighting(spans) {
  let lit = [];
  let chosen = null;
  /** Light passages: a map from passage to {kind, sum}; the brightest is `brightest`. */
  const light = (passages, brightest) => {
    for (const passage of lit) if (!passages.has(passage)) unlight(spans[passage]);
    lit = [...passages.keys()];
    for (const [passage, { kind, sum }] of passages) setLight(spans[passage], kind, sum, brightest);
  };
  /** Outline one passage, or none for null. */
  const choose = (passage) => {
    if (chosen !== null) spans[chosen].classList.remove("picked");
    if (passage !== null) spans[passage].classList.add("picked");
    chosen = passage;
  };
  return { light, choose };
}

/** Colour by kind, brighter with the root of a share: the eye sees small ones too. */
function setLight(span, kind, sum, brightest) {
  const light = brightest > 0 ? Math.max(LEAST_LIGHT, Math.sqrt(sum / brightest)) : 0;
  span.dataset.kind = kind;
  span.style.setProperty("--light", light.toFixed(3));
}

function unlight(span) {
  delete span.dataset.kind;
  span.style.removeProperty("--light");
}

/** Marks of what is always read, by the passage that they are in. */
function marksOf(always) {
  const of = new Map();
  for (const mark of always.flatMap(({ marks }) => marks)) of.set(mark.passage, [...(of.get(mark.passage) ?? []), mark]);
  return of;
}

function marking(prompt, spans, always) {
  let marked = new Set();
  /** Mark parts of the text: [{from, to, kind}] in characters of the prompt; what was marked before is not any more. */
  const mark = (ranges) => {
    const of = new Map();
    for (const range of ranges) {
      const last = prompt.passageOfText(Math.max(range.from, range.to - 1));
      for (let passage = prompt.passageOfText(range.from); passage <= last; passage += 1) {
        of.set(passage, [...(of.get(passage) ?? []), range]);
      }
    }
    for (const passage of marked) if (!of.has(passage)) spans[passage].replaceChildren(...passageNodes(prompt, passage, always.get(passage)));
    for (const [passage, own] of of) spans[passage].replaceChildren(...passageNodes(prompt, passage, always.get(passage), own));
    marked = new Set(of.keys());
  };
  return { mark };
}

/** A passage's text cut where ranges begin and end, and where `always` has marks of what is always read. */
function passageNodes(prompt, passage, always = [], ranges = []) {
  if (!always.length && !ranges.length) return visible(prompt.textOf(passage));
  const [start, end] = [prompt.from(passage), prompt.from(passage + 1)];
  const cuts = new Set([start, end, ...always.map(({ at }) => at)]);
  for (const { from, to } of ranges) for (const at of [from, to]) if (at > start && at < end) cuts.add(at);
  const ordered = [...cuts].sort((a, b) => a - b);
  return ordered.flatMap((from, number) => [
    ...always.filter(({ at }) => at === from).map(alwaysMark),
    ...markedNodes(prompt.text.slice(from, ordered[number + 1] ?? from), from, ranges),
  ]);
}

function markedNodes(text, from, ranges) {
  const nodes = visible(text);
  const kinds = ranges.filter((range) => range.from <= from && from < range.to).map((range) => range.kind);
  return nodes.length && kinds.length ? [element("mark", { class: kinds.join(" ") }, nodes)] : nodes;
}

function scrolling(prompt, spans, blocks, pane) {
  const firsts = blocks.map((block) => block.first);
  /** Bring a passage to the middle. */
  const scrollTo = (passage) => spans[passage].scrollIntoView({ block: "center" });
  /** Scroll to a place, as a share of the prompt's tokens from 0 to 1. */
  const scrollToShare = (share) => {
    const passage = prompt.passageOfToken(Math.floor(share * (prompt.tokenAt.length - 1)));
    const block = blocks[runOf(firsts, passage)];
    pane.scrollTop = topOf(block) + within(block, passage) - pane.clientHeight / 2;
  };
  const topOf = (block) => block.element.offsetTop - pane.offsetTop;
  const within = (block, passage) => {
    const end = firsts[firsts.indexOf(block.first) + 1] ?? spans.length;
    const [from, to] = [prompt.from(block.first), prompt.from(end)];
    return ((prompt.from(passage) - from) / Math.max(1, to - from)) * block.element.offsetHeight;
  };
  /** The share of the prompt at a height of the pane's content. */
  const shareAt = (height) => {
    let low = 0;
    let high = blocks.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (topOf(blocks[middle]) <= height) low = middle;
      else high = middle - 1;
    }
    const block = blocks[low];
    const [from, to] = [prompt.starts[block.first], prompt.starts[firsts[low + 1] ?? spans.length]];
    const part = Math.min(1, Math.max(0, (height - topOf(block)) / Math.max(1, block.element.offsetHeight)));
    return (from + part * (to - from)) / Math.max(1, prompt.tokenAt.length - 1);
  };
  /** What is seen, as shares of the prompt: [top, bottom]. */
  const seen = () => [shareAt(pane.scrollTop), shareAt(pane.scrollTop + pane.clientHeight)];
  return { scrollTo, scrollToShare, seen };
}
