// The answer's tokens: a list box of which one token, a span, or everything is selected.

/** The answer: {box, show, move}; `onselect` gets [first, last] or null for the whole answer. */
function answerBox(trace, onselect) {
  const options = trace.answer_tokens.map((token, at) =>
    element("span", { class: token ? "token" : "token empty", role: "option", id: `token-${at}`, dataset: { at } }, visible(token)));
  const box = element("div", {
    class: "answer", id: "answer", lang: "", dir: "auto", role: "listbox", tabindex: "0",
    "aria-label": "Tokens of the answer", "aria-multiselectable": "true",
  }, options);
  let [anchor, focus] = [0, null];
  const select = (from, to) => {
    [anchor, focus] = [from, to];
    onselect([Math.min(from, to), Math.max(from, to)]);
  };
  const whole = () => {
    [anchor, focus] = [0, null];
    onselect(null);
  };
  /** Go to a token by a step, or with `extend` take in those up to it. */
  const move = (step, extend) => {
    const last = options.length - 1;
    if (last < 0) return;
    const to = focus === null ? (step > 0 ? 0 : last) : Math.min(last, Math.max(0, focus + step));
    select(extend && focus !== null ? anchor : to, to);
  };
  /** Show what is selected. */
  const show = (tokens) => {
    options.forEach((option, at) => option.setAttribute("aria-selected", tokens ? at >= tokens[0] && at <= tokens[1] : false));
    if (tokens && focus === null) [anchor, focus] = tokens;
    if (focus === null) box.removeAttribute("aria-activedescendant");
    else box.setAttribute("aria-activedescendant", `token-${focus}`);
    if (focus !== null) options[focus].scrollIntoView({ block: "nearest" });
  };
  listenToPointer(box, (at, extend) => (extend && focus !== null ? select(anchor, at) : select(at, at)), select);
  return { box, options, show, move, whole };
}

/** Clicks, shift-clicks, and text that is selected with the pointer. */
function listenToPointer(box, click, select) {
  const tokenOf = (node) => {
    const at = (node?.nodeType === Node.TEXT_NODE ? node.parentElement : node)?.closest?.(".token")?.dataset.at;
    return at === undefined ? null : Number(at);
  };
  box.addEventListener("mousedown", (event) => event.shiftKey && event.preventDefault());
  box.addEventListener("click", (event) => {
    const selection = getSelection();
    const at = tokenOf(event.target);
    if (selection.isCollapsed || event.shiftKey) {
      if (at !== null) click(at, event.shiftKey);
      return;
    }
    const [from, to] = [tokenOf(selection.anchorNode), tokenOf(selection.focusNode)];
    selection.removeAllRanges();
    if (from !== null && to !== null) select(from, to);
  });
}

/** A line under every token, as bright as what it attends to of the document in the kinds that are shown. */
function underlineTokens(trace, options, kinds) {
  const rows = options.map((_, row) => shown(KINDS.map((kind) => trace.byToken[kind][row]), kinds));
  const brightest = Math.max(...rows.map(({ sum }) => sum), 0);
  rows.forEach(({ kind, sum }, at) => (kind && sum > 0 ? setLight(options[at], kind, sum, brightest) : unlight(options[at])));
}

/** The answer with and without some passages, where the trace has both. */
function comparedAnswers(trace) {
  if (!trace.without) return null;
  const { answer, log_probability: [kept, lost], passages } = trace.without;
  const change = lost - kept;
  const summary = Number.isFinite(change)
    ? `Log-probability of the first answer: ${fixed(kept, 2)} with, ${fixed(lost, 2)} without: ${fixed(Math.abs(change), 2)} ${change < 0 ? "lower" : "higher"}.`
    : "The answer's log-probability is not known.";
  return element("section", { class: "without", "aria-label": "The answer without some passages" },
    element("div", { class: "answers" },
      element("div", {}, element("h3", {}, "With the passage"), element("p", { class: "text", id: "answer-with", lang: "", dir: "auto" }, visible(trace.answer))),
      element("div", {}, element("h3", {}, "Without it"), element("p", { class: "text", id: "answer-without", lang: "", dir: "auto" }, visible(answer)))),
    element("p", { class: "small number", id: "log-probability" }, summary),
    element("p", { class: "small faint" }, "Taken out, and struck through in the document: ", passages.map((text) => quoted(shortened(text), { class: "quote" }))));
}

/** The beginning of a text, on one line, cut between words where there is a space in its second half. */
function shortened(text, most = 90) {
  const line = text.replace(/\s+/g, " ").trim();
  const letters = [...line.slice(0, 2 * most)];
  if (letters.length <= most) return line;
  const space = letters.lastIndexOf(" ", most - 2);
  return space > most / 2 ? `${letters.slice(0, space).join("")} \u2026` : `${letters.slice(0, most - 1).join("")}\u2026`;
}
