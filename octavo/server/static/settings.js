// Settings of a conversation. A field with `data-json` holds JSON if it begins with that text.
import {byId, el} from "./api.js";

const inputs = [...byId("settings").querySelectorAll("[name]")];
for (const input of inputs) {
  input.setAttribute("aria-describedby", `${input.id}-error`);
  input.after(el("p.bad", {id: `${input.id}-error`}));
}
export function showSettings(settings, changed) {
  for (const input of inputs) {
    const {name} = input, holder = name in settings ? settings : settings.sampling;
    input.value = holder[name] ?? "";
    fail(input, "");
    input.oninput = () => { holder[name] = input.value; fail(input, ""); changed(); };
  }
}
/** Show what is wrong with a setting. */
function fail(input, text) {
  byId(`${input.id}-error`).textContent = text;
  input.ariaInvalid = String(Boolean(text));
  if (!text) return;
  byId("settings").hidden = false;
  input.closest("details")?.setAttribute("open", "");
  input.focus();
}
/** Return the fields of a request that settings stand for. Raises Error, shown at its field. */
export function readSettings({sampling, ...own}) {
  const texts = {...sampling, ...own}, given = {};
  let current;
  try {
    for (current of inputs) {
      const text = (texts[current.name] ?? "").trim(), {json} = current.dataset;
      if (text) given[current.name] = json !== undefined && text.startsWith(json) ? JSON.parse(text) : text;
    }
    const {system: _, logprobs, schema, tools, choice = "auto", other, ...fields} = given;
    if (logprobs) Object.assign(fields, {logprobs: true, top_logprobs: logprobs});
    if (tools) {
      current = byId("set-tools");
      if (!Array.isArray(tools)) throw new Error("give a list of tools");
      fields.tools = tools.map(tool => (tool?.function ? tool : {type: "function", function: tool}));
      fields.tool_choice = ["auto", "none", "required"].includes(choice) ? choice : {type: "function", function: {name: choice}};
    }
    if (schema !== undefined) fields.response_format = {type: "json_schema", json_schema: {name: "answer", schema}};
    return {...fields, ...other};
  } catch (error) {
    fail(current, `Not valid: ${error.message}`);
    throw new Error(`${current.labels[0].textContent} is not valid: ${error.message}`);
  }
}
