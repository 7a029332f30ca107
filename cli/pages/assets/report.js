// The frame of a report's page.

/** Put a page together: its title, facts as short texts, and sections. */
function showReport(title, facts, ...sections) {
  document.body.append(
    element("header", {}, element("div", {}, element("h1", {}, quoted(title)), element("p", { class: "facts small faint" }, facts.filter((fact) => fact).map((fact) => quoted(fact)))), themeButton()),
    element("main", {}, sections.flat(Infinity)));
}

function section(title, ...content) {
  return element("section", {}, element("h2", {}, quoted(title)), content.flat(Infinity));
}

/** Give each row its budget as text: as numbers 1 token and a share of 1.0 are the same. */
function tellBudgets(rows, texts) {
  rows.forEach((row, at) => {
    row.budgetText = texts[at];
  });
}

function withBudget(name, row) {
  return row.budgetText ? `${name} at ${row.budgetText}` : name;
}

/** A label with a list to choose from; `onchange` gets the number of the option, at once too for the first. */
function choice(label, id, options, onchange, first = 0) {
  const select = element("select", { id, onchange: () => onchange(Number(select.value)) }, options.map((option, at) => element("option", { value: at, selected: at === first }, option)));
  onchange(first);
  return element("p", { class: "choice no-print" }, element("label", { for: id }, label), select);
}

/** A command to type, as it is. */
function typed(command) {
  return element("code", {}, command);
}

/** A number for an axis or a sentence: as few digits as it needs. */
function plain(value) {
  return String(Number(value.toPrecision(6)));
}

function axisPercent(share) {
  return `${Number((100 * share).toPrecision(6))}%`;
}
