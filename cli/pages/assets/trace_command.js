// The command that asks the same question without a passage, quoted so that a shell takes every text as text.

// What a terminal would act on while it is pasted: control characters, bidi overrides, invisible characters.
const UNPASTABLE = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\u{e0000}-\u{e007f}]/gu;

/** One word of a command: bare, in single quotes, or as $'...' where characters cannot be pasted. */
function shellWord(text) {
  if (/^[\w@%+=:,./-]+$/.test(text)) return text;
  if (text.search(UNPASTABLE) < 0) return `'${text.replaceAll("'", "'\\''")}'`;
  const escaped = text.replace(/[\\']/g, "\\$&").replace(UNPASTABLE, (found) => {
    if (found === "\n") return "\\n";
    const code = found.codePointAt(0);
    return code < 0x80 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\U${code.toString(16).padStart(8, "0")}`;
  });
  return `$'${escaped}'`;
}

/**
 * The command without a passage, in which white space is any, with the options of the traced answer; null where a text
 * has a character that no command can have.
 */
function withoutCommand({ index, question, options: given }, passage) {
  const text = passage.split(/[ \t\r\n]+/).filter(Boolean).join(" ");
  if (!text || /[\u0000\ud800-\udfff]/u.test(index + question + given.join("") + text)) return null;
  const options = [...given, "--without", text, "-o", "without.html"].map(shellWord).join(" ");
  const start = `sparsekv trace --index ${shellWord(index)}`;
  return question.startsWith("-") ? `${start} ${options} -- ${shellWord(question)}` : `${start} ${shellWord(question)} ${options}`;
}
