// Which layers and KV heads are looked at: two lists to choose from, and a cell for every head.

/** The choice: {box, show}; `onselect` gets {layer, head}, null for all. */
function headChoice(trace, onselect) {
  const layers = choiceOf("layer", "Layer", "All layers", trace.layers);
  const heads = choiceOf("head", "KV head", "All KV heads", [...Array(trace.kv_heads).keys()]);
  const valueOf = (select) => (select.value === "" ? null : Number(select.value));
  for (const { select } of [layers, heads]) {
    select.addEventListener("change", () => onselect({ layer: valueOf(layers.select), head: valueOf(heads.select) }));
  }
  const grid = headGrid(trace, onselect);
  const box = element("div", { class: "heads" }, element("div", { class: "row no-print" }, layers.label, heads.label), grid.box);
  const show = (selection, kinds) => {
    layers.select.value = selection.layer ?? "";
    heads.select.value = selection.head ?? "";
    grid.show(selection, kinds);
  };
  return { box, show };
}

function choiceOf(id, name, all, numbers) {
  const options = numbers.map((number) => element("option", { value: number }, `${name} ${number}`));
  const select = element("select", { id, "aria-label": name }, element("option", { value: "" }, all), options);
  return { select, label: select };
}

/** A row per KV head, a column per layer; a cell is as bright as what its head attends to in the kinds that are shown. */
function headGrid(trace, onselect) {
  const cells = new Map();
  const rows = [...Array(trace.kv_heads).keys()].map((head) => element("div", { class: "cells" }, trace.layers.map((layer) => {
    const cell = element("span", { class: "cell", title: `Layer ${layer}, KV head ${head}`, dataset: { layer, head } });
    cells.set(`${layer} ${head}`, cell);
    return cell;
  })));
  const box = element("div", { class: "grid", "aria-hidden": "true" }, rows,
    element("p", { class: "small faint axis" }, `Layers ${trace.layers[0] ?? ""} to ${trace.layers.at(-1) ?? ""} across, KV heads down`));
  let current = { layer: null, head: null };
  box.addEventListener("click", ({ target }) => {
    if (!target.dataset.layer) return;
    const [layer, head] = [Number(target.dataset.layer), Number(target.dataset.head)];
    const again = current.layer === layer && current.head === head;
    onselect(again ? { layer: null, head: null } : { layer, head });
  });
  const show = (selection, kinds) => {
    current = selection;
    lightCells(headShares(trace, selection.tokens), cells, kinds);
    for (const cell of cells.values()) {
      const [layer, head] = [Number(cell.dataset.layer), Number(cell.dataset.head)];
      const filtered = selection.layer !== null || selection.head !== null;
      const inside = (selection.layer ?? layer) === layer && (selection.head ?? head) === head;
      cell.classList.toggle("selected", filtered && inside);
    }
  };
  return { box, show };
}

/** For every layer and KV head the mean shares of a span of tokens, or of the whole answer: Map: "layer head" -> shares. */
function headShares(trace, tokens) {
  const group = tokens ? trace.records : trace.byHead;
  const shares = new Map();
  for (let row = 0; row < group.rows; row += 1) {
    if (tokens && (group.token[row] < tokens[0] || group.token[row] > tokens[1])) continue;
    const key = `${group.layer[row]} ${group.kv_head[row]}`;
    let sums = shares.get(key);
    if (!sums) shares.set(key, (sums = [0, 0, 0]));
    const count = tokens ? tokens[1] - tokens[0] + 1 : 1;
    for (let kind = 0; kind < 3; kind += 1) sums[kind] += group[KINDS[kind]][row] / count;
  }
  return shares;
}

function lightCells(shares, cells, kinds) {
  const found = [...shares].map(([key, sums]) => [key, shown(sums, kinds)]);
  const brightest = Math.max(0, ...found.map(([, { sum }]) => sum));
  for (const [key, { kind, sum }] of found) {
    const cell = cells.get(key);
    if (kind && sum > 0) setLight(cell, kind, sum, brightest);
    else unlight(cell);
    cell.title = `Layer ${cell.dataset.layer}, KV head ${cell.dataset.head}: ${percent(sum)}`;
  }
}
