// Benchmark view.

export function mount(element, {el}) {
  element.append(el("h2", {}, "Benchmark"));
}
