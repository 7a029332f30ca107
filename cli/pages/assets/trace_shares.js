// What a selection of answer tokens, layers and KV heads attended to: means of the trace's own numbers.

/**
 * A selection is {tokens: [first, last] or null for the whole answer, layer: number or null, head: number or null}.
 * Its shares: exact and the three kinds, of passages what was listed (Map: passage -> [chosen, stood for, missed]), and
 * `elsewhere`, what the lists left out. Missed is NaN without truth.
 */
function sharesOf(trace, selection) {
  const { group, rows } = rowsOf(trace, selection);
  const shares = { rows: rows.length, exact: meanOf(group.exact, rows), passages: listedPassages(group, rows), elsewhere: {} };
  KINDS.forEach((kind, at) => {
    shares[kind] = meanOf(group[kind], rows);
    let listed = 0;
    for (const passage of shares.passages.values()) listed += passage[at];
    shares.elsewhere[kind] = Math.max(0, shares[kind] - listed);
  });
  return shares;
}

/** The rows of the group that knows most about a selection: by_token, by_head, or the records. */
function rowsOf(trace, { tokens, layer, head }) {
  const ofHead = (group, row) => (layer === null || group.layer[row] === layer) && (head === null || group.kv_head[row] === head);
  if (layer === null && head === null) {
    const [first, last] = tokens ?? [0, trace.byToken.rows - 1];
    return { group: trace.byToken, rows: rowsWhere(trace.byToken, (row) => row >= first && row <= last) };
  }
  if (tokens === null) return { group: trace.byHead, rows: rowsWhere(trace.byHead, (row) => ofHead(trace.byHead, row)) };
  const { records } = trace;
  const inSpan = (row) => records.token[row] >= tokens[0] && records.token[row] <= tokens[1];
  return { group: records, rows: rowsWhere(records, (row) => inSpan(row) && ofHead(records, row)) };
}

function rowsWhere(group, wanted) {
  const rows = [];
  for (let row = 0; row < group.rows; row += 1) if (wanted(row)) rows.push(row);
  return rows;
}

function meanOf(column, rows) {
  let sum = 0;
  for (const row of rows) sum += column[row];
  return rows.length ? sum / rows.length : NaN;
}

/** Means over rows of what each lists of a passage; a passage that a row does not list counts as nothing there. */
function listedPassages(group, rows) {
  const { starts, at } = group.passages;
  const columns = KINDS.map((kind) => group.passages[kind]);
  const found = new Map();
  for (const row of rows) {
    for (let entry = starts[row]; entry < starts[row + 1]; entry += 1) {
      let sums = found.get(at[entry]);
      if (!sums) found.set(at[entry], (sums = [0, 0, 0]));
      for (let kind = 0; kind < 3; kind += 1) sums[kind] += columns[kind][entry] / rows.length;
    }
  }
  return found;
}

const MEASURES = ["recall", "attention_mass", "output_error", "kv_fraction"];

/** Recall, mass, error and KV fraction of a selection: of some tokens the mean of their records, else what the trace says. */
function measuresOf(trace, { tokens, layer, head }) {
  const ofHead = (row) => (layer === null || row.layer === layer) && (head === null || row.kv_head === head);
  if (tokens !== null) {
    const { records } = trace;
    const rows = rowsWhere(records, (row) => records.token[row] >= tokens[0] && records.token[row] <= tokens[1] &&
      ofHead({ layer: records.layer[row], kv_head: records.kv_head[row] }));
    return Object.fromEntries(MEASURES.map((name) => [name, meanOf(records[name], rows)]));
  }
  if (layer === null && head === null) return trace.measures;
  const rows = trace.by_head_measures.filter(ofHead);
  return Object.fromEntries(MEASURES.map((name) => [name, meanOf(rows.map((row) => row[name] ?? NaN), [...rows.keys()])]));
}

/** The largest tokens of the one record that is selected: [{token, weight, kind}], none where several are. */
function topTokens(trace, selection) {
  const { tokens, layer, head } = selection;
  if (!tokens || tokens[0] !== tokens[1] || layer === null || head === null) return [];
  const { rows } = rowsOf(trace, selection);
  return rows.flatMap((row) => ["chosen", "missed"].flatMap((kind) => {
    const list = trace.records[`${kind}_tokens`];
    const entries = [];
    for (let at = list.starts[row]; at < list.starts[row + 1]; at += 1) entries.push({ token: list.at[at], weight: list.weight[at], kind });
    return entries;
  }));
}

/** Of a passage's three shares: the sum of the kinds that are switched on, and the largest of them. */
function shown(passage, kinds) {
  let sum = 0;
  let largest = -1;
  KINDS.forEach((kind, at) => {
    if (!kinds[kind] || Number.isNaN(passage[at])) return;
    sum += passage[at];
    if (largest < 0 || passage[at] > passage[largest]) largest = at;
  });
  return { sum, kind: KINDS[largest] };
}
