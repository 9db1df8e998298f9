// Benchmark view: figures of files of `octavo bench`, side by side.

import {el, note, percent, say, scroll, table} from "./api.js";

const plain = value => (Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4))));
/** Return the pairs of name and number in a result; lists of numbers are left out. */
function figures(value, name = "") {
  if (typeof value === "number") return [[name, value]];
  const isOther = !value || typeof value !== "object" || (Array.isArray(value) && typeof value[0] !== "object");
  return isOther ? [] : Object.entries(value).flatMap(([key, inner]) => figures(inner, `${name} ${key}`.trim()));
}

export function mount(element) {
  let files = [];
  const shown = el("div");
  const input = el("input", {type: "file", id: "bench-files", accept: ".json", multiple: true, onchange: async () => {
    for (const file of input.files) {
      try {
        const result = JSON.parse(await file.text());
        if (result?.constructor !== Object) throw new Error("it is no result");
        files.push([file.name, new Map(figures(result))]);
      } catch (error) { say(`${file.name}: ${error.message}`); }
    }
    input.value = "";
    draw();
  }});
  element.append(el("h2", {}, "Benchmark results"),
    note("Open files of octavo bench to compare their figures. They stay in this browser; --plot draws their pictures."),
    el("div", {class: "row"}, el("label", {for: "bench-files"}, "Files"), input,
      el("button", {onclick: () => { files = []; draw(); }}, "Clear")), shown);

  function draw() {
    const difference = (value, base) => el("span", {class: "dim"}, ` ${value >= base ? "+" : "−"}${percent(Math.abs(value / base - 1))}`);
    const cell = (value, base) => ({number: value === undefined ? "" : [plain(value), base ? difference(value, base) : null]});
    const names = new Set(files.flatMap(([, found]) => [...found.keys()])), [first] = files;
    const rows = [...names].map(name => [name, ...files.map(([, found], i) => cell(found.get(name), i && first[1].get(name)))]);
    shown.replaceChildren(rows.length ? scroll("Figures", table(["figure", ...files.map(([name]) => name)], rows)) : "");
  }
}
