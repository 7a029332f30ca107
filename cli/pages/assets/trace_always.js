// The ends of the document that every step reads, sinks and tail: they are marked and named, since nothing lights them.

/** "always read: the last 128 tokens". */
function alwaysLabel(side, tokens) {
  return `always read: the ${side} ${tokens === 1 ? "token" : `${count(tokens)} tokens`}`;
}

/**
 * The ends that a trace has: [{side, label, passage, from, to, marks}], in tokens. `passage` is the one where the middle begins
 * or ends; `marks` are places in the text, [{passage, at, kind, label}], which belong to the passage on their side.
 */
function alwaysRead({ n_context, n_sinks, n_tail, prompt }) {
  const last = prompt.tokenAt.length - 1;
  const ends = [];
  const tail = n_context - n_tail;
  if (n_sinks > 0 && last > 0) {
    const [label, passage] = [alwaysLabel("first", n_sinks), prompt.passageOfToken(Math.min(n_sinks, last) - 1)];
    const end = { passage, at: prompt.tokenAt[Math.min(n_sinks, last)], kind: "sinks-end", label: null };
    ends.push({ side: "sinks", label, passage, from: 0, to: n_sinks, marks: [{ passage: 0, at: 0, kind: "sinks", label }, end] });
  }
  if (n_tail > 0 && tail < last) {
    const [label, passage] = [alwaysLabel("last", n_tail), prompt.passageOfToken(tail)];
    ends.push({ side: "tail", label, passage, from: tail, to: n_context, marks: [{ passage, at: prompt.tokenAt[tail], kind: "tail", label }] });
  }
  return ends;
}

/** A mark has no text of its own, so that what is copied, searched and compared stays the document's: the style shows its name. */
function alwaysMark({ kind, label }) {
  return element("span", { class: "always-mark", dataset: { always: kind }, role: label && "img", "aria-label": label, "aria-hidden": !label && "true" });
}

/** Rule the blocks that lie in an end as a whole; in the one where it meets the middle, its mark does. */
function ruleAlwaysRead(ends, blocks) {
  for (const { side, passage } of ends) {
    blocks.forEach(({ first, element: block }, number) => {
      const next = blocks[number + 1]?.first ?? Infinity;
      const within = side === "sinks" ? next <= passage : first > passage;
      if (within) block.classList.add("always");
      else if (first <= passage && passage < next) block.classList.add("partly-always");
    });
  }
}

/** A button above or below the map that names an end of it, and goes there. */
function alwaysButton(end, scrollTo) {
  return end && element("button", { type: "button", class: "plain always-end", "aria-label": end.label, title: end.label, onclick: () => scrollTo(end.passage) }, "always read");
}

/** How much of what is selected is on text that is never lit: {box, show}. */
function alwaysShare(trace) {
  const read = [trace.n_sinks > 0 && "sinks", trace.n_tail > 0 && "tail", "question"].filter(Boolean).join(", ");
  const box = element("p", { class: "always-share", id: "always-share", "aria-live": "polite" });
  const show = (share) => {
    box.hidden = !(share > 0);
    box.classList.toggle("most", share > 0.5);
    box.replaceChildren(element("strong", { class: "number" }, percent(share)), ` is on text that is always read: ${read} and answer. It is neither lit nor under “Where it looks”: the trace has its sum, not what each sentence gets.`);
  };
  return { box, show };
}
