// Search in the document's text, without regard to case.

const MOST_MATCHES = 10000;

/** The search: {box, input, clear}; `onfind` gets all matches [{from, to}] and the number of the current one, or -1. */
function searchBox(trace, onfind) {
  const input = element("input", { type: "search", id: "search", placeholder: "Search", "aria-label": "Search in the document", autocomplete: "off", spellcheck: "false" });
  const status = element("output", { class: "small faint number", id: "matches" });
  let [matches, current] = [[], -1];
  const show = () => {
    const many = matches.length === MOST_MATCHES ? `${count(MOST_MATCHES)} or more` : count(matches.length);
    status.value = !input.value ? "" : matches.length ? `${count(current + 1)} of ${many}` : "None";
    onfind(matches, current);
  };
  const search = () => {
    matches = matchesOf(trace.prompt.text, input.value);
    current = matches.length ? 0 : -1;
    show();
  };
  const step = (by) => {
    if (!matches.length) return;
    current = (current + by + matches.length) % matches.length;
    show();
  };
  const clear = () => {
    if (!input.value) return false;
    input.value = "";
    search();
    return true;
  };
  input.addEventListener("input", search);
  input.addEventListener("keydown", (event) => event.key === "Enter" && step(event.shiftKey ? -1 : 1));
  return { box: element("div", { class: "search row", role: "search" }, input, status), input, clear };
}

function matchesOf(text, wanted) {
  if (!wanted) return [];
  const pattern = new RegExp(escapedPattern(wanted), "giu");
  const found = [];
  for (const match of text.matchAll(pattern)) {
    found.push({ from: match.index, to: match.index + match[0].length });
    if (found.length === MOST_MATCHES) break;
  }
  return found;
}
