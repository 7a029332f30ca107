// Scales of axes: a number to a place in a picture, and where ticks are.

/** A linear scale {at, ticks} from `low` to `high` onto pixels `from` to `to`. */
function linearScale(low, high, from, to) {
  const span = high - low || 1;
  const step = [1, 2, 5, 10].map((times) => times * 10 ** Math.floor(Math.log10(span / 5))).find((one) => span / one <= 6);
  const ticks = [];
  for (let tick = Math.ceil(low / step - 1e-9) * step; tick <= high + step * 1e-9; tick += step) ticks.push(Number(tick.toPrecision(12)));
  return { at: (value) => from + ((value - low) / span) * (to - from), ticks };
}

/** A logarithmic scale with ticks at 1, 2 and 5 of each power of ten; what is not above 0 lies at its lower end. */
function logScale(low, high, from, to) {
  const [first, last] = [Math.log(low), Math.log(high)];
  const span = last - first || 1;
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const times of [1, 2, 5]) {
      const tick = Number((times * 10 ** power).toPrecision(12));
      if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
    }
  }
  return { at: (value) => from + ((Math.log(Math.max(value, low)) - first) / span) * (to - from), ticks };
}

/** Places near the wanted ones and in their order, between `low` and `high`, at least `gap` apart where there is room. */
function spreadPlaces(wanted, low, high, gap) {
  const apart = Math.min(gap, (high - low) / Math.max(1, wanted.length - 1));
  const order = wanted.map((_, at) => at).sort((one, two) => wanted[one] - wanted[two]);
  const placed = [...wanted];
  let last = low - apart;
  for (const at of order) last = placed[at] = Math.max(wanted[at], last + apart);
  last = high + apart;
  for (const at of order.reverse()) last = placed[at] = Math.min(placed[at], last - apart);
  return placed;
}
