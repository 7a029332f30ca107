// Columns of numbers as `columns.py` packs them.

/** The numbers of a column: whole ones as they were stored, shares as float64 with NaN where there is none. */
function readColumn(column) {
  const bytes = bytesOf(column.data);
  if (column.type === "u1") return bytes;
  if (column.type === "u2") return new Uint16Array(bytes.buffer);
  if (column.type === "u4") return new Uint32Array(bytes.buffer);
  return readShares(new Uint16Array(bytes.buffer), new Float64Array(bytesOf(column.others).buffer));
}

function readShares(codes, others) {
  const shares = new Float64Array(codes.length);
  let other = 0;
  for (let at = 0; at < codes.length; at += 1) {
    const share = SHARE_OF_CODE[codes[at]];
    shares[at] = share < 0 ? others[other++] : share;
  }
  return shares;
}

/** The share of every code; -1 where it is stored aside. */
const SHARE_OF_CODE = (() => {
  const shares = new Float64Array(65536).fill(-1);
  for (let decade = 0; decade < 7; decade += 1) {
    for (let digits = 1000; digits < 10000; digits += 1) shares[1 + 9000 * decade + digits - 1000] = digits / 10 ** (4 + decade);
  }
  shares[0] = 0;
  shares[63001] = 1;
  shares[65534] = NaN;
  return shares;
})();

function bytesOf(base64) {
  const binary = atob(base64);
  const bytes = new Uint8Array(binary.length);
  for (let at = 0; at < binary.length; at += 1) bytes[at] = binary.charCodeAt(at);
  return bytes;
}

/** Where each of some runs begins, and where the last one ends, from their lengths. */
function startsOf(lengths) {
  const starts = new Uint32Array(lengths.length + 1);
  for (let at = 0; at < lengths.length; at += 1) starts[at + 1] = starts[at] + lengths[at];
  return starts;
}

/** The last of some starts that is not above a value. */
function runOf(starts, value) {
  let low = 0;
  let high = starts.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (starts[middle] <= value) low = middle;
    else high = middle - 1;
  }
  return low;
}
