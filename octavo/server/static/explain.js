// Explain view: recent requests of the key, and the time line of one.
import {byId, clock, el, failure, json, ms, open, parts, percent, sentence, table} from "./api.js";

function cacheLines({miss, difference, given_up: lost, ...counts}) {
  const lines = [el("p", sentence("cached", counts))];
  const where = typeof miss?.message === "number" ? `, in message ${miss.message}` : "";
  if (miss) lines.push(el("p", sentence(miss.reason, {...miss, where})));
  if (difference?.volatile) lines.push(el("p.warn", `What differs is ${difference.volatile}.`));
  for (const [name, title] of [["text", "This prompt"], ["earlier_text", "The earlier one"]]) {
    if (difference?.[name]) lines.push(el("p", `${title}:`), el("pre", difference[name]));
  }
  if (lost) lines.push(el("p", sentence("lost", {...lost, by: lost.by?.number ?? "(hidden)", ago: lost.seconds_before.toFixed(1)})));
  return lines;
}

function advice({estimate, saved_ms, setting, text}) {
  const saved = saved_ms === null ? "" : ` would save ${estimate === "at_most" ? "at most" : "about"} ${ms(saved_ms)}`;
  return el("li", el("code", setting), `${saved}. ${text}`);
}

const part = parts(byId("explain")), {form, input, state, story, list} = part;
form.onsubmit = event => {
  event.preventDefault();
  open("explain", input.value.trim());
};
part.again.onclick = refresh;
export function show(id) {
  refresh();
  story.hidden = true;
  state.textContent = id && "Loading...";
  if (id) tell(id).catch(error => { state.replaceChildren(el("span.error", error.message)); });
}

async function refresh() {
  try {
    const {data} = await json("v1/requests"), rows = data.map(r => [
      el("button.quiet.mono", {onclick: () => open("explain", r.id)}, r.id), r.model, r.path, clock(r.created),
      {number: r.seconds.toFixed(3)}, r.completion_tokens, r.finished ? r.status : "runs"]);
    list.replaceChildren(rows.length ? table("storyColumns", rows) : el("p.dim", "No requests yet."));
  } catch (error) { list.replaceChildren(failure(error.message)); }
}
/** Tell of a request. Each part of the time line is also a row of the table. */
async function tell(id) {
  input.value = id;
  const found = await json(`v1/requests/${encodeURIComponent(id)}/explain`), {wall_ms: wall, first_token_ms: first, timeline} = found;
  if (input.value !== id) return;
  part.name.textContent = found.id;
  part.sums.textContent = [ms(wall), first !== null && `first token after ${ms(first)}`, `${found.completion_tokens} tokens`,
    found.finished ? `status ${found.status}` : "still running", found.path].filter(Boolean).join(", ");
  part.line.ariaLabel = sentence("timeLine", {time: ms(wall)});
  part.line.replaceChildren(...timeline.map(span => {
    const bar = el("span", {title: `${ms(span.ms)}: ${span.text}`, "data-cause": span.cause});
    bar.style.flexGrow = span.ms;
    return bar;
  }));
  const spans = timeline.map(span => [{number: ms(span.begin_ms)}, {number: ms(span.ms)}, span.text]);
  const causes = found.causes.map(({ms: time, text}) => [{number: ms(time)}, {number: wall && percent(time / wall)}, text]);
  part.spans.replaceChildren(table("spanColumns", spans, "Parts of the time"));
  part.causes.replaceChildren(table("causeColumns", causes, "Time by cause"));
  part.cache.replaceChildren(...cacheLines(found.cache));
  part.helping.hidden = !found.advice.length;
  part.advice.replaceChildren(...found.advice.map(advice));
  state.textContent = "";
  story.hidden = false;
}
