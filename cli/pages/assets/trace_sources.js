// The passages of the document that the answer attended to most, by its retrieval heads, with their files.

const FIRST_SOURCES = 3;

/** The list of sources; `onpick` gets the passage in which the clicked source begins. */
function sourceList(trace, onpick) {
  const rows = trace.sources.map((source) => sourceRow(source, trace.prompt.passageOfToken(source.tokens[0]), onpick));
  for (const row of rows.slice(FIRST_SOURCES)) row.hidden = true;
  const more = element("button", {
    type: "button", class: "plain no-print", hidden: rows.length <= FIRST_SOURCES, id: "all-sources",
    onclick: () => {
      for (const row of rows) row.hidden = false;
      more.hidden = true;
    },
  }, `All ${rows.length} sources`);
  return element("section", { class: "list", "aria-labelledby": "sources-title" },
    element("h2", { id: "sources-title" }, "Sources"),
    rows.length ? element("ol", { class: "sources", id: "sources" }, rows) : element("p", { class: "small faint" }, "The answer attended to no passage of the document."), more);
}

function sourceRow(source, passage, onpick) {
  const button = element("button", { type: "button", class: "plain", dataset: { passage }, onclick: () => onpick(passage) },
    element("span", { class: "number" }, source.score.toFixed(3)), quoted(placeOf(source), { class: "snippet place" }),
    quoted(shortened(source.text), { class: "snippet below", lang: "" }));
  return element("li", {}, button);
}

/** "docs/a.md:3-5", or "paper.pdf p. 3", as `generate --sources` names it. */
function placeOf({ path, lines: [first, last], page }) {
  if (page !== null) return `${path} p. ${page}`;
  return `${path}:${first}${last > first ? `-${last}` : ""}`;
}
