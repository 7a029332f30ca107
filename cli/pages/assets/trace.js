// The page of a trace: what is selected, and everything that is drawn anew when that changes.

const trace = readTrace(pageData());
const state = {
  selection: { tokens: null, layer: null, head: null },
  kinds: { chosen: true, stood_for: true, missed: trace.truth },
  passage: null,
  lit: { passages: new Map(), ordered: [], order: [], brightest: 0, elsewhere: {} },
  matches: [],
  match: -1,
};

const pane = documentPane(trace, (passage) => pickPassage(passage, false));
const map = documentMap(trace, pane);
const answer = answerBox(trace, (tokens) => select({ tokens }));
const heads = headChoice(trace, select);
const numbers = numbersBox(trace, switchKind);
const sources = sourceList(trace, (passage) => pickPassage(passage, true));
const list = passageList(trace, (passage) => pickPassage(passage, true));
const search = searchBox(trace, find);
const dialog = keyDialog();
const position = element("output", { class: "small faint number", id: "position" });
const jumps = [["Previous", "\u2191", -1], ["Next", "\u2193", 1]].map(([name, arrow, by]) =>
  element("button", { type: "button", class: "plain", "aria-label": `${name} lit passage`, onclick: () => jump(by) }, arrow));

function select(change) {
  Object.assign(state.selection, change);
  answer.show(state.selection.tokens);
  relight();
}

function switchKind(kind) {
  if (kind === "missed" && !trace.truth) return;
  state.kinds[kind] = !state.kinds[kind];
  relight();
}

/** Light the document, the map, the answer and the heads by what is selected, and show its numbers. */
function relight() {
  const { selection, kinds } = state;
  const shares = sharesOf(trace, selection);
  const lit = litPassages(shares, kinds);
  state.lit = lit;
  state.shares = shares;
  pane.light(lit.passages, lit.brightest);
  map.draw({ passages: shares.passages, brightest: lit.brightest, kinds });
  underlineTokens(trace, answer.options, kinds);
  heads.show(selection, kinds);
  numbers.show(selection, shares, kinds);
  list.show(lit, kinds);
  list.pick(state.passage, shares.passages.get(state.passage));
  mark();
  showPosition();
}

function litPassages(shares, kinds) {
  const found = [...shares.passages].map(([passage, parts]) => ({ passage, ...shown(parts, kinds) })).filter(({ sum }) => sum > 0);
  const ordered = [...found].sort((a, b) => b.sum - a.sum || a.passage - b.passage);
  const order = found.map(({ passage }) => passage).sort((a, b) => a - b);
  return { passages: new Map(found.map((one) => [one.passage, one])), ordered, order, brightest: ordered[0]?.sum ?? 0, elsewhere: shares.elsewhere };
}

/** Outline a passage and show it in full, or none for null; `scroll` to it, or to what is told of it. */
function pickPassage(passage, scroll) {
  state.passage = passage;
  pane.choose(passage);
  list.pick(passage, state.shares.passages.get(passage));
  if (passage === null) return showPosition();
  if (scroll) pane.scrollTo(passage);
  else list.reveal();
  return showPosition();
}

/** To the next or previous lit passage (or one that is missed most), from the one that is picked or else from what is seen. */
function jump(by, missed = false) {
  const order = missed ? state.lit.order.filter((passage) => state.lit.passages.get(passage).kind === "missed") : state.lit.order;
  if (!order.length) return;
  const from = state.passage ?? trace.prompt.passageOfToken(Math.floor(pane.seen()[0] * trace.n_context)) - (by > 0 ? 1 : 0);
  const after = by > 0 ? order.find((passage) => passage > from) : order.findLast((passage) => passage < from);
  pickPassage(after ?? order.at(by > 0 ? 0 : -1), true);
}

function showPosition() {
  const { order } = state.lit;
  const at = order.indexOf(state.passage);
  position.value = at < 0 ? `${count(order.length)} lit` : `${count(at + 1)} of ${count(order.length)} lit`;
}

function find(matches, current) {
  Object.assign(state, { matches, match: current });
  map.draw({ matches });
  mark();
  if (current >= 0) pane.scrollTo(trace.prompt.passageOfText(matches[current].from));
}

/** Mark the largest tokens of a single record, and the match that the search is at. */
function mark() {
  const { tokenAt } = trace.prompt;
  const ranges = topTokens(trace, state.selection)
    .filter(({ kind }) => state.kinds[kind])
    .map(({ token, kind }) => ({ from: tokenAt[token], to: tokenAt[token + 1], kind }));
  const match = state.matches[state.match];
  pane.mark(match ? [...ranges, { ...match, kind: "match" }] : ranges);
}

function header() {
  const facts = [trace.index, trace.model, `${trace.method}${trace.residual ? " with residual" : ""} at ${trace.budgetText}`, `${count(trace.n_context)} tokens`];
  return element("header", {}, element("p", { class: "small faint facts" }, facts.map((fact) => quoted(fact))),
    element("div", { class: "row no-print" }, search.box, element("span", { class: "row jump" }, position, jumps),
      themeButton(() => map.draw({ colours: null })),
      element("button", { type: "button", class: "plain", id: "help", "aria-label": "Keys", onclick: () => dialog.showModal() }, "?")));
}

function sidebar() {
  return element("aside", { "aria-label": "Question, answer and numbers" },
    element("section", {}, element("h3", {}, "Question"), element("h1", { id: "question", lang: "", dir: "auto" }, visible(trace.question))),
    element("section", {}, element("h3", { class: "row spread" }, "Answer", element("button", { type: "button", class: "plain no-print", id: "whole", onclick: answer.whole }, "Whole answer")), answer.box),
    sources, comparedAnswers(trace), numbers.box, heads.box, list.box);
}

document.body.append(header(), element("main", {}, pane.pane, map.column, sidebar()), dialog);
pane.pane.addEventListener("scroll", map.follow, { passive: true });
listenToKeys({
  ArrowLeft: (event) => answer.move(-1, event.shiftKey),
  ArrowRight: (event) => answer.move(1, event.shiftKey),
  n: () => jump(1),
  p: () => jump(-1),
  N: () => jump(1, true),
  P: () => jump(-1, true),
  c: () => switchKind("chosen"),
  s: () => switchKind("stood_for"),
  m: () => switchKind("missed"),
  "/": () => search.input.focus(),
  "?": () => dialog.showModal(),
  Escape: () => {
    if (search.clear() || document.activeElement === search.input) return answer.box.focus({ preventScroll: true });
    pickPassage(null, false);
    return answer.whole();
  },
}, dialog);
relight();
if (trace.sources.length) pane.scrollTo(trace.prompt.passageOfToken(trace.sources[0].tokens[0]));
else if (state.lit.ordered.length) pane.scrollTo(state.lit.ordered[0].passage);
