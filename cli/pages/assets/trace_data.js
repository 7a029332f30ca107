// A trace as the page uses it: what `packed_trace.py` packed, in typed arrays.

const KINDS = ["chosen", "stood_for", "missed"];
const SENTENCE_END = /[.!?\u2026\u3002\uff01\uff1f]["'\u201d\u2019)\]*_`\u300d\u300f\uff09]*\s*$|\n\s*$/;
const KIND_NAMES = { chosen: "Chosen", stood_for: "Stood for", missed: "Missed" };

function readTrace(packed) {
  const prompt = readPrompt(packed.prompt);
  return {
    ...packed.facts,
    budgetText: packed.budget_text,
    prompt,
    always: alwaysRead({ ...packed.facts, prompt }),
    byToken: readGroup(packed.by_token),
    byHead: readGroup(packed.by_head),
    records: readGroup(packed.records),
  };
}

/** The prompt's text; where each passage begins, in tokens; where each token begins, in the text. */
function readPrompt({ text, lengths, start, tokens }) {
  const tokenAt = startsOf(readColumn(lengths));
  const counts = readColumn(tokens);
  const starts = startsOf(counts);
  const prompt = { text, tokenAt, starts, first: readColumn(start), passages: counts.length };
  prompt.from = (passage) => tokenAt[starts[passage]];
  prompt.textOf = (passage) => text.slice(prompt.from(passage), prompt.from(passage + 1));
  // A long sentence is cut into passages: they say that it goes on, or that it began before.
  const goesOn = (passage) => passage >= 0 && passage < prompt.passages - 1 && !SENTENCE_END.test(prompt.textOf(passage));
  prompt.quoteOf = (passage, written = prompt.textOf(passage).trim()) =>
    `${goesOn(passage - 1) ? "\u2026 " : ""}${written}${goesOn(passage) && !written.endsWith("\u2026") ? " \u2026" : ""}`;
  prompt.passageOfToken = (token) => Math.min(runOf(starts, token), counts.length - 1);
  prompt.passageOfText = (at) => prompt.passageOfToken(runOf(tokenAt, at));
  return prompt;
}

/** Rows of shares: a column each, and lists of passages and tokens with where each row's begins. */
function readGroup(packed) {
  const group = {};
  for (const [name, value] of Object.entries(packed)) group[name] = value.counts ? readList(value) : readColumn(value);
  group.rows = group.exact.length;
  return group;
}

function readList({ counts, ...columns }) {
  const list = Object.fromEntries(Object.entries(columns).map(([name, column]) => [name, readColumn(column)]));
  return { starts: startsOf(readColumn(counts)), ...list };
}
