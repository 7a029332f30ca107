// Clusters as words in their sentences, and where in the document they are.

const AROUND = 30; // tokens before and after a cluster's token that are shown at most
const MOST_PASSAGES = 60;
const ENDS = /[.!?]["')\]]?\s*$|\n\s*\n\s*$/;

/** Runs of tokens [{from, to}] that hold the sentences of these positions; those that touch are one. */
function sentencesOf(texts, positions) {
  const runs = [];
  for (const position of positions) {
    let [from, to] = [position, position + 1];
    while (from > 0 && position - from < AROUND && !ENDS.test(texts[from - 1])) from -= 1;
    while (to < texts.length && to - position < AROUND && !ENDS.test(texts[to - 1])) to += 1;
    const last = runs.at(-1);
    if (last && from <= last.to) last.to = Math.max(last.to, to);
    else runs.push({ from, to });
  }
  return runs;
}

/** One cluster: its numbers, its place in the document, and its tokens marked in their sentences. */
function clusterBox(cluster, positions, texts, tokens) {
  const own = new Set(positions);
  const runs = texts.length ? sentencesOf(texts, positions) : [];
  const shown = runs.slice(0, MOST_PASSAGES).map(({ from, to }) => {
    const parts = [];
    for (let at = from; at < to; at += 1) parts.push(own.has(at) ? element("mark", { title: `token ${count(at)}` }, visible(texts[at])) : visible(texts[at]));
    return element("li", {}, element("span", { class: "number faint" }, count(from)), element("bdi", { dir: "auto", class: "passage" }, parts.flat()));
  });
  const rest = runs.length - shown.length;
  return element("div", { class: "cluster" },
    element("p", {}, `KV head ${cluster.kv_head}, cluster ${cluster.cluster}: ${count(cluster.tokens)} tokens, key spread ${fixed(cluster.key_spread, 3)}`),
    placesOf(positions, tokens),
    texts.length ? element("ol", { class: "passages" }, shown) : element("p", { class: "faint" }, "The model's tokenizer was not there, so no words are."),
    rest > 0 ? element("p", { class: "small faint" }, `${count(rest)} passages more.`) : null);
}

/** A strip that is the document, with a line for each token of a cluster. */
function placesOf(positions, tokens) {
  const at = (position) => (1000 * position) / Math.max(1, tokens - 1);
  const content = [drawn("rect", { class: "strip", x: 0, y: 0, width: 1000, height: 22 })];
  const marks = positions.map((position) => {
    const node = drawn("rect", { class: "place", x: at(position) - 1, y: 0, width: 2, height: 22 });
    content.push(node);
    return { node, text: `token ${count(position)} of ${count(tokens)}` };
  });
  return pointedFigure("Its place in the document", 1000, 22, content, marks);
}

/** A list to choose a cluster from, and the one that is chosen. */
function clusterSection(name, kind, title, clusters, positions, texts, tokens) {
  if (!clusters.length) return [];
  const box = element("div");
  const options = clusters.map((cluster) => `${count(cluster.tokens)} tokens, key spread ${fixed(cluster.key_spread, 3)}, KV head ${cluster.kv_head}: ${Object.keys(cluster.words).slice(0, 5).join(" ")}`);
  const show = (at) => box.replaceChildren(clusterBox(clusters[at], positions[at], texts, tokens));
  return [element("h3", {}, `${title} of layer ${clusters[0].layer}`), choice("Cluster", `${kind}-${name}`, options, show), box];
}
