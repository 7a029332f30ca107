// The passages that most attention falls on, what falls elsewhere, and one passage in full.

const FIRST_ROWS = 8;

/** The list: {box, show, pick, reveal}; `onpick` gets the passage whose row is clicked. */
function passageList(trace, onpick) {
  const rows = element("ol", { class: "passages" });
  const elsewhere = element("output", { class: "number", id: "elsewhere" });
  const more = element("button", { type: "button", class: "plain no-print", onclick: () => showAll(true) });
  const detail = element("div", { class: "detail", id: "detail", "aria-live": "polite" });
  let latest = null;
  const showAll = (all) => {
    rows.replaceChildren(...latest.ordered.slice(0, all ? undefined : FIRST_ROWS).map((one) => passageRow(trace, one, latest.brightest, onpick)));
    more.hidden = all || latest.ordered.length <= FIRST_ROWS;
    more.textContent = `All ${latest.ordered.length} listed passages`;
  };
  const show = (lit, kinds) => {
    latest = lit;
    showAll(false);
    elsewhere.value = percent(KINDS.reduce((sum, kind) => sum + (kinds[kind] && lit.elsewhere[kind] > 0 ? lit.elsewhere[kind] : 0), 0));
  };
  const pick = (passage, shares) => detail.replaceChildren(...(passage === null ? [] : passageDetail(trace, passage, shares)));
  const reveal = () => detail.scrollIntoView({ block: "nearest" });
  const box = element("section", { class: "list", "aria-labelledby": "list-title" },
    element("h2", { id: "list-title" }, "Where it looks"), detail, rows, more,
    element("div", { class: "share elsewhere" }, element("span", {}, "Elsewhere, in passages that are not listed"), elsewhere));
  return { box, show, pick, reveal };
}

function passageRow(trace, { passage, sum, kind }, brightest, onpick) {
  const bar = element("span", { class: "length", dataset: { kind } });
  bar.style.width = `${(100 * sum) / brightest}%`;
  const text = quoted(trace.prompt.quoteOf(passage, shortened(trace.prompt.textOf(passage)) || "\u23ce"), { class: "snippet", lang: "" });
  const button = element("button", { type: "button", class: "plain", dataset: { passage }, onclick: () => onpick(passage) },
    element("span", { class: "number" }, percent(sum)), text, bar);
  return element("li", {}, button);
}

/** One passage: where it stands, its three shares, and the command that asks without it. */
function passageDetail(trace, passage, shares) {
  const { prompt } = trace;
  const [first, last] = [prompt.first[passage], prompt.first[passage] + prompt.starts[passage + 1] - prompt.starts[passage] - 1];
  const numbers = KINDS.map((kind, at) => element("span", { class: "number", dataset: { share: kind } },
    swatch(kind), ` ${KIND_NAMES[kind]} `, shares ? percent(shares[at]) : kind === "missed" && !trace.truth ? "\u2013" : "not listed"));
  return [
    element("h3", {}, `Passage ${count(passage + 1)}, tokens ${count(first)} to ${count(last)}`),
    element("p", { class: "text", lang: "", dir: "auto" }, visible(prompt.quoteOf(passage))),
    element("p", { class: "row small" }, numbers),
    withoutButton(trace, passage),
  ].filter(Boolean);
}

function withoutButton(trace, passage) {
  // The turns before a chat's question are in no command.
  if (!trace.options) return null;
  const command = withoutCommand(trace, trace.prompt.textOf(passage));
  if (command === null) return element("p", { class: "small faint" }, "This passage cannot be named in a command.");
  const shownCommand = element("code", { class: "command", id: "command" }, visible(command));
  const copy = element("button", {
    type: "button", id: "copy",
    onclick: async () => {
      const copied = await copyText(command);
      if (!copied) getSelection().selectAllChildren(shownCommand);
      copy.textContent = copied ? "Copied" : "Selected: copy it";
    },
  }, "Copy command");
  return element("details", { class: "no-print" }, element("summary", { class: "small" }, "Ask without this passage"), shownCommand, copy);
}
