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
  return value.toFixed(digits).replace("-", "\u2212");
}

/** A whole number with commas between thousands. */
function count(value) {
  return value.toLocaleString("en-US");
}
