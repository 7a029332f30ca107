// A map of numbers by row and column, with a bar that says what its colours are.

const MAP = { left: 44, top: 8, bottom: 44, cell: 14, widest: 48, width: 360 };

/**
 * A heat map of values [rows][columns]; null cells are left out. `measure` is {name, text: number => string}; rows and
 * columns are {name, of: labels}. `scale` is [lowest, highest] of the colours, for maps that are compared; null: the
 * values' own.
 */
function heatMap(title, values, rows, columns, measure, scale = null) {
  const known = values.flat().filter((value) => value !== null);
  const [low, high] = scale ?? (known.length ? [Math.min(...known), Math.max(...known)] : [0, 1]);
  const across = Math.min(MAP.widest, (MAP.width - MAP.left) / columns.of.length);
  const [right, bottom] = [MAP.left + across * columns.of.length, MAP.top + MAP.cell * rows.of.length];
  const marks = [];
  const cells = values.flatMap((line, row) => line.map((value, column) => {
    if (value === null) return null;
    const node = drawn("rect", { x: MAP.left + across * column, y: MAP.top + MAP.cell * row, width: across, height: MAP.cell, class: "heat" });
    node.style.setProperty("--heat", `${100 * heatOf(value, low, high)}%`);
    marks.push({ node, text: `${rows.name} ${rows.of[row]}, ${columns.name} ${columns.of[column]}: ${measure.name} ${measure.text(value)}` });
    return node;
  })).filter((cell) => cell);
  const labels = [...rows.of.map((label, row) => (row % Math.ceil(rows.of.length / 40) ? null : drawn("text", { x: MAP.left - 5, y: MAP.top + MAP.cell * (row + 0.5) + 4, "text-anchor": "end" }, String(label)))),
    ...columns.of.map((label, column) => (column % Math.ceil(columns.of.length / 12) ? null : drawn("text", { x: MAP.left + across * (column + 0.5), y: bottom + 14, "text-anchor": "middle" }, String(label)))),
    drawn("text", { x: (MAP.left + right) / 2, y: bottom + 32, "text-anchor": "middle", class: "name" }, columns.name),
    drawn("text", { transform: `translate(11 ${(MAP.top + bottom) / 2}) rotate(-90)`, "text-anchor": "middle", class: "name" }, rows.name)];
  const picture = pointedFigure(title, right + 8, bottom + MAP.bottom, drawn("g", { class: "map-of" }, cells, labels.filter((label) => label)), marks);
  picture.classList.add("heat-map");
  picture.querySelector("svg").style.maxWidth = `${right + 8}px`;
  picture.append(heatBar(measure, low, high));
  return picture;
}

function heatOf(value, low, high) {
  return high === low ? 0.5 : (value - low) / (high - low);
}

function heatBar(measure, low, high) {
  const parts = Array.from({ length: 12 }, (_, at) => {
    const part = element("span", { class: "heat" });
    part.style.setProperty("--heat", `${(100 * at) / 11}%`);
    return part;
  });
  return element("div", { class: "heat-bar small" }, element("span", { class: "number" }, measure.text(low)), element("span", { class: "parts", "aria-hidden": "true" }, parts),
    element("span", { class: "number" }, measure.text(high)), element("span", { class: "faint" }, measure.name));
}
