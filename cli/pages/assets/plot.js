// A plot of lines, each with its name where it ends.

const PLOT = { width: 760, height: 460, left: 64, right: 250, top: 12, bottom: 52 };
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#7a6a00", "#3b8fc4", "#8a3ffc", "#a2191f", "#005d5d", "#6f6f6f",
  "#e69f00", "#b80058", "#4b6b00", "#5b4fd6", "#9c5b2e", "#00a3a3", "#e0607e", "#6c9a00", "#c050e0", "#33528b"];
const DASHES = [null, "7 3", "2 3", "8 3 2 3"];

/**
 * A plot. An axis is {name, log: bool, text: number => string}; a line is {name, points: [{x, y, low, high, text}], form},
 * where low and high are the ends of an interval, and `form` its number among the lines of one colour. `front` are
 * points of a broad line below all, `level` is {y, name} of a line across.
 */
function linePlot(title, x, y, lines, { front = [], level = null } = {}) {
  const points = lines.flatMap((line) => line.points);
  if (!points.length) return element("p", { class: "faint" }, "There is nothing to draw.");
  const across = axisScale(x, points.map((point) => point.x), PLOT.left, PLOT.width - PLOT.right);
  const up = axisScale(y, [...points.flatMap((point) => [point.y, point.low ?? point.y, point.high ?? point.y]), ...(level ? [level.y] : [])], PLOT.height - PLOT.bottom, PLOT.top);
  const place = (point) => `${across.at(point.x)},${up.at(point.y)}`;
  const marks = [];
  const content = [axesOf(x, y, across, up)];
  if (front.length) content.push(drawn("polyline", { class: "front", points: front.map(place).join(" ") }));
  if (level) content.push(levelOf(level, up));
  const ends = spreadPlaces(lines.map((line) => up.at(line.points.at(-1).y)), PLOT.top + 6, PLOT.height - PLOT.bottom, 14);
  lines.forEach((line, at) => {
    const group = drawn("g", { class: "line" }, drawn("polyline", { points: line.points.map(place).join(" "), "stroke-dasharray": DASHES[line.form % DASHES.length] }));
    group.style.setProperty("--own", line.colour ?? COLOURS[at % COLOURS.length]);
    for (const point of line.points) {
      if (point.low !== undefined) group.append(drawn("path", { d: `M${across.at(point.x)} ${up.at(point.low)}V${up.at(point.high)}` }));
      const node = drawn("circle", { cx: across.at(point.x), cy: up.at(point.y), r: 4 });
      marks.push({ node, text: point.text });
      group.append(node);
    }
    group.append(endOf(line, across, up, ends[at]));
    content.push(group);
  });
  return pointedFigure(title, PLOT.width, PLOT.height, content, marks);
}

function axisScale(axis, values, from, to) {
  const known = values.filter((value) => value !== null && (!axis.log || value > 0));
  if (!known.length) return linearScale(0, 1, from, to);
  const [low, high] = [Math.min(...known), Math.max(...known)];
  if (axis.log) return logScale(low * 0.8, high * 1.15, from, to);
  const room = 0.04 * (high - low || Math.abs(high) || 1);
  return linearScale(axis.fromZero ? Math.min(0, low) : low - room, high + room, from, to);
}

function axesOf(x, y, across, up) {
  const [right, bottom] = [PLOT.width - PLOT.right, PLOT.height - PLOT.bottom];
  return drawn("g", { class: "axes" },
    across.ticks.map((tick) => [drawn("path", { d: `M${across.at(tick)} ${PLOT.top}V${bottom}` }), drawn("text", { x: across.at(tick), y: bottom + 16, "text-anchor": "middle" }, x.text(tick))]),
    up.ticks.map((tick) => [drawn("path", { d: `M${PLOT.left} ${up.at(tick)}H${right}` }), drawn("text", { x: PLOT.left - 6, y: up.at(tick) + 4, "text-anchor": "end" }, y.text(tick))]),
    drawn("text", { x: (PLOT.left + right) / 2, y: PLOT.height - 12, "text-anchor": "middle", class: "name" }, x.name),
    drawn("text", { transform: `translate(13 ${(PLOT.top + bottom) / 2}) rotate(-90)`, "text-anchor": "middle", class: "name" }, y.name));
}

function levelOf(level, up) {
  return drawn("g", { class: "level" }, drawn("path", { d: `M${PLOT.left} ${up.at(level.y)}H${PLOT.width - PLOT.right}` }),
    drawn("text", { x: PLOT.left + 6, y: up.at(level.y) - 5 }, level.name));
}

/** A line's name beside the plot, with a thin line from its last point. */
function endOf(line, across, up, height) {
  const [last, column] = [line.points.at(-1), PLOT.width - PLOT.right + 18];
  return drawn("g", { class: "end" }, drawn("path", { d: `M${across.at(last.x)} ${up.at(last.y)}L${column - 4} ${height}` }),
    drawn("text", { x: column, y: height + 4 }, line.name));
}
