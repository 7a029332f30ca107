// How numbers are written, the same on every page.

/** A share as per cent with three significant digits; a dash where there is none. */
function percent(share) {
  if (share === null || share === undefined || Number.isNaN(share)) return "\u2013";
  const value = 100 * share;
  if (value !== 0 && Math.abs(value) < 0.01) return value < 0 ? "> \u22120.01%" : "< 0.01%";
  return `${value.toFixed(Math.abs(value) < 9.995 ? 2 : 1)}%`;
}

/** A number with so many digits behind the point; a dash where there is none. */
function fixed(value, digits) {
  if (value === null || value === undefined || Number.isNaN(value)) return "\u2013";
  return rounded(value, digits).replace("-", "\u2212");
}

/** A number with so many digits behind the point; a tie is rounded to an even digit, as in the tables of a terminal. */
function rounded(value, digits) {
  const more = 60; // a tie has no digit behind its 5, and a number that is none has one within so many digits
  const exact = value.toFixed(digits + more);
  const below = exact.slice(0, -more).replace(/\.$/, "");
  return /^50*$/.test(exact.slice(-more)) && "02468".includes(below.at(-1)) ? below : value.toFixed(digits);
}

/** A number as a whole one, with commas between thousands. */
function count(value) {
  return Number(rounded(value, 0)).toLocaleString("en-US");
}
