// Keys, and the list of them.

const KEY_LIST = [
  ["\u2190 \u2192", "go through the answer's tokens"],
  ["Shift \u2190 \u2192", "select a span of them"],
  ["Esc", "leave the search; select the whole answer"],
  ["n p", "next, previous lit passage"],
  ["N P", "next, previous passage that is missed most"],
  ["c s m", "show or hide chosen, stood for, missed"],
  ["/", "search in the document; Enter, Shift Enter: next, previous"],
  ["?", "this list"],
];

/** A dialog that lists the keys. */
function keyDialog() {
  const rows = KEY_LIST.map(([keys, what]) => element("div", {}, element("dt", {}, keys.split(" ").map((key) => element("kbd", {}, key))), element("dd", {}, what)));
  const dialog = element("dialog", { id: "keys", "aria-labelledby": "keys-title" },
    element("h2", { id: "keys-title" }, "Keys"), element("dl", {}, rows),
    element("form", { method: "dialog" }, element("button", {}, "Close")));
  return dialog;
}

/** Run the action of a key: a map from `KeyboardEvent.key` to a function of the event. */
function listenToKeys(actions, dialog) {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || dialog.open) return;
    const typing = event.target.closest("input, select, textarea");
    if (typing && event.key !== "Escape") return;
    const action = actions[event.key];
    if (!action) return;
    event.preventDefault();
    action(event);
  });
}
