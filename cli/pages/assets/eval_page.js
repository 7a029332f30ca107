// The page of `eval`.

const evaluation = pageData();
tellBudgets(evaluation.rows, evaluation.budgets.rows);
tellBudgets(evaluation.depths, evaluation.budgets.depths);
const wayOf = (row) => [row.method, row.variant].filter((part) => part).join(" ");
const several = new Set(evaluation.rows.map((row) => row.prefill)).size > 1;
const lineOf = (row) => (several ? `${wayOf(row)}, ${row.prefill} prefill` : wayOf(row));
const one = (value) => fixed(value, 1);
const withInterval = (value, low, high) => (low === null ? one(value) : `${one(value)} [${one(low)}, ${one(high)}]`);
const signed = (value) => (value === null ? "" : value > 0 ? `+${one(value)}` : one(value));
const bound = (value) => (value === null ? "" : one(value));

/** A budget in tokens, by which a share and a number of tokens are sorted; a share of sinks and tail counts, too. */
function budgetTokens(row) {
  return row.budgetText.endsWith("%") ? row.budget * row.tokens : row.budget;
}

const columns = [
  ...(several ? [{ name: "prefill", value: (row) => row.prefill }] : []),
  { name: "method", value: wayOf },
  { name: "budget", value: budgetTokens, text: (value, row) => row.budgetText, number: true },
  { name: "score", value: (row) => row.score, text: one, number: true },
  { name: "from", value: (row) => row.score_low, text: bound, number: true },
  { name: "to", value: (row) => row.score_high, text: bound, number: true },
  { name: "difference to dense", value: (row) => row.difference, text: signed, number: true },
  { name: "from ", value: (row) => row.difference_low, text: signed, number: true },
  { name: "to ", value: (row) => row.difference_high, text: signed, number: true },
  { name: "same as dense, %", value: (row) => row.same_as_dense, text: bound, number: true },
  { name: "kv fraction", value: (row) => row.kv_fraction, text: (value) => fixed(value, 3), number: true },
  { name: "seconds", value: (row) => row.seconds, text: (value) => fixed(value, 2), number: true },
];

function grouped(rows, keyOf) {
  const groups = new Map();
  for (const row of rows) groups.set(keyOf(row), [...(groups.get(keyOf(row)) ?? []), row]);
  return [...groups.values()];
}

function groupSection(rows) {
  const [first] = rows;
  const unit = first.unit ? `, ${first.unit}` : "";
  const dense = rows.find((row) => row.difference === null);
  const lines = grouped(rows.filter((row) => row !== dense && row.kv_fraction !== null), lineOf).map((some) => ({
    name: lineOf(some[0]),
    form: 0,
    points: some.sort((a, b) => a.kv_fraction - b.kv_fraction).map((row) => ({
      x: row.kv_fraction, y: row.score, low: row.score_low ?? row.score, high: row.score_high ?? row.score,
      text: `${withBudget(lineOf(row), row)}: score ${withInterval(row.score, row.score_low, row.score_high)}, kv fraction ${fixed(row.kv_fraction, 3)}`,
    })),
  }));
  const length = first.length === null ? "" : ` of ${count(first.length)} tokens`;
  const turn = first.turn === null ? "" : `, turn ${first.turn}`;
  return section(`${first.task}${length}${turn}`,
    element("p", { class: "small faint" }, `${count(first.questions)} questions about ${count(first.contexts)} contexts of ${count(Math.round(first.tokens))} tokens in the mean; intervals are of 95%`),
    linePlot(`Score by ${first.metric}${unit}`, { name: "kv fraction (keys and values read)", log: true, text: axisPercent }, { name: `${first.metric}${unit}`, text: plain }, lines,
      { level: dense ? { y: dense.score, name: `dense attention: ${withInterval(dense.score, dense.score_low, dense.score_high)}` } : null }),
    dataTable(`${first.metric}${unit}; difference in the same unit, paired by question${several ? `, from dense attention after the ${first.prefill} prefill` : ""}`, columns, rows));
}

/** Needles by length and depth, one map for each task and way; all in the same colours, from 0% to 100%. */
function depthSection() {
  const maps = grouped(evaluation.depths, (cell) => JSON.stringify([cell.task, lineOf(cell), cell.budgetText])).map((cells) => {
    const lengths = [...new Set(cells.map((cell) => cell.length))].sort((a, b) => a - b);
    const depths = [...new Set(cells.map((cell) => cell.depth))].sort((a, b) => a - b);
    const values = depths.map((depth) => lengths.map((length) => cells.find((cell) => cell.depth === depth && cell.length === length)?.score ?? null));
    return heatMap(`${cells[0].task}, ${withBudget(lineOf(cells[0]), cells[0])}`, values, { name: "depth", of: depths.map((depth) => `${fixed(100 * depth, 0)}%`) }, { name: "tokens", of: lengths.map(count) }, { name: "score", text: one }, [0, 100]);
  });
  return maps.length ? section("Needles by depth and length", element("div", { class: "plots" }, maps)) : null;
}

showReport("Evaluation", [evaluation.document, evaluation.model, `seed ${evaluation.seed}`],
  grouped(evaluation.rows, (row) => JSON.stringify([row.task, row.length, row.metric, row.turn])).map(groupSection), depthSection() ?? []);
