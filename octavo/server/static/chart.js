// Charts as SVG.
import {el, whole} from "./api.js";

const WIDTH = 560, LEFT = 62, RIGHT = 12, TOP = 28, BOTTOM = 42;
export const short = value => (Math.abs(value) >= 1000 ? whole(value) : String(Number(value.toPrecision(4))));
function axis(values, {log}, begin, end) {
  const good = values.filter(value => Number.isFinite(value) && (!log || value > 0)), map = log ? Math.log10 : Number;
  let low = Math.min(...good), high = Math.max(...good);
  if (!(low < high)) [low, high] = good.length ? [low / 2, high * 2 || 1] : [1, 2];
  const place = value => begin + (map(value) - map(low)) / (map(high) - map(low)) * (end - begin);
  const power = 10 ** Math.floor(Math.log10(high - low)), step = [0.2, 0.5, 1, 2].find(share => high - low <= 6 * share * power) * power;
  let ticks = Array.from({length: 8}, (_, i) => (Math.ceil(low / step) + i) * step);
  if (log && high > 10 * low) {
    ticks = Array.from({length: 40}, (_, i) => 10 ** (Math.floor(map(low)) + i)).flatMap(tick => (high > 1000 * low ? tick : [tick, 2 * tick, 5 * tick]));
  }
  return {place, ticks: ticks.filter(tick => tick >= low && tick <= high)};
}
/** Return a chart. The axes are {name, log, zero, down, names}; `marks` are vertical lines [x, text].
 * A series is {label, points, kind, colour (1 to 7), open}: points [x, y, text, end of a bar]. */
export function chart(title, x, y, series, {marks = [], height = 300} = {}) {
  const bottom = height - BOTTOM, points = series.flatMap(one => one.points);
  const xs = points.flatMap(([at, , , end = at]) => [at, end]), ys = points.map(([, at]) => at);
  const across = axis([...xs, ...marks.map(([at]) => at), x.zero ? 0 : NaN], x, LEFT, WIDTH - RIGHT);
  const up = axis([...ys, y.zero ? 0 : NaN], y, ...(y.down ? [TOP + 20, bottom - 6] : [bottom, TOP]));
  const svg = el("svg:svg.chart", {viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": `${title}: ${y.name} over ${x.name}`});
  const text = (x, y, anchor, words, more) => svg.append(el("svg:text", {x, y, "text-anchor": anchor, ...more}, words));
  const line = (kind, x1, y1, x2, y2) => svg.append(el(`svg:line.${kind}`, {x1, y1, x2, y2}));
  text(0, 16, "start", title, {class: "title"});
  text((LEFT + WIDTH) / 2, height - 8, "middle", x.name);
  text(0, 0, "middle", y.name, {transform: `translate(12 ${height / 2}) rotate(-90)`});
  for (const tick of across.ticks) {
    line("grid", across.place(tick), TOP, across.place(tick), bottom);
    text(across.place(tick), bottom + 14, "middle", short(tick));
  }
  for (const tick of y.names?.keys() ?? up.ticks) {
    line("grid", LEFT, up.place(tick), WIDTH - RIGHT, up.place(tick));
    if (y.names) text(LEFT + 4, up.place(tick) - 8, "start", y.names[tick]);
    else text(LEFT - 5, up.place(tick) + 4, "end", short(tick));
  }
  marks.forEach(([value, words], i) => {
    const at = across.place(value);
    line("mark", at, TOP, at, bottom);
    text(at, bottom - 8 - 14 * i, at < WIDTH / 2 ? "start" : "end", ` ${words} `);
  });
  const key = series.map(({label, points: given, kind = "both", open, colour}, i) => {
    const tone = `c${colour ?? i % 7 + 1}${open ? ".open" : ""}`, shown = given.filter(([a, b]) => Number.isFinite(across.place(a) + up.place(b)));
    const at = ([a, b]) => `${across.place(a)} ${up.place(b)}`;
    if (["line", "both"].includes(kind)) svg.append(el(`svg:path.${tone}`, {d: shown.length ? `M${shown.map(at).join("L")}` : ""}));
    for (const [a, b, note, end] of shown) {
      const cx = across.place(a), cy = up.place(b), about = el("svg:title", `${label}: ${short(a)}, ${short(b)}`);
      if (kind === "bars") line(`bar.${tone}`, cx, cy, across.place(end), cy);
      else if (kind !== "line") svg.append(el(`svg:circle.${tone}`, {cx, cy, r: open ? 5 : 3.5}, about));
      if (note) text(cx + 6, cy - 5, "start", note);
    }
    return el(`span.key-item.${tone}`, `${open ? "○" : "●"} ${label}`);
  });
  return el("figure.card", svg, key.length > 1 ? el("figcaption", key) : null);
}
