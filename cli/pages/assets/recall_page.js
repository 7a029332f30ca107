// The page of `recall-report`.

const report = pageData();
tellBudgets(report.rows, report.budgets.rows);
const nameOf = (row) => [row.method, row.variant, row.together > 1 ? `${row.together} together` : ""].filter((part) => part).join(" ");
const three = (value) => (value === null ? "" : fixed(value, 3));
const four = (value) => fixed(value, 4);
const MEASURE_TEXT = { recall: three, output_error: four, kv_fraction: three };
const OPTIONAL = ["missed_estimate", "recall_seen", "list_coverage", "raised", "dense"];

function measureColumn(name, text = three) {
  return { name: name.replaceAll("_", " "), value: (row) => row[name], text, number: true };
}

const columns = [
  { name: "front", value: (row) => row.front, text: (front) => (front ? "*" : "") },
  { name: "method", value: nameOf },
  { name: "budget", value: (row) => row.budget_tokens, text: (tokens, row) => row.budgetText, number: true },
  measureColumn("selected_tokens", count),
  measureColumn("recall"), measureColumn("attention_mass"), measureColumn("output_error", four), measureColumn("kv_fraction"), measureColumn("missed_mass"),
  ...OPTIONAL.filter((name) => report.rows.some((row) => row[name] !== null)).map((name) => measureColumn(name)),
];

/** One line for each form, through its budgets; colours are the method's, dashes the form's. */
function linesOf(measure) {
  const methodNames = [...new Set(report.rows.map((row) => row.method))].sort();
  const names = [...new Set(report.rows.map(nameOf))];
  return names.map((name) => {
    const rows = report.rows.filter((row) => nameOf(row) === name).sort((one, two) => one.kv_fraction - two.kv_fraction);
    const { method } = rows[0];
    const forms = names.filter((other) => report.rows.find((row) => nameOf(row) === other).method === method);
    const colour = COLOURS[methodNames.indexOf(method) % COLOURS.length];
    return { name, colour, form: forms.indexOf(name), points: rows.map((row) => ({ x: row.kv_fraction, y: row[measure], text: pointText(row) })) };
  });
}

function pointText(row) {
  const numbers = Object.entries(MEASURE_TEXT).map(([name, text]) => `${name.replaceAll("_", " ")} ${text(row[name])}`);
  return `${withBudget(nameOf(row), row)}: ${numbers.join(", ")}`;
}

function plots() {
  const reads = { name: "kv fraction (keys and values read)", log: true, text: axisPercent };
  const front = report.rows.filter((row) => row.front && row.together === 1).sort((one, two) => one.kv_fraction - two.kv_fraction);
  return element("div", { class: "plots" },
    linePlot("Output error, less is better; the broad line is the Pareto front", reads, { name: "output error", log: true, text: axisPercent }, linesOf("output_error"),
      { front: front.map((row) => ({ x: row.kv_fraction, y: row.output_error })) }),
    linePlot("Recall, more is better", reads, { name: "recall", text: axisPercent, fromZero: true }, linesOf("recall")));
}

/** The colours of a measure's maps: the same whichever method is shown. */
function scaleOf(name) {
  const known = report.maps.rows.flatMap((row) => row[name].flat()).filter((value) => value !== null);
  return known.length ? [Math.min(...known), Math.max(...known)] : null;
}

function maps() {
  const box = element("div", { class: "plots" });
  const { layers, heads, rows } = report.maps;
  const show = (at) => box.replaceChildren(...["recall", "output_error"].map((name) =>
    heatMap(`${name.replaceAll("_", " ")} of ${withBudget(nameOf(report.rows[at]), report.rows[at])}`, rows[at][name],
      { name: "layer", of: layers }, { name: "KV head", of: heads }, { name: name.replaceAll("_", " "), text: MEASURE_TEXT[name] }, scaleOf(name))));
  const options = report.rows.map((row) => withBudget(nameOf(row), row));
  return [choice("Method and budget", "mapped", options, show), box,
    element("p", { class: "small faint" }, "What a head attends to while it answers, passage by passage, a trace shows: ", typed(report.trace))];
}

function bestText() {
  const { best, within, rows } = report;
  if (rows.every((row) => row.together > 1)) return "Each row is of several queries together, so no method is named for one query; add 1 to --together.";
  if (!best) return `Nothing here reads as little as ${plain(within)} of the document's keys and values.`;
  return `Lowest error at a kv fraction up to ${plain(within)}: ${nameOf(best)} at ${report.budgets.best}, output error ${four(best.output_error)}, recall ${three(best.recall)}.`;
}

showReport("Recall report",
  [report.index, report.model, `${count(report.n_context)} tokens, ${count(report.n_middle)} indexed`, `${count(report.n_queries)} queries`, `prefill ${report.prefill}`],
  section("What each method loses, by what it reads", element("p", {}, quoted(bestText())), element("p", {}, quoted(report.answers.replaceAll("`", ""))), plots()),
  section("Numbers", dataTable("Means over queries, layers and KV heads; *: on the Pareto front, no other reads less and errs less", columns, report.rows)),
  section("Layers and heads", maps()));
