// Tables whose columns say how their cells are written, and which can be sorted.

/**
 * A table in a frame that scrolls sideways. A column is {name, value: row => cell, text: (cell, row) => string, number: bool};
 * `text` may be left out for strings. A click on a column's name sorts by it.
 */
function dataTable(caption, columns, rows) {
  const body = element("tbody");
  const heads = columns.map((column) => element("th", { scope: "col", class: column.number ? "number" : null }));
  heads.forEach((head, at) => head.append(element("button", { class: "sort", type: "button", onclick: () => sort(at) }, columns[at].name)));
  const fill = (ordered) => body.replaceChildren(...ordered.map((row) => element("tr", {}, columns.map((column) => dataCell(column, row)))));
  const sort = (at) => {
    const direction = heads[at].getAttribute("aria-sort") === "descending" ? "ascending" : "descending";
    heads.forEach((head, other) => (other === at ? head.setAttribute("aria-sort", direction) : head.removeAttribute("aria-sort")));
    fill([...rows].sort((a, b) => (direction === "ascending" ? 1 : -1) * compareCells(columns[at].value(a), columns[at].value(b))));
  };
  fill(rows);
  return element("div", { class: "scroll" }, element("table", {}, element("caption", {}, caption), element("thead", {}, element("tr", {}, heads)), body));
}

function dataCell(column, row) {
  const value = column.value(row);
  const text = column.text ? column.text(value, row) : String(value);
  return element("td", { class: column.number ? "number" : null }, column.number ? text : quoted(text));
}

/** What is not there comes last when the largest come first. */
function compareCells(a, b) {
  if (a === b) return 0;
  if (a === null || a === undefined) return -1;
  if (b === null || b === undefined) return 1;
  return a < b ? -1 : 1;
}
