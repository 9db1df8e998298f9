// Explain view: recent requests, and the time line of one.
import {byId, clock, el, failure, json, ms, open, parts, percent, sentence, table} from "./api.js";

function cacheLines({text, difference}) {
  const given = [["text", "This prompt:"], ["earlier_text", "The earlier one:"]].filter(([name]) => difference?.[name]);
  return [...text.map(line => el("p", line)), ...given.flatMap(([name, title]) => [el("p", title), el("pre", difference[name])])];
}

const part = parts(byId("explain")), {form, input, state, story, list} = part;
let newest = null;

form.onsubmit = event => { event.preventDefault(); open("explain", input.value.trim()); };
part.again.onclick = refresh;
export function show(id) {
  refresh();
  story.hidden = true;
  state.textContent = id && "Loading...";
  if (id) tell(id).catch(error => { if (input.value === id) state.replaceChildren(el("span.error", error.message)); });
}

async function refresh() {
  const asked = newest = json("v1/requests");
  let shown;
  try {
    const {data} = await asked, rows = data.map(r => [
      el("button.quiet.mono", {onclick: () => open("explain", r.id)}, r.id), r.model, r.path, clock(r.created),
      {number: r.seconds.toFixed(3)}, r.completion_tokens, r.finished ? r.status : "runs"]);
    shown = rows.length ? table("storyColumns", rows) : el("p.dim", sentence("noRequests"));
  } catch (error) { shown = failure(error.message); }
  if (asked === newest) list.replaceChildren(shown);
}
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
  const told = ({cause, text}) => [el("span.swatch", {"data-cause": cause}), text];
  const spans = timeline.map(span => [{number: ms(span.begin_ms)}, {number: ms(span.ms)}, told(span)]);
  const causes = found.causes.map(sum => [{number: ms(sum.ms)}, {number: wall && percent(sum.ms / wall)}, told(sum)]);
  part.spans.replaceChildren(table("spanColumns", spans, "Parts of the time"));
  part.causes.replaceChildren(table("causeColumns", causes, "Time by cause"));
  part.cache.replaceChildren(...cacheLines(found.cache));
  part.helping.hidden = !found.advice.length;
  part.advice.replaceChildren(...found.advice.map(({setting, text}) => el("li", el("code", setting), `: ${text}`)));
  state.textContent = "";
  story.hidden = false;
}
