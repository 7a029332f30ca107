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

/** A share of the document, or a number of its tokens, as the command line takes it. */
function budgetText(budget) {
  if (budget === null) return "";
  return Number.isInteger(budget) && budget !== 1 ? count(budget) : `${Number((100 * budget).toPrecision(6))}%`;
}

function withBudget(name, budget) {
  return budget === null ? name : `${name} at ${budgetText(budget)}`;
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
