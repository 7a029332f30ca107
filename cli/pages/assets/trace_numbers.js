// The numbers of what is selected, and the switches of the three kinds.

const KIND_MEANINGS = {
  chosen: "attended to exactly, of what the method chose",
  stood_for: "not read itself: centroids gave this much of its weight",
  missed: "what dense attention gives and neither a chosen token nor a centroid does",
};
const UNKNOWN = "Not known: the trace was made without --truth, so dense attention was not computed beside it.";
const FROM_THE_SECOND = "Recall, mass, error and KV fraction leave out the answer's first token: it comes from the question's prefill, which by default attends to everything.";
const MEASURE_LABELS = [["recall", "Recall", 3], ["attention_mass", "Mass", 3], ["output_error", "Error", 4], ["kv_fraction", "KV fraction", 3]];

/** The numbers: {box, show}; `onswitch` gets a kind whose switch was pressed. */
function numbersBox(trace, onswitch) {
  const title = element("h2", { id: "selection", "aria-live": "polite" });
  const bar = element("div", { class: "bar", "aria-hidden": "true" });
  const rows = Object.fromEntries(KINDS.map((kind) => [kind, kindRow(trace, kind, onswitch)]));
  const exact = element("output", { class: "number", id: "share-exact" });
  const always = alwaysShare(trace);
  const measures = Object.fromEntries(MEASURE_LABELS.map(([name]) => [name, element("dd", { class: "number", id: name })]));
  const scope = element("p", { class: "small faint", id: "measures-scope" });
  const box = element("section", { class: "numbers", "aria-labelledby": "selection" }, title, bar, always.box,
    KINDS.map((kind) => rows[kind].box),
    element("div", { class: "share" }, element("span", { class: "label" }, swatch("exact"), "Always read"), exact),
    trace.truth ? null : element("p", { class: "small faint", id: "no-truth" }, UNKNOWN),
    element("dl", { class: "measures" }, MEASURE_LABELS.map(([name, label]) => element("div", {}, element("dt", {}, label), measures[name]))), scope);
  const show = (selection, shares, kinds) => {
    title.textContent = describeSelection(trace, selection);
    exact.value = percent(shares.exact);
    always.show(shares.exact);
    for (const kind of KINDS) rows[kind].show(shares[kind], kinds[kind]);
    showBar(bar, shares);
    const values = measuresOf(trace, selection);
    for (const [name, , digits] of MEASURE_LABELS) measures[name].textContent = fixed(values[name], digits);
    const all = selection.tokens || trace.answer_tokens.length === 1;
    scope.textContent = !shares.rows ? "The trace has nothing recorded of this." : all ? "" : FROM_THE_SECOND;
  };
  return { box, show };
}

function swatch(kind) {
  return element("span", { class: "swatch", dataset: { kind } });
}

function kindRow(trace, kind, onswitch) {
  const value = element("output", { class: "number", id: `share-${kind}` });
  const button = element("button", { type: "button", class: "switch", id: `switch-${kind}`, title: KIND_MEANINGS[kind], onclick: () => onswitch(kind) },
    swatch(kind), KIND_NAMES[kind]);
  if (kind === "missed" && !trace.truth) [button.disabled, button.title] = [true, UNKNOWN];
  const show = (share, on) => {
    value.value = percent(share);
    button.setAttribute("aria-pressed", String(on));
  };
  return { box: element("div", { class: "share" }, button, value), show };
}

function showBar(bar, shares) {
  const parts = [...KINDS, "exact"].filter((kind) => shares[kind] > 0);
  bar.replaceChildren(...parts.map((kind) => {
    const part = element("span", { dataset: { kind }, title: `${KIND_NAMES[kind] ?? "Always read"}: ${percent(shares[kind])}` });
    part.style.flexGrow = shares[kind];
    return part;
  }));
}

/** "Tokens 3 to 5 of 20, layer 7, all KV heads". */
function describeSelection(trace, { tokens, layer, head }) {
  const of = trace.answer_tokens.length;
  const span = !tokens ? "Whole answer" : tokens[0] === tokens[1] ? `Token ${tokens[0] + 1} of ${of}` : `Tokens ${tokens[0] + 1} to ${tokens[1] + 1} of ${of}`;
  const where = [layer === null ? "all layers" : `layer ${layer}`, head === null ? "all KV heads" : `KV head ${head}`];
  return [span, ...where].join(", ");
}
