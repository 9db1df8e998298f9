// Benchmark view: results of `octavo bench`, drawn and compared.
import {byId, el, failure, parts, percent, say, scroll, table} from "./api.js";
import {chart, short} from "./chart.js";

const MOST_REQUESTS = 2000;
const PICTURES = [distributions, timelines, sweeps, trials, ready];
const {input, clear, shown} = parts(byId("bench"));
let files = [];  // pairs of name and result

input.onchange = async () => {
  for (const file of input.files) {
    try {
      const result = JSON.parse(await file.text());
      if (result?.constructor !== Object) throw new Error("it is no result");
      files.push([file.name, result]);
    } catch (error) { say(`${file.name}: ${error.message}`); }
  }
  input.value = "";
  draw();
};
clear.onclick = () => { files = []; draw(); };
function draw() {
  const pictures = PICTURES.flatMap(make => {
    try { return make(); } catch (error) { return failure(`A file cannot be drawn: ${error.message}`); }
  });
  shown.replaceChildren(el("div.cards", pictures), compare(!pictures.length || files.length > 1));
}
/** Return the pairs of name and number in a result. */
function figures(value, name = "") {
  if (typeof value === "number") return [[name, value]];
  const isOther = !value || typeof value !== "object" || (Array.isArray(value) && typeof value[0] !== "object");
  return isOther ? [] : Object.entries(value).flatMap(([key, inner]) => figures(inner, `${name} ${key}`.trim()));
}
function compare(open) {
  const found = files.map(([, result]) => new Map(figures({...result, picture: null}))), [first] = found;
  const difference = (value, base) => el("span.dim", ` ${value >= base ? "+" : "−"}${percent(Math.abs(value / base - 1))}`);
  const cell = (value, base) => ({number: value === undefined ? "" : [short(value), base ? difference(value, base) : null]});
  const rows = unique(found.flatMap(one => [...one.keys()])).map(name => [name, ...found.map((one, i) => cell(one.get(name), i && first.get(name)))]);
  if (!rows.length) return "";
  return el("details", {open}, el("summary", "Figures"), scroll("Figures", table(["figure", ...files.map(([name]) => name)], rows)));
}
const having = (...names) => files.filter(([, result]) => names.every(name => result[name]));
const unique = list => [...new Set(list)];
const words = key => key.replaceAll("_", " ");
const number = value => value ?? NaN;
const sorted = values => values.filter(Number.isFinite).sort((a, b) => a - b);
const decode = ({ttfts, e2els, itls}, i) => (e2els ? number(e2els[i]) - number(ttfts[i]) : itls[i].reduce((sum, gap) => sum + gap, 0));
function latencies(result) {
  const {ttfts, itls = [], errors = [], output_lens: lengths} = result, good = [...ttfts.keys()].filter(i => !errors[i]);
  const found = {
    TTFT: good.map(i => ttfts[i]), TPOT: good.filter(i => lengths[i] > 1).map(i => decode(result, i) / (lengths[i] - 1)),
    ITL: good.flatMap(i => itls[i] ?? []), E2EL: good.map(i => ttfts[i] + decode(result, i)),
  };
  return Object.fromEntries(Object.entries(found).map(([unit, list]) => [unit, sorted(list).map(value => 1000 * value)]));
}
function percentile(values, share) {
  const at = share * (values.length - 1), low = Math.floor(at);
  return values.length ? values[low] + (at - low) * ((values[low + 1] ?? 0) - values[low]) : NaN;
}
function grouped(rows, point, more) {
  return [...Map.groupBy(rows, row => row.label)].map(([label, own], i) => ({label, colour: i % 7 + 1, points: own.map(point), ...more}));
}
function distributions() {
  const measured = having("ttfts", "output_lens").map(([label, result]) => ({label, found: latencies(result)}));
  return Object.entries(measured[0]?.found ?? {}).map(([unit, values]) => {
    const at = share => percentile(values, share), mark = (label, share) => [at(share), `${label} ${short(at(share))} ms`];
    const curve = list => Array.from({length: 201}, (_, i) => [percentile(list, i / 200), i / 2]);
    const series = measured.map(({label, found}) => ({label, kind: "line", points: curve(found[unit])}));
    const marks = measured.length === 1 && values.length ? [mark("median", 0.5), mark("p99", 0.99)] : [];
    return chart(unit, {name: `${unit} (ms)`, log: at(1) > 30 * at(0.5)}, {name: "Share at or below (%)"}, series, {marks});
  });
}
function timelines() {
  return having("ttfts", "start_times").map(([name, result]) => {
    const start = result.start_times.slice(0, MOST_REQUESTS), planned = result.scheduled_times ?? start;
    const first = start.map((begin, i) => begin + number(result.ttfts[i])), last = first.map((begin, i) => begin + decode(result, i));
    const order = [...start.keys()].sort((a, b) => planned[a] - planned[b]);
    const bars = (label, colour, from, to) => ({label, colour, kind: "bars",
      points: order.map((i, row) => [from[i], row, "", to[i]]).filter(([begin, , , end]) => end > begin)});
    const failed = order.map((i, row) => [result.errors?.[i] ? start[i] : NaN, row]);
    return chart(`${name}: timeline`, {name: "Time (s)", zero: true}, {name: "Request, in the order of arrival", zero: true, down: true}, [
      bars("waiting in the client", 7, planned, start), bars("until the first token", 2, start, first),
      bars("until the last token", 1, first, last), {label: "failed", colour: 5, kind: "dots", points: failed},
    ], {height: Math.min(700, 110 + 5 * start.length)});
  });
}
function sweeps() {
  const runs = having("runs").flatMap(([file, result]) => result.runs.map(run => (
    {...run, label: files.length > 1 ? `${file}: ${run.label}` : run.label, rate: Number(run.request_rate ?? Infinity)})));
  const good = runs.filter(run => run.output_throughput).sort((a, b) => a.rate - b.rate);
  return !good.length ? [] : ["ttft", "tpot"].map(unit => {
    const ranks = Object.keys(good[0]).filter(key => key.startsWith("p") && key.endsWith(`_${unit}_ms`)).map(key => parseFloat(key.slice(1)));
    const lines = (rank, open) => {
      const key = `${rank}_${unit}_ms`, rate = run => (open ? "" : run.rate < Infinity ? `${run.rate}/s` : "all at once");
      const rows = good.filter(run => run[key] > 0).map(run => ({...run, label: `${run.label}, ${rank}`}));
      return grouped(rows, run => [run.output_throughput, run[key], rate(run)], {open});
    };
    const name = unit.toUpperCase(), series = [...lines("median", true), ...lines(`p${Math.max(...ranks)}`)];
    return chart(name, {name: "Output throughput (tokens/s)", zero: true}, {name: `${name} (ms)`, log: true}, series);
  });
}
function trials() {
  return having("trials", "slo").flatMap(([name, {trials: all, slo, objective, ...ends}]) => Object.entries(slo).map(([limit, value]) => {
    const rows = all.map(trial => ({...trial, label: `${trial.budget} requests`})).sort((a, b) => a.budget - b.budget);
    const tried = [...rows, {...ends.default, label: "default"}, {...ends.winner, label: "best"}].filter(trial => trial.figures);
    const series = grouped(tried, ({figures: found}) => [number(found[limit]), number(found[objective])], {kind: "dots"});
    return chart(name, {name: words(limit), log: true}, {name: words(objective)}, series, {marks: [[value, "limit"]]});
  }));
}
function ready() {
  return having("picture").map(([name, {picture: {title, x, y, series, marks}}]) => chart(`${name}: ${title}`, x, y, series, {marks}));
}
