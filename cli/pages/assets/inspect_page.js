// The page of `inspect`.

const { inspection, facts, positions, texts } = pageData();
const three = (value) => (value === null ? "none" : fixed(value, 3));
const megabytes = (bytes) => `${fixed(bytes / 1e6, 1)} MB`;

function column(name, text = count, title = name.replaceAll("_", " ")) {
  return { name: title, value: (row) => row[name], text, number: true };
}

function factSection() {
  const sizes = Object.entries(inspection.bytes).map(([name, size]) => ({ name, size }));
  return section("The index",
    element("dl", { class: "facts-list" }, Object.entries(facts).map(([name, fact]) => element("div", {}, element("dt", {}, name), element("dd", {}, quoted(fact))))),
    dataTable("What lies on disk", [{ name: "part", value: (row) => row.name }, { name: "size", value: (row) => row.size, text: megabytes, number: true }], sizes));
}

function layerPlot(title, rows, name, text, lines) {
  const drawnLines = lines.map(([label, valueOf], form) => ({
    name: label, form,
    points: rows(label).filter((row) => valueOf(row) !== null).map((row) => ({ x: row.layer, y: valueOf(row), text: `layer ${row.layer}, ${label}: ${name} ${text(valueOf(row))}` })),
  }));
  return linePlot(title, { name: "layer", text: plain }, { name, text: plain, fromZero: true }, drawnLines.filter((line) => line.points.length));
}

function levels(rows) {
  if (!rows.length) return [];
  const numbers = [...new Set(rows.map((row) => row.level))];
  const ofLevel = (label) => rows.filter((row) => label.startsWith(`level ${row.level} `));
  const spreads = numbers.flatMap((level) => [[`level ${level} keys`, (row) => row.key_spread], [`level ${level} values`, (row) => row.value_spread]]);
  const sizes = numbers.flatMap((level) => ["max", "p99", "median"].map((name) => [`level ${level} ${name}`, (row) => row[name]]));
  return [element("div", { class: "plots" }, layerPlot("Spread by layer: 0 where centroids are their tokens, 1 where they are no better than the mean", ofLevel, "spread", three, spreads),
    layerPlot("Tokens in a cluster, by layer", ofLevel, "tokens", count, sizes)),
  dataTable("Clusters over all KV heads; sizes in tokens", [column("layer"), column("level"), ...["clusters", "min", "median", "p99", "max", "empty"].map((name) => column(name)), column("single", count, "of one"), column("key_spread", three), column("value_spread", three)], rows)];
}

function blocks(rows) {
  const shown = rows.map((row, block) => ({ ...row, block, last: row.stop - 1, state: row.open ? "open" : "" }));
  return rows.length ? [dataTable("Blocks, clustered one by one", [column("block"), column("start", count, "from token"), column("last", count, "to"), column("tokens"), column("clusters", count, "clusters a KV head"), { name: "", value: (row) => row.state }], shown)] : [];
}

function lists(rows) {
  if (!rows.length) return [];
  const shares = rows.map((row) => row.subspace_shares);
  return [heatMap("What each subspace gives to the order of keys", shares, { name: "layer", of: rows.map((row) => row.layer) }, { name: "subspace", of: shares[0].map((_, at) => at) }, { name: "share", text: three }),
    dataTable("Posting lists over all KV heads", [column("layer"), column("lists"), column("entries"), column("keys_listed", three), column("in_lists", three),
      { name: "a query's most", value: (row) => row.ranked_shares[0], text: three, number: true }, { name: "its least", value: (row) => row.ranked_shares.at(-1), text: three, number: true }], rows)];
}

function methodSection([name, method]) {
  const parameters = Object.entries(method.parameters).map(([key, value]) => `${key} ${Array.isArray(value) ? value.join(", ") : value}`);
  const places = positions[name];
  const { tokens } = inspection.split;
  return section(name, element("p", { class: "facts small faint" }, parameters.map((one) => quoted(one))),
    clusterSection(name, "biggest", "Biggest clusters", method.biggest, places.biggest, texts, tokens),
    clusterSection(name, "spread", "Most spread clusters", method.most_spread, places.most_spread, texts, tokens),
    levels(method.layers), blocks(method.blocks), lists(method.lists));
}

showReport("What is in an index", [inspection.index, inspection.model.id], factSection(), Object.entries(inspection.methods).map(methodSection));
